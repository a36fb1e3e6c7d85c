"""What a decision costs, and what the index does in a second."""
