"""A pool of child processes on one machine."""
