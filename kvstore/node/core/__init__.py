"""A node's decisions: leases, reservations, placement, eviction, and what it publishes. Pure."""
