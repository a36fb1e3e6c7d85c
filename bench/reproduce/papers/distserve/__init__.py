"""DistServe (OSDI '24)."""
