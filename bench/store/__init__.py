"""`tiffin bench store`: the costs of the store, each beside its limit, measured in the same run."""
