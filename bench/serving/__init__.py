"""Real processes that serve: vLLM instances on a pool, a conductor and a gateway; and a client.

`servers.py` starts vLLM and the gateway, `conducting.py` the conductor; `presence.py` registers an
instance there; `split_service.py` puts them together. `completions.py` is the client.
"""
