"""A recording of what came, what was decided, and what came of it: lines of JSON, to be replayed.

`lines.py` has the format (docs/conductor/recording.md), `recorder.py` makes the lines, and
`recording_file.py` writes them, in a thread of its own.
"""
