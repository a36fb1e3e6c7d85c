"""A pool with a token in a real Redis, and a forger that can write to that Redis."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import pytest
from attacks.forger import Forger
from attacks.tokenpool import TokenPool
from directory.redisserver import RedisServer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="session")
def attacked_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def pool(attacked_redis: RedisServer, tmp_path: Path) -> Iterator[TokenPool]:
    with contextlib.closing(TokenPool(attacked_redis.url, tmp_path)) as pool:
        yield pool


@pytest.fixture
def forger(attacked_redis: RedisServer, pool: TokenPool) -> Forger:
    return Forger(attacked_redis.client(), pool.name)
