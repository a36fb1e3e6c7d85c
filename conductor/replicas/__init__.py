"""Several conductors that share their state over one Redis."""
