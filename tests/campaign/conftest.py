"""Makes the support modules of the conductor's tests importable, for the soak of its gateway."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "conductor"))
