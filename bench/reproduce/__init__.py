"""Published results, computed again: `tiffin reproduce`.

`evidence.py` is what a reproduction finds, `registry.py` knows all of them, `papers/` has one file
for each table or figure, `setups/` what they are run on; `report.py` shows what was found.
"""
