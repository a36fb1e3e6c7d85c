"""The feeds of a running conductor: started from options, emptied by the event loop, stopped.

Feeds live in threads of their own and put what they hear into an inbox; the loop takes it out in
pieces of a millisecond or two, so that decisions come in between.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
from typing import TYPE_CHECKING

from tiffin.kvstore.directory import open_directory
from tiffin.kvstore.errors import TiffinError

from .errors import ConductorError, InvalidRequest
from .feeds.inbox import Inbox
from .feeds.nodes import NodesFeed
from .feeds.orders import OrderCarrier
from .folding import Chain

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.kvstore import KVSchema
    from tiffin.kvstore.credentials import Credentials
    from tiffin.kvstore.directory import Directory, NodeRecord

    from .feeds.updates import Update
    from .feeds.vllm import VllmFeed
    from .orders import Ended, Order
    from .records import InstanceSpec

log = logging.getLogger("tiffin.conductor")

# Labels of an instance that publishes KV events as vLLM does, with tcp:// endpoints as seen from
# the conductor.
EVENTS_LABEL = "kv_events"
REPLAY_LABEL = "kv_events_replay"
TOPIC_LABEL = "kv_events_topic"

# Of one turn of the loop: about a millisecond of the index.
_KEYS_PER_TURN = 8192

# What ZeroMQ connects to: a name or an IPv4 address, or an IPv6 address in brackets, and a port.
_TCP = re.compile(
    r"tcp://(?:(?P<name>[A-Za-z0-9_][A-Za-z0-9_.-]{0,252})|\[(?P<v6>[0-9A-Fa-f:.]{2,45})"
    r"(?:%[A-Za-z0-9_.-]{1,15})?\]):(?P<port>[0-9]{1,5})"
)


class Feeding:
    """What is heard goes to `apply`, in the loop's thread. Make it there; close it there."""

    def __init__(self, apply: Callable[[Update], None], loop: asyncio.AbstractEventLoop) -> None:
        self._apply = apply
        self._loop = loop
        self._inbox = Inbox(self._wake)
        self._directory: Directory | None = None
        self._nodes: NodesFeed | None = None
        self._carrier: OrderCarrier | None = None
        self._engines: VllmFeed | None = None
        self._followed: dict[str, tuple[str, ...]] = {}
        self._closed = False

    def follow_pool(self, directory: str, pool: str, credentials: Credentials) -> None:
        """Follow the kvstore nodes of a pool. Raises InvalidInput for a URL that can't work."""
        self._directory = open_directory(directory, pool=pool)
        self._nodes = NodesFeed(self._directory, credentials, self._inbox)
        # Its own directory, because it closes it.
        self._carrier = OrderCarrier(open_directory(directory, pool=pool), credentials)

    def follow_instance(self, spec: InstanceSpec, schema: KVSchema | None) -> None:
        """Follow what an instance publishes, if its labels say where. Raises InvalidRequest for an
        endpoint that can't work, and for one without a schema: whose keys?"""
        endpoint = spec.labels.get(EVENTS_LABEL, "")
        replay, topic = spec.labels.get(REPLAY_LABEL, ""), spec.labels.get(TOPIC_LABEL, "")
        if not endpoint:
            self.forget_instance(spec.id)
            return
        _check_tcp(EVENTS_LABEL, endpoint)
        if replay:
            _check_tcp(REPLAY_LABEL, replay)
        if schema is None:
            raise InvalidRequest(
                f"the label {EVENTS_LABEL} takes a schema, of this or another instance of the "
                "model: events tell token ids, and keys follow from them by the schema"
            )
        wanted = (endpoint, replay, topic, schema.fingerprint.hex())
        if self._followed.get(spec.id) == wanted:
            return
        # Only who has such engines needs the library.
        from .feeds.vllm import Publisher, VllmFeed

        if self._engines is None:
            self._engines = VllmFeed(self._inbox)
        chain = Chain.of(schema)
        self._engines.follow(Publisher(spec.id, endpoint, chain, replay=replay, topic=topic))
        self._followed[spec.id] = wanted

    def forget_instance(self, instance: str) -> None:
        """It has left."""
        if self._followed.pop(instance, None) is not None and self._engines is not None:
            self._engines.unfollow(instance)

    @property
    def followed(self) -> list[str]:
        """Instances whose events are followed."""
        return list(self._followed)

    def missing(self) -> str:
        """What is not known yet, or not any more; "" if all is well."""
        if self._engines is not None and not self._engines.alive:
            return "the feed of engines has ended: restart the conductor, and look at its log"
        if self._nodes is None:
            return ""
        if not self._nodes.alive:
            return "the feed of nodes has ended: restart the conductor, and look at its log"
        found = self._nodes.statistics()
        if found["directory_error"]:
            return f"the directory does not answer: {found['directory_error']}"
        behind = sorted(name for name, node in found["nodes"].items() if not node["synced"])
        if behind:
            return f"the blocks of {len(behind)} nodes are not known yet, {behind[0]!r} among them"
        return ""

    async def records(self) -> list[NodeRecord] | None:
        """What the pool's nodes say of themselves; None while the directory does not answer."""
        if self._directory is None:
            return []
        try:
            return list((await asyncio.to_thread(self._directory.nodes)).values())
        except TiffinError as error:
            log.debug("the directory does not answer: %s", error)  # `missing` tells operators
            return None

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Have nodes do this; `finished` tells how it went. Does not wait."""
        if self._carrier is not None:
            self._carrier.submit(orders)

    def finished(self) -> list[Ended]:
        """What became of orders since the last call."""
        return self._carrier.finished() if self._carrier is not None else []

    async def close(self) -> None:
        """End all feeds; idempotent. Their threads end within seconds, a node's answer at most."""
        self._closed = True
        self._inbox.close()
        threads = (self._carrier, self._nodes, self._engines)
        feeds = [feed for feed in threads if feed is not None]
        for feed in feeds:
            await asyncio.to_thread(feed.close)
        if self._directory is not None:
            await asyncio.to_thread(self._directory.close)

    def _wake(self) -> None:
        """By a feed's thread."""
        try:
            self._loop.call_soon_threadsafe(self._take)
        except RuntimeError:  # the loop has ended
            log.debug("nobody takes updates any more")

    def _take(self) -> None:
        for update in self._inbox.take(_KEYS_PER_TURN):
            try:
                self._apply(update)
            except ConductorError as error:  # too many holders: what it is of is not used
                log.warning("not taken in: %s", error)
        if len(self._inbox) and not self._closed:
            self._loop.call_soon(self._take)


def _check_tcp(label: str, address: str) -> None:
    """Labels come over the network: they name no files of this machine. What ZeroMQ does not take
    is refused here, where somebody hears of it: the feed's thread can only give it up. Raises
    InvalidRequest."""
    found = _TCP.fullmatch(address)
    good = found is not None and 0 < int(found["port"]) < 1 << 16
    if good and found is not None and found["v6"] is not None:
        try:
            ipaddress.IPv6Address(found["v6"])
        except ValueError:
            good = False
    if not good:
        raise InvalidRequest(
            f"label {label}: {address[:100]!r} is not tcp://HOST:PORT, with a port of 1 to 65535 "
            "and an IPv6 address in brackets"
        )


__all__ = ["EVENTS_LABEL", "REPLAY_LABEL", "TOPIC_LABEL", "Feeding"]
