"""The conductor as a process: its feeds, its orders to nodes, and its REST service on a port."""
