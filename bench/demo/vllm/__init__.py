"""The demo with real vLLM processes: `tiffin demo --engine vllm`.

`interpreter.py` finds a Python that has vLLM; `servers.py` starts vLLM and the gateway;
`completions.py` is the client; `run.py` runs the phases; `report.py` shows what came of it.
"""
