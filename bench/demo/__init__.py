"""The demo: a slice of a real trace, answered by single processes, then by workers of a conductor.

`cli.py` is the command, `run.py` runs the phases. `router.py` asks the conductor, which
`bench/serving` starts, and sends requests to the engine processes, each a `worker.py` (with
`engine.py`; `children.py` starts them); `overload.py` sends too many requests. `model.py` and
`trace.py` make the same model and the same prompts in every process; `report.py`, `decisions.py`
and `plot.py` show the results. docs/demo.md explains them.
"""
