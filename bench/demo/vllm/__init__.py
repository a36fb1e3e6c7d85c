"""The demo with real vLLM processes: `tiffin demo --engine vllm`.

`interpreter.py` finds a Python that has vLLM; `run.py` runs the phases, with the processes of
`bench/serving`; `report.py` shows what came of it.
"""
