"""One client's connection to one node: frames, leases, the mapped region."""
