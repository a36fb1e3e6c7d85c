"""Makes llamasupport.py of this folder importable; a client and a model for connectors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tiffin.kvstore import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def client() -> Iterator[Client]:
    from llamasupport import POOL

    with Client.open(POOL) as client:
        yield client


@pytest.fixture(scope="module")
def model() -> Any:
    from llamasupport import make_model

    return make_model()
