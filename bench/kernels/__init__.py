"""`tiffin bench kernels`: gather, scatter and the other kernels, each beside a plain copy."""
