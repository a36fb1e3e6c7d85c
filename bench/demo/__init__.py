"""The demo: a slice of a real trace, answered by single processes, and by a conductor's workers.

`cli.py` is the command, `run.py` goes through the phases. `conducting.py` starts the conductor,
`router.py` asks it and sends requests to `worker.py`, one engine process each (`engine.py`,
`presence.py`; `children.py` starts them); `overload.py` sends too many. `model.py` and `trace.py`
make the same model and the same prompts everywhere; `report.py`, `decisions.py` and `plot.py` show
what came out. docs/demo.md tells how to read it.
"""
