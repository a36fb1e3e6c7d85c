"""`tiffin bench hbm`: a GPU's memory and the host's, each verb beside a plain copy of its bytes."""
