"""Several processes that serve one port as one gateway: their supervisor, and what they share."""
