"""What another policy or pool would have made of the requests that a conductor has recorded.

`setup.py` is what is simulated, as recorded and with changes; `replay.py` lets the recorded
requests come again; `calibrating.py` learns how slow the hardware was; `comparison.py` measures
what was observed and what was simulated in one way, and says how far they are apart; `report.py`
shows it.
"""
