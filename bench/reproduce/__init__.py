"""Published results, computed again: `tiffin reproduce`.

`evidence.py` is what a reproduction finds, `registry.py` knows all of them, `papers/` has one file
for each, `inputs.py` the traces that ship with Tiffin; `mooncake_systems.py` and
`synthetic_look_alike.py` are what several of Mooncake's figures share; `plots.py` and `report.py`
show what was found.
"""
