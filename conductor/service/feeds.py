"""The feeds of a running conductor: starts them, applies their updates in the event loop, stops
them.

Feeds run in threads of their own and put updates into an inbox; the event loop takes the updates
out in slices of a millisecond or two, so that decisions run in between.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING

from tiffin.kvstore.client.pool.members import open_members
from tiffin.kvstore.credentials import parse_address
from tiffin.kvstore.directory.base import nobody, unreadable
from tiffin.kvstore.errors import TiffinError

from ..core.silence import NAMED_MAX
from ..errors import ConductorError, InvalidRequest
from ..events.block_regrouper import EngineChain
from ..events.index_updates import NODE_TIERS, Announced, Cleared, Gone
from ..events.node_feed import NodesFeed
from ..events.update_inbox import UpdateInbox
from ..events.vllm_events import lora_namespace
from ..state.allowed_hosts import EVENTS_LABEL, REPLAY_LABEL, TOPIC_LABEL, host_of
from .order_sender import OrderCarrier

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tiffin.kvstore import KVSchema
    from tiffin.kvstore.client.pool.members import Members
    from tiffin.kvstore.credentials import Credentials
    from tiffin.kvstore.directory import NodeRecord

    from ..events.index_updates import Update
    from ..events.vllm_feed import VllmFeed
    from ..pool.orders import Ended, Order
    from ..records import InstanceSpec
    from ..wire.announced_spaces import AnnouncedSpaces

log = logging.getLogger("tiffin.conductor")

# Keys that one turn of the event loop applies: about a millisecond of the index.
_KEYS_PER_TURN = 8192


class Feeding:
    """The feeds of a conductor. They call `apply` with each update, in the event loop's thread.
    Create and close it in that thread."""

    def __init__(self, apply: Callable[[Update], None], loop: asyncio.AbstractEventLoop) -> None:
        self._apply = apply
        # Called with a node's name and the key spaces of the engines there, as they are announced.
        self.announced: Callable[[str, Sequence[bytes]], None] = lambda *_: None
        self._loop = loop
        self._inbox = UpdateInbox(self._wake)
        self._directory: Members | None = None
        self._nodes: NodesFeed | None = None
        self._carrier: OrderCarrier | None = None
        self._engines: VllmFeed | None = None
        self._followed: dict[str, tuple[str, ...]] = {}
        self._closed = False

    def follow_pool(self, directory: str, pool: str, credentials: Credentials) -> None:
        """Follow the kvstore nodes of a pool: those in its directory, or those that a URL
        `tiffin://host:port` names. Raises InvalidInput for a URL that can't work."""
        token = credentials.token
        self._directory = open_members(directory, pool, token)
        self._nodes = NodesFeed(self._directory, credentials, self._inbox)
        # The carrier gets a directory of its own, because it closes it.
        self._carrier = OrderCarrier(open_members(directory, pool, token), credentials)

    def follow_instance(
        self, spec: InstanceSpec, schema: KVSchema | None, spaces: AnnouncedSpaces
    ) -> None:
        """Follow the KV events of an instance, if its labels give an endpoint; their keys are those
        of its key space, if that was announced, else of its model's `schema`. Idempotent. Raises
        InvalidRequest for an endpoint that can't work, and without a schema, from which the keys
        follow."""
        endpoint = spec.labels.get(EVENTS_LABEL, "")
        replay, topic = spec.labels.get(REPLAY_LABEL, ""), spec.labels.get(TOPIC_LABEL, "")
        if not endpoint:
            self.forget_instance(spec.id)
            return
        # Labels come over the network, so they must not name files of this machine (ipc://).
        host_of(endpoint, f"label {EVENTS_LABEL}", tcp=True)
        if replay:
            host_of(replay, f"label {REPLAY_LABEL}", tcp=True)
        keyed = spaces.at(spec)
        schema = schema if keyed is None else keyed.schema
        if schema is None:
            raise InvalidRequest(
                f"the label {EVENTS_LABEL} takes a schema, of this or another instance of the "
                "model: events tell token ids, and keys follow from them by the schema"
            )
        space, secret = ("", b"") if keyed is None else (keyed.name, keyed.secret or b"")
        wanted = (endpoint, replay, topic, schema.fingerprint.hex(), space)
        if self._followed.get(spec.id) == wanted:
            return
        # Imported here: only a pool with such engines needs the library.
        from ..events.vllm_feed import EventPublisher, VllmFeed

        if self._engines is None:
            self._engines = VllmFeed(self._inbox)
        publisher = EventPublisher(
            *(spec.id, endpoint, EngineChain.of(schema, secret)),
            replay=replay,
            topic=topic,
            namespace_of=partial(_namespace_of, spaces, spec.model, space),
        )
        self._engines.follow(publisher)
        self._followed[spec.id] = wanted

    def forget_instance(self, instance: str) -> None:
        """Stop following an instance. Idempotent."""
        if self._followed.pop(instance, None) is not None and self._engines is not None:
            self._engines.unfollow(instance)

    @property
    def followed(self) -> list[str]:
        """Instances whose events are followed."""
        return list(self._followed)

    def left_out(self) -> dict[str, dict[str, int]]:
        """Per instance, how many of its events do not count, by what they are."""
        return {} if self._engines is None else self._engines.left_out()

    def nodes_at(self, host: str) -> list[str]:
        """The names of the nodes that are followed at a host, as their addresses have it."""
        if self._nodes is None:
            return []
        nodes = self._nodes.statistics()["nodes"]
        return [name for name, one in nodes.items() if parse_address(one["address"])[0] == host]

    def missing(self) -> str:
        """A health check: why the feeds are incomplete, not yet or no longer; "" if all is well."""
        if self._engines is not None and not self._engines.alive:
            return "the feed of engines has ended: restart the conductor, and look at its log"
        if self._nodes is None:
            return ""
        if not self._nodes.alive:
            return "the feed of nodes has ended: restart the conductor, and look at its log"
        error, behind = self._nodes.behind()
        if error:
            return f"the directory does not answer: {error}"
        numbers = None if self._directory is None else self._directory.statistics()
        if numbers is not None and (why := unreadable(numbers)):
            return f"{why} (here --pool-token-file)"
        if behind:
            return (
                f"the blocks of {len(behind)} nodes are not known yet, {min(behind)!r} among them"
            )
        return ""

    def notes(self) -> list[str]:
        """What operators should know though the feeds are complete: a pool without nodes, and
        engines whose events can't be heard. At most `NAMED_MAX`."""
        numbers = None if self._directory is None else self._directory.statistics()
        empty = [why] if numbers is not None and (why := nobody(numbers)) else []
        unheard = {} if self._engines is None else self._engines.unheard()
        return empty + [
            f"the KV events of {name} can't be heard at {endpoint}: what it holds is not known in "
            "time, even if replays come"
            for name, endpoint in sorted(unheard.items())[:NAMED_MAX]
        ]

    async def records(self) -> list[NodeRecord] | None:
        """The records of the pool's nodes, from the directory; None while the directory does not
        answer."""
        if self._directory is None:
            return []
        try:
            return list((await asyncio.to_thread(self._directory.nodes)).values())
        except TiffinError as error:
            log.debug("the directory does not answer: %s", error)  # `missing` reports it
            return None

    @property
    def gives_orders(self) -> bool:
        """Whether nodes are followed, to which orders can be sent."""
        return self._carrier is not None

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Send orders to nodes; `finished` returns the outcomes. Does not wait."""
        if self._carrier is not None:
            self._carrier.submit(orders)

    def finished(self) -> list[Ended]:
        """The outcomes of orders that have ended since the last call."""
        return self._carrier.finished() if self._carrier is not None else []

    async def close(self) -> None:
        """Stop all feeds; idempotent. Their threads end within seconds: at most the time that a
        node takes to answer."""
        self._closed = True
        self._inbox.close()
        threads = (self._carrier, self._nodes, self._engines)
        feeds = [feed for feed in threads if feed is not None]
        for feed in feeds:
            await asyncio.to_thread(feed.close)
        if self._directory is not None:
            await asyncio.to_thread(self._directory.close)

    def _wake(self) -> None:
        """Schedule `_take` in the event loop. Callback of the inbox, in a feed's thread."""
        try:
            self._loop.call_soon_threadsafe(self._take)
        except RuntimeError:  # the loop has ended
            log.debug("nobody takes updates any more")

    def _take(self) -> None:
        for update in self._inbox.take(_KEYS_PER_TURN):
            if isinstance(update, Announced):
                self.announced(update.name, update.spaces)
                continue
            if isinstance(update, Gone | Cleared) and update.tiers == NODE_TIERS:  # a node
                self.announced(update.name, ())
            try:
                self._apply(update)
            except ConductorError as error:  # too many holders: this holder's blocks are not used
                log.warning("not taken in: %s", error)
        if len(self._inbox) and not self._closed:
            self._loop.call_soon(self._take)


def _namespace_of(
    spaces: AnnouncedSpaces, model: str, space: str, adapter: str, salt: str
) -> str | None:
    """The namespace of an engine's blocks, by its key space; called in the feed's thread."""
    asked, keyed = lora_namespace(adapter), spaces.named(model, space)
    if keyed is None:  # nobody says what becomes of a salt, or the space has gone
        return None if salt or space else asked
    return keyed.namespace_of(asked, salt)


__all__ = ["EVENTS_LABEL", "REPLAY_LABEL", "TOPIC_LABEL", "Feeding"]
