"""What an engine process tells the conductor: that it is there, how busy it is, what became of
requests."""

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
    """Registers an instance, and again with every heartbeat, until it is closed.

    `load` is called from a thread of its own. A conductor that does not answer is no reason to stop
    working: it is logged, and tried again a second later. Raises ConductorError if the first
    registration fails.
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
        """An event of a request. From one thread."""
        try:
            self._events.observe(RequestEvent(request, kind, tokens))
        except ConductorError as error:
            log.warning("the conductor did not take %r of %r: %s", kind, request, error)

    def close(self) -> None:
        """No more heartbeats."""
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
