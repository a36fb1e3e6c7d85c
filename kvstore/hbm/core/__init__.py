"""The decisions of a GPU's HBM tier. No I/O, threads or clock."""
