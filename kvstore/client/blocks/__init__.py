"""Blocks under a lease or reservation: typed views, selections, verified copies."""
