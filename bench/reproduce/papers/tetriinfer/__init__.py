"""TetriInfer (arXiv 2401.11181)."""
