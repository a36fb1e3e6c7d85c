"""`tiffin bench` and `tiffin demo`: the costs of Tiffin, beside the limits of the same machine."""
