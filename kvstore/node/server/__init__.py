"""The servers of a node: its unix socket and its network port."""
