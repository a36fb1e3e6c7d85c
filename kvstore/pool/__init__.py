"""A client over many nodes: where blocks are read from, and where they are put."""
