"""The cost model: all formulas for time (prefill, decode, transfers), and their calibration.
Pure."""
