"""What tells the index which blocks are where: nodes, engines, and what was routed."""
