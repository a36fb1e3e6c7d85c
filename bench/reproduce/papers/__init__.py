"""One file for each published table or figure; `registry.py` finds them all."""
