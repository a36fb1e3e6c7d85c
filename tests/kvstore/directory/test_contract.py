"""Every kind of directory keeps the same promises."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING

import pytest

from tiffin.kvstore.directory.embedded import EmbeddedDirectory
from tiffin.kvstore.directory.testing import DirectoryContract

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from directory.redisserver import RedisCluster, RedisServer

    from tiffin.kvstore.directory.redis import RedisDirectory
    from tiffin.kvstore.directory.testing import OpenHandle


class TestEmbedded(DirectoryContract):
    @pytest.fixture
    def open_handle(self, pool: str) -> Iterator[OpenHandle]:
        with contextlib.ExitStack() as stack:

            def open_handle(registration_ttl_s: float = 10.0) -> EmbeddedDirectory:
                directory = EmbeddedDirectory.named(pool, registration_ttl_s=registration_ttl_s)
                stack.callback(directory.close)
                return directory

            yield open_handle


class TestRedis(DirectoryContract):
    @pytest.fixture
    def open_handle(
        self, shared_redis: RedisServer, open_redis: Callable[..., RedisDirectory]
    ) -> OpenHandle:
        return partial(open_redis, shared_redis.url)


@pytest.mark.slow
class TestRedisCluster(DirectoryContract):
    @pytest.fixture
    def open_handle(
        self, shared_cluster: RedisCluster, open_redis: Callable[..., RedisDirectory]
    ) -> OpenHandle:
        return partial(open_redis, shared_cluster.url)
