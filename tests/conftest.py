"""What every test needs: shared helpers can be imported, and Hypothesis has one profile."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings

# `--import-mode=importlib` puts no folder on the path. Helpers of the store's tests live in
# tests/kvstore/kvsupport.py, under a name that nothing else has.
sys.path.insert(0, str(Path(__file__).parent / "kvstore"))

# Without a GPU, kernels run in Triton's interpreter, which it has to know before it is imported.
if not any(os.path.exists(device) for device in ("/dev/nvidiactl", "/dev/kfd")):
    os.environ.setdefault("TRITON_INTERPRET", "1")

# A shared machine with two cores has slow moments; a test that hangs is caught by pytest-timeout.
settings.register_profile(
    "tiffin", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tiffin")
