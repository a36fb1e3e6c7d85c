"""Makes helpers of these tests importable: pagedsupport.py, a name that is used nowhere else."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
