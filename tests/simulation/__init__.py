"""A whole pool in one thread, on a virtual clock, from one seed. See docs/simulation.md."""
