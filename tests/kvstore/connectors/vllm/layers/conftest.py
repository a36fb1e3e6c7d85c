"""The embedded node of the tests that need torch, which is imported only for these."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from kvsupport import fresh_prefix

from tiffin.kvstore.connectors.vllm.pool_link import PoolLink

if TYPE_CHECKING:
    from collections.abc import Iterator

    from test_worker_side import GatedLink

    from tiffin.kvstore import Client, Prefix


@pytest.fixture
def link() -> Iterator[GatedLink]:
    from test_worker_side import URL, GatedLink

    link = PoolLink.shared(URL, "always")
    yield GatedLink(link)
    link.close()


@pytest.fixture
def client(link: GatedLink) -> Client:
    client: Client = link.call(lambda client: client)
    return client


@pytest.fixture
def prefix() -> Prefix:
    from pagesupport import schema_of
    from test_worker_side import BLOCKS

    return fresh_prefix(BLOCKS, schema_of(1))
