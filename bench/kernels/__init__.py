"""`tiffin bench kernels`: gather, scatter and their kin, each beside a plain copy."""
