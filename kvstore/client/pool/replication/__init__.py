"""Replication: nodes copy blocks from each other, and evacuate their own before they leave."""
