"""Makes the latency profiles that ship with the conductor."""
