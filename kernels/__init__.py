"""Kernels that move KV between an engine's pages and Tiffin's blocks, each with a torch reference.

Nothing is imported here: most of this package needs torch, and the kernels need Triton.
"""
