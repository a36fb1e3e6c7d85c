"""Long campaigns against the whole of Tiffin: `python -m tests.campaign PART [OPTIONS]`."""
