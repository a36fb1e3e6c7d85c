"""`tiffin bench store`: what the store costs, each number beside the limit of the same run."""
