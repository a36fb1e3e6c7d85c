"""The directory of a pool: which nodes have which block. A hint, which the nodes can rebuild at any
time.

    directory = open_directory("redis://10.0.0.5:6379/0")
    for key, numbers in zip(keys, directory.locate(keys)): ...

The data model and what happens when Redis fails: docs/directory.md
"""

from __future__ import annotations

from ..extras import need
from .base import Directory, DirectoryEvent, NodeRecord
from .embedded import EmbeddedDirectory
from .host_id import host_id
from .url import check_pool, parse_redis


def open_directory(url: str, *, pool: str = "default", token: bytes = b"") -> Directory:
    """Open the directory at `url`. Pools of different names in one Redis are isolated from each
    other, and so are nodes and readers with different `token`s.

    `embedded:` or `embedded:NAME` is a directory in this process, shared by all callers that use
    its name. Connects lazily, so a Redis that is down is no error here. Raises InvalidInput for an
    invalid URL, MissingExtra without the library for Redis.
    """
    check_pool(pool)
    scheme, _, name = url.partition(":")
    if scheme == "embedded":
        if name:
            check_pool(name)
        return EmbeddedDirectory.named(f"{pool}:{name}")
    options = parse_redis(url)
    # Only pools of many machines need the library: 60 ms of imports.
    need("a directory in Redis", "redis")
    from .redis import RedisDirectory

    return RedisDirectory(options, pool=pool, token=token)


__all__ = [
    "Directory",
    "DirectoryEvent",
    "EmbeddedDirectory",
    "NodeRecord",
    "host_id",
    "open_directory",
]
