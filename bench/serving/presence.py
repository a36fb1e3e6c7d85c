"""An engine process's reports to the conductor: registration, load, and events of requests."""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Self

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.errors import ConductorError
from tiffin.conductor.records import RequestEvent

if TYPE_CHECKING:
    from collections.abc import Callable

    from tiffin.conductor.records import InstanceSpec, Load

log = logging.getLogger(__name__)

HEARTBEAT_S = 1.0


class Presence:
    """Registers an instance, and sends heartbeats with its registration until it is closed.

    `load` is called from a thread of its own. If the conductor does not answer, the engine goes on:
    the error is logged, and the heartbeat repeated a second later. Raises ConductorError if the
    first registration fails.
    """

    def __init__(self, url: str, spec: InstanceSpec, load: Callable[[], Load]) -> None:
        self._spec, self._load = spec, load
        self._events, self._beats = ConductorClient(url), ConductorClient(url)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)
        try:
            self._beats.register(spec, load())
        except ConductorError:
            self._close_clients()
            raise
        self._thread.start()

    def say(self, request: str, kind: str, tokens: int = 0) -> None:
        """Report an event of a request. Call it from one thread only."""
        try:
            self._events.observe(RequestEvent(request, kind, tokens))
        except ConductorError as error:
            log.warning("the conductor did not take %r of %r: %s", kind, request, error)

    def close(self) -> None:
        """Stop the heartbeats."""
        self._closing.set()
        self._thread.join()
        self._close_clients()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _beat(self) -> None:
        while not self._closing.wait(HEARTBEAT_S):
            try:
                self._beats.register(self._spec, self._load())
            except ConductorError as error:
                log.warning("the conductor did not take a heartbeat: %s", error)

    def _close_clients(self) -> None:
        self._events.close()
        self._beats.close()
