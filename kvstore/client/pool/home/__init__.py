"""The node on this host, over shared memory."""
