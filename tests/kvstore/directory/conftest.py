"""One Redis and one small cluster for all tests that don't stop them; each test has its pool."""

from __future__ import annotations

import contextlib
import dataclasses
import uuid
from typing import TYPE_CHECKING

import pytest
from directory.redisserver import RedisCluster, RedisServer

from tiffin.kvstore.directory.base import REGISTRATION_TTL_S
from tiffin.kvstore.directory.redis import RedisDirectory
from tiffin.kvstore.directory.url import parse_redis

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@pytest.fixture(scope="session")
def shared_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that no test stops."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(scope="session")
def shared_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisCluster]:
    """Three shards that no test stops."""
    with RedisCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def own_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server that the test may stop, kill and empty."""
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def pool() -> str:
    """A pool that no other test uses."""
    return f"test-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def open_redis(pool: str) -> Iterator[Callable[..., RedisDirectory]]:
    """A function that opens handles of one pool: `open_redis(url, registration_ttl_s=...)`."""
    with contextlib.ExitStack() as stack:

        def open_handle(
            url: str, registration_ttl_s: float = REGISTRATION_TTL_S, **times: float
        ) -> RedisDirectory:
            # Readers see changes after a moment rather than a second.
            times = {"membership_age_s": 0.05, **times}
            options = parse_redis(url)
            if "timeout=" not in url:  # a server that is delayed for a moment is not down
                options = dataclasses.replace(options, timeout_s=20.0)
            directory = RedisDirectory(
                options, pool=pool, registration_ttl_s=registration_ttl_s, **times
            )
            stack.callback(directory.close)
            return directory

        yield open_handle
