"""The verbs of a client of one node, and their argument checks."""
