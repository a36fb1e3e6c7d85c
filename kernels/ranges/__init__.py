"""Copies of many small byte ranges by one kernel."""
