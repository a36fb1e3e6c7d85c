"""The demo: two processes answer a slice of a real trace, without a pool and with one.

`cli.py` is the command, `run.py` starts the nodes and the workers and collects their rows,
`worker.py` is one engine process, `model.py` and `trace.py` make the same model and the same
prompts in each of them, `report.py` shows what came out. docs/demo.md tells how to read it.
"""
