"""Where a block and an engine's cache keep each head, and which bytes a move touches."""
