"""A fleet of real vLLMs with few pages, each at a node of its own of one pool, behind a conductor
and a gateway, and users who talk with it.

`service.py` starts it, `users.py` are its load, `rows.py` what is measured.
"""
