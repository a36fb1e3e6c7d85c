"""Helpers of these tests can be imported: pagedsupport.py, under a name that nothing else has."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
