"""A pool of processes for tests that stop or kill some of them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from faults.faultpool import FaultPool

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def pool(commands_folder: Path, tmp_path: Path) -> Iterator[FaultPool]:
    with FaultPool(commands_folder, tmp_path) as pool:
        yield pool
