"""Planning offline: which instances, of which role, for a workload and its objectives.

`workload.py` is what is asked, `memory.py` how much KV an instance holds; `prefill_role.py` and
`batching_role.py` simulate instances of one role, fast and without a conductor; `attainment.py`
says how many requests meet their objectives. `placement.py` has DistServe's two searches,
`ratio.py` the one behind `tiffin plan`, whose best answers `confirm.py` tries in the whole
simulation.
"""
