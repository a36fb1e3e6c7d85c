"""Where a block and an engine's cache store each head, and which bytes a move touches."""
