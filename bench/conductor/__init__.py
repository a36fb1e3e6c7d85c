"""`tiffin bench conductor`: the cost of a decision, and the index's events per second."""
