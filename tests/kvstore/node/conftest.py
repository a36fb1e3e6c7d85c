"""A client of the `node` fixture of a test file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tiffin.kvstore import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore.node.node import Node


@pytest.fixture
def client(node: Node) -> Iterator[Client]:
    with Client.attach(node) as client:
        yield client
