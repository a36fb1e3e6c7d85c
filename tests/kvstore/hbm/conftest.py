"""Pools and HBM stores for these tests. Nothing here imports torch before a test that needs it."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from hbmsupport import POOL_BYTES, SCHEMAS, devices, hbm_store
from waysupport import NetworkNode

from tiffin.kvstore import Client
from tiffin.kvstore.node.node import Node, NodeOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore import KVSchema
    from tiffin.kvstore.hbm import HbmStore


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`device`: torch, which knows the devices, is imported only for modules that ask for them."""
    if "device" in metafunc.fixturenames:
        metafunc.parametrize("device", devices())


@pytest.fixture(params=sorted(SCHEMAS))
def schema(request: pytest.FixtureRequest) -> KVSchema:
    return SCHEMAS[request.param]


@pytest.fixture
def client() -> Iterator[Client]:
    with Client.open(f"embedded:?dram={POOL_BYTES}&prefault=0") as client:
        yield client


@pytest.fixture
def network_client() -> Iterator[Client]:
    """A client of a node that shares no memory with this process."""
    node = NetworkNode(Node(NodeOptions(POOL_BYTES, prefault=False)))
    with contextlib.closing(node), Client.open(node.url) as client:
        yield client


@pytest.fixture
def store(client: Client, schema: KVSchema, device: str) -> Iterator[HbmStore]:
    with hbm_store(client, device, schema) as store:
        yield store
