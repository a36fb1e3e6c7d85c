"""Traces of requests: reading, scaling, describing and generating them.

`trace.py` is the record that all others share, `readers.py` and `writer.py` the files, `scaling.py`
changes a trace, `statistics.py` describes it (with `ideal_cache.py` and `turns.py`), `generator.py`
and `bursts.py` make one from parameters, `look_alike.py` one from another, and `comparison.py` says
how near it came. Everything but the files and `cli.py` is pure.
"""
