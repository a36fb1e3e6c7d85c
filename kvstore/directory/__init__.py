"""Which nodes of a pool have which block: a hint, rebuilt from the nodes at any time.

    directory = open_directory("redis://10.0.0.5:6379/0")
    for key, numbers in zip(keys, directory.locate(keys)): ...

The data model and what happens when Redis fails: docs/directory.md
"""

from __future__ import annotations

from .base import Directory, DirectoryEvent, NodeRecord
from .embedded import EmbeddedDirectory
from .host import host_id
from .url import check_pool, parse_redis


def open_directory(url: str, *, pool: str = "default") -> Directory:
    """The directory at `url`; pools of different names in one Redis know nothing of each other.

    `embedded:` or `embedded:NAME` is a directory of this process, the same for all who name it.
    Nothing is connected yet, so a Redis that is down is no error here. Raises InvalidInput for a
    URL that can't work.
    """
    check_pool(pool)
    scheme, _, name = url.partition(":")
    if scheme == "embedded":
        if name:
            check_pool(name)
        return EmbeddedDirectory.named(f"{pool}:{name}")
    options = parse_redis(url)
    # Only pools of many machines need the library: 60 ms of imports.
    from .redis import RedisDirectory

    return RedisDirectory(options, pool=pool)


__all__ = [
    "Directory",
    "DirectoryEvent",
    "EmbeddedDirectory",
    "NodeRecord",
    "host_id",
    "open_directory",
]
