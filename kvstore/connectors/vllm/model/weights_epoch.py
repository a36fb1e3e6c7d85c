"""Which weights an engine computes with, as a part of its keys' namespace.

An engine starts with the weights of its files, which the schema names. Whoever gives it others then
resets its caches, and that begins an epoch: under the name that the fleet's `weights_version_file`
has got meanwhile, or, as nobody else can know what it computes with, under one that is its own.
"""

from __future__ import annotations

import json
import logging
import uuid
from hashlib import blake2b
from typing import TYPE_CHECKING

from ....errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


class WeightsEpoch:
    """The epoch of one engine's keys. Not thread-safe."""

    def __init__(self, read: Callable[[], str]) -> None:
        """`read` gives the version's name, "" for the weights of the model's files. Raises what it
        raises, InvalidInput."""
        self._read = read
        self._named = self.version = read()

    def begin(self) -> None:
        """The weights may be others from now on. Raises nothing."""
        try:
            named = self._read()
        except InvalidInput as error:
            log.error("blocks are this engine's own until the next reset: %s", error)
            named = self._named
        # A name that stands there since before the reset is that of the weights before it.
        self.version = named if named != self._named else f"\0{uuid.uuid4().hex}"
        self._named = named

    def scope(self, namespace: str) -> str:
        """What is appended to the engine's namespace for a request that has `namespace` (32 digits
        or nothing): as many digits, or nothing."""
        if not self.version:
            return namespace
        content = json.dumps([self.version, namespace])
        return blake2b(content.encode(), digest_size=16).hexdigest()
