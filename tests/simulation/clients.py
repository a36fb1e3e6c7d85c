"""Simulated clients: users of the pool, and strangers, which break the protocol's rules."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from tiffin.kvstore import Client
from tiffin.kvstore.client.blocks.block_views import select
from tiffin.kvstore.client.pool.many_nodes import ManyNodes
from tiffin.kvstore.client.pool.peers import PoolOptions
from tiffin.kvstore.client.pool.remote.block_read import ArrivedSegments, fetch
from tiffin.kvstore.client.pool.remote.block_write import BlockSeals
from tiffin.kvstore.client.pool.remote.peer import Peer, as_ours
from tiffin.kvstore.client.pool.verb_driver import VerbDriver
from tiffin.kvstore.client.verbs.block_verbs import DEFAULT_TIMEOUT_S, Access
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.errors import StaleLease, TiffinError
from tiffin.kvstore.format.header import relocate_header
from tiffin.kvstore.node.core import messages
from tiffin.messenger.transport import Range

from .blocks import EXTENT_BYTES, LIED_ABOUT, LIES, ODD, PREFIXES, SCHEMA, is_right, payloads_of
from .directories import SimulatedDirectory
from .nodes import REMOTE_LEASE_S, HomeLink
from .world import Violation

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiffin.kvstore.format.keys import Prefix

    from .nodes import Machinery, SimulatedNode
    from .world import Process

# How long after its `timeout_s` a call may end, whichever process is stopped.
OVERRUN_S = 0.5
TIMEOUTS_S = (0.05, 0.3, 1.0, 4.0, 4.0)


class User:
    """A process with one `Client` that reads, writes and forgets until `until`."""

    def __init__(
        self,
        machinery: Machinery,
        name: str,
        *,
        verify: str,
        home: SimulatedNode | None,
        until: float,
    ) -> None:
        self.machinery = machinery
        self.world = machinery.world
        self.name = name
        self.verify = verify
        self.home = home
        self.until = until
        self.finished = False
        self.checked = 0  # blocks whose bytes were compared
        self.process: Process | None = None
        self._link: HomeLink | None = None
        self._dice = self.world.random
        self._lives = 0

    def start(self) -> None:
        """Start, or restart."""
        self._lives += 1
        self.process = self.world.process(self.name)
        self.machinery.network.forget(self.name)
        self._link = None if self.home is None else HomeLink(self.home, self.process)
        self.world.spawn(self.process, self._live, f"{self.name}.{self._lives}")

    def crash(self, *, silently: bool) -> None:
        """SIGKILL, or the end of its machine."""
        assert self.process is not None
        self.world.kill(self.process)
        if not silently:
            self.machinery.network.hang_up(self.process)
        if self._link is not None:
            self._link.died()

    def _live(self) -> None:
        client = self._open()
        verbs: dict[Callable[[Client, float], None], int] = {
            self._get: 30,
            self._view: 14,
            self._put: 22,
            self._put_twice: 4,
            self._remove: 4,
            self._pass: 8,
            self._pin: 2,
            self._match: 2,
            self._exists: 2,
            self._replicate: 4,
            self._write_in_place: 4 if self.home is not None else 0,
        }
        chosen = list(verbs), list(verbs.values())
        while self.world.now < self.until:
            self.world.sleep(self._dice.uniform(0.005, 0.15))
            verb = self._dice.choices(*chosen)[0]
            timeout_s = self._dice.choice(TIMEOUTS_S)
            with self._in_time(verb.__name__, timeout_s):
                verb(client, timeout_s)
        client.close()
        self.finished = True

    def _open(self) -> Client:
        assert self.process is not None
        directory = SimulatedDirectory(self.machinery.directory, self.name)
        options = PoolOptions(hedge_s=self._dice.choice((0.1, 5.0)))
        driver = VerbDriver(directory, Credentials(), self.name, options)
        home = self.home
        nodes = ManyNodes(
            driver,
            home=self._link,  # type: ignore[arg-type]
            home_number=lambda: home.published_number() or None if home is not None else None,
            admission=self._dice.choice(("always", "second", "never")),
        )
        return Client(nodes, self.verify)  # type: ignore[arg-type]

    @contextlib.contextmanager
    def _in_time(self, what: str, timeout_s: float) -> Iterator[None]:
        """The `with` block is one call: it must end in time unless this process was stopped, and
        may raise only the pool's errors."""
        assert self.process is not None
        began, stops = self.world.now, self.process.stops
        ended = "done"
        try:
            yield
        except TiffinError as error:
            ended = type(error).__name__
        took_s = self.world.now - began
        self.world.note(f"{self.name} {what[1:]} {ended} after {took_s:.4f}")
        limit_s = timeout_s + OVERRUN_S
        if took_s > limit_s and self.process.stops == stops:
            raise Violation(
                "deadline", f"{self.name} {what[1:]}: {took_s:.3f} s of {timeout_s} s ({ended})"
            )

    def _some(self, *, reading: bool = False) -> Prefix:
        prefixes = [*PREFIXES, LIES, LIES, LIES] if self.verify == "always" else PREFIXES
        if reading:
            prefixes = [*prefixes, *self.machinery.passing]
        prefix = self._dice.choice(prefixes)
        return prefix[: self._dice.randint(1, len(prefix))]

    def _compare(self, key: bytes, payload: Any, what: str) -> None:
        self.checked += 1
        if not is_right(key, payload):
            raise Violation("bytes", f"{self.name} {what}: wrong bytes under {key.hex()[:8]}")

    def _explained(self, blocks: Any) -> None:
        if (len(blocks) < len(blocks.prefix)) != (blocks.reason is not None):
            raise Violation(
                "reason", f"{len(blocks)} of {len(blocks.prefix)} blocks: {blocks.reason}"
            )

    # -- verbs -----------------------------------------------------------------------------------

    def _get(self, client: Client, timeout_s: float) -> None:
        prefix = self._some(reading=True)
        into = np.zeros((len(prefix), SCHEMA.block_bytes), np.uint8)
        with client.get(prefix, into=into, timeout_s=timeout_s) as blocks:
            for index in range(len(blocks)):
                self._compare(prefix.keys[index], into[index], "get")
            self._explained(blocks)
            self.world.note(f"{self.name} got {len(blocks)} of {len(prefix)}: {blocks.reason}")

    def _view(self, client: Client, timeout_s: float) -> None:
        """Read the blocks in place, more than once."""
        prefix = self._some(reading=True)
        with client.get(prefix, timeout_s=timeout_s) as blocks:
            self._explained(blocks)
            for look in range(3):
                for index in range(len(blocks)):
                    self._compare(prefix.keys[index], blocks[index].memory, f"look {look}")
                # The reader's own time, which no deadline limits.
                assert self.process is not None
                self.process.stops += 1
                self.world.sleep(self._dice.uniform(0, 0.2))

    def _put(self, client: Client, timeout_s: float, replicas: int = 1) -> None:
        prefix = self._some()
        if prefix.keys[0] in LIED_ABOUT:
            return
        payloads = payloads_of(prefix)
        sync = self._dice.random() < 0.7
        client.put(prefix, payloads, timeout_s=timeout_s, replicas=replicas, sync=sync)

    def _put_twice(self, client: Client, timeout_s: float) -> None:
        self._put(client, timeout_s, replicas=2)

    def _write_in_place(self, client: Client, timeout_s: float) -> None:
        """Write in two calls, each with a deadline of its own."""
        assert self.process is not None
        prefix, slots = self._dice.choice(PREFIXES), None
        with self._in_time("_reserve", timeout_s):
            slots = client.reserve(prefix, timeout_s=timeout_s)
        for slot in slots or ():
            slot.view[:] = payloads_of(prefix)[slot.index]
        if slots is not None:
            with self._in_time("_commit", DEFAULT_TIMEOUT_S):
                slots.commit()
        self.process.stops += 1  # there is no deadline for both together

    def _remove(self, client: Client, timeout_s: float) -> None:
        client.remove(self._some(), timeout_s=timeout_s)

    def _pass(self, client: Client, timeout_s: float) -> None:
        """Put a prompt, let others read and copy it, and remove it: it must not come back."""
        assert self.process is not None
        numbers, machinery = sorted(client.nodes()), self.machinery
        if not (numbers and machinery.unused):
            return
        prefix = machinery.unused.pop()
        machinery.passing.append(prefix)
        try:
            put = client.put(
                prefix, payloads_of(prefix), node=self._dice.choice(numbers), timeout_s=timeout_s
            )
            # A put that was not confirmed may be carried out later.
            if put.complete:
                if self._dice.random() < 0.3:  # some are on disk, at nodes that leave meanwhile
                    self.world.sleep(self._dice.uniform(0, 3))
                copying = threading.Thread(
                    target=lambda: self._copy(client, prefix, self._dice.choice(numbers)),
                    name="copy",
                )
                copying.start()
                self.world.sleep(self._dice.uniform(0, 0.02))
                try:
                    client.remove(prefix, timeout_s=timeout_s)
                finally:
                    copying.join()
                machinery.removed.update(prefix.keys)
                self.world.note(f"{self.name} removed {prefix.keys[0].hex()[:8]}")
        finally:
            if machinery.passing.count(prefix) and self._dice.random() < 0.5:
                machinery.passing.remove(prefix)
            self.process.stops += 1  # there is no deadline for both together

    def _copy(self, client: Client, prefix: Prefix, to: int) -> None:
        with contextlib.suppress(TiffinError):
            client.replicate(prefix, [to], timeout_s=0.5)

    def _pin(self, client: Client, timeout_s: float) -> None:
        hard = self._dice.random() < 0.2
        client.pin(self._some(), ttl_s=self._dice.uniform(0.2, 2), hard=hard, timeout_s=timeout_s)

    def _match(self, client: Client, timeout_s: float) -> None:
        prefix = self._some()
        assert client.match(prefix, timeout_s=timeout_s).blocks <= len(prefix)

    def _exists(self, client: Client, timeout_s: float) -> None:
        prefix = self._some()
        assert len(client.exists(prefix, timeout_s=timeout_s)) == len(prefix)

    def _replicate(self, client: Client, timeout_s: float) -> None:
        numbers = sorted(client.nodes())
        if numbers:
            client.replicate(
                self._some(reading=True), [self._dice.choice(numbers)], timeout_s=timeout_s
            )


class Stranger:
    """A client that breaks the protocol's rules: it is late, sends wrong data or disappears."""

    def __init__(self, machinery: Machinery, name: str, until: float) -> None:
        self.machinery = machinery
        self.world = machinery.world
        self.name = name
        self.until = until
        self.finished = False
        self.process: Process | None = None
        self._dice = self.world.random

    def start(self) -> None:
        """Start."""
        self.process = self.world.process(self.name)
        self.world.spawn(self.process, self._live, self.name)

    def vanish(self) -> None:
        """Its machine is gone; its peers get no sign of it."""
        assert self.process is not None
        self.world.kill(self.process)
        self.finished = True

    def _live(self) -> None:
        tricks = [
            self._release_twice,
            self._lease_and_go,
            self._reserve_and_go,
            self._commit_too_soon,
            self._commit_too_soon,
            self._commit_garbage,
            self._lie,
            self._lie,
            self._write_slowly,
            self._write_slowly,
            self._abort_while_writing,
            self._purge,
            self._purge,
            self._read_slowly,
            self._read_slowly,
            self._read_slowly,
        ]
        while self.world.now < self.until:
            self.world.sleep(self._dice.uniform(0.01, 0.3))
            trick = self._dice.choice(tricks)
            node = self._dice.choice(self.machinery.nodes)
            peer = Peer(node.address, Credentials(), self.name)
            try:
                trick(peer)
                ended = "done"
            except TiffinError as error:
                ended = type(error).__name__
            finally:
                peer.close()
            self.world.note(f"{self.name} {trick.__name__[1:]} at {node.name}: {ended}")
        self.finished = True

    def _prefix(self) -> Prefix:
        return self._dice.choice([*ODD, *PREFIXES])

    def _reserve(self, peer: Peer, prefix: Prefix) -> Any:
        request = messages.Reserve(
            0, prefix.key_bytes, prefix.parent, prefix.start, EXTENT_BYTES, 0.3
        )
        return peer.call(request, 0.3)

    def _parts(
        self, prefix: Prefix, reply: Any, payloads: Sequence[Any]
    ) -> tuple[list[Range], list[Any]]:
        """The ranges and sources of a valid write, as in `block_write.py`."""
        seals = BlockSeals(prefix, payloads_of(prefix))
        granted = [i for i, status in enumerate(reply.statuses) if status == 1]
        ranges, sources = [], []
        slots = zip(granted, reply.offsets, reply.generations, strict=True)
        for slot, (index, offset, generation) in enumerate(slots):
            base = slot * EXTENT_BYTES
            ranges.append(Range(base, SCHEMA.header_bytes))
            sources.append(seals.header(index, offset, generation, seals.checksums(index)))
            ranges.append(Range(base + SCHEMA.header_bytes, SCHEMA.block_bytes))
            sources.append(payloads[index])
        return ranges, sources

    def _write(
        self, peer: Peer, reply: Any, ranges: Any, sources: Any, pause_s: float = 0.0
    ) -> None:
        deadline = self.world.now + 20.0
        with as_ours("stranger"), peer.transport.stream(deadline) as stream:
            stream.pause_s = pause_s  # type: ignore[attr-defined]
            stream.ask_write(reply.lease, ranges, sources)
            stream.flush(deadline)
            stream.receive_written(deadline)

    # -- tricks ----------------------------------------------------------------------------------

    def _release_twice(self, peer: Peer) -> None:
        """A second release must not end the hold of another client."""
        leased = peer.call(messages.Lease(0, self._dice.choice(PREFIXES).key_bytes, 0.2), 0.2)
        if not leased.lease:
            return
        peer.call(messages.Release(0, leased.lease), 0.2)
        try:
            peer.call(messages.Release(0, leased.lease), 0.2)
        except StaleLease:
            return
        raise Violation("lease", "a lease was released twice")

    def _lease_and_go(self, peer: Peer) -> None:
        """The lease is held until it expires, or until the node notices the closed connection."""
        peer.call(messages.Lease(0, self._dice.choice(PREFIXES).key_bytes, 0.2), 0.2)
        self.world.sleep(self._dice.uniform(0, 3))

    def _reserve_and_go(self, peer: Peer) -> None:
        self._reserve(peer, self._prefix())
        self.world.sleep(self._dice.uniform(0, 4))

    def _commit_too_soon(self, peer: Peer) -> None:
        """Commit on one stream while another still sends the bytes."""
        prefix = self._prefix()
        reply = self._reserve(peer, prefix)
        if not reply.lease:
            return
        ranges, sources = self._parts(prefix, reply, payloads_of(prefix))
        pause_s = self._dice.uniform(0, 0.05)

        def write() -> None:
            with contextlib.suppress(TiffinError):
                self._write(peer, reply, ranges, sources, pause_s)

        writer = threading.Thread(target=write, name="writer")
        writer.start()
        try:
            # After the first header, before the last byte.
            self.world.sleep(self._dice.uniform(0.005, 0.1))
            peer.call(messages.Commit(0, reply.lease), 0.3)
        finally:
            writer.join()
        with contextlib.suppress(StaleLease):
            peer.call(messages.Commit(0, reply.lease), 0.3)

    def _commit_garbage(self, peer: Peer) -> None:
        """Commit with another block's header, a wrong offset, a wrong generation, or garbage."""
        prefix = self._prefix()
        reply = self._reserve(peer, prefix)
        if not reply.lease:
            return
        ranges, sources = self._parts(prefix, reply, payloads_of(prefix))
        right = [source.copy() for source in sources]
        for slot in range(0, len(sources), 2):
            kind = self._dice.randrange(4)
            if kind == 0:
                sources[slot] = right[(slot + 2) % len(right)] if len(right) > 2 else None
            elif kind == 1:
                relocate_header(sources[slot], extent_offset=reply.offsets[slot // 2] + 4096)
            elif kind == 2:
                generation = reply.generations[slot // 2] - 1
                relocate_header(
                    sources[slot], extent_offset=reply.offsets[slot // 2], generation=generation
                )
            if kind == 3 or sources[slot] is None:
                garbage = self._dice.randbytes(SCHEMA.header_bytes)
                sources[slot] = np.frombuffer(garbage, np.uint8)
        self._write(peer, reply, ranges, sources)
        flags = peer.call(messages.Commit(0, reply.lease), 0.3).flags
        if any(flags):
            raise Violation("commit", "a header that does not belong there was committed")

    def _lie(self, peer: Peer) -> None:
        """Right header, right checksums, wrong payload: only computing a checksum detects it."""
        reply = self._reserve(peer, LIES)
        if not reply.lease:
            return
        wrong = [np.flip(payload).copy() for payload in payloads_of(LIES)]
        self._write(peer, reply, *self._parts(LIES, reply, wrong))
        peer.call(messages.Commit(0, reply.lease), 0.3)

    def _write_slowly(self, peer: Peer) -> None:
        """Write for far longer than the reservation lives."""
        prefix = self._prefix()
        reply = self._reserve(peer, prefix)
        if not reply.lease:
            return
        parts = self._parts(prefix, reply, payloads_of(prefix))
        self._write(peer, reply, *parts, pause_s=self._dice.uniform(0.2, 1.2))
        peer.call(messages.Commit(0, reply.lease), 0.3)

    def _read_slowly(self, peer: Peer) -> None:
        """Read in small pieces past the end of the lease, without verifying checksums."""
        prefix = self._dice.choice(PREFIXES)
        deadline = self.world.now + 8.0
        with as_ours("stranger"), peer.transport.stream(deadline) as stream:
            stream.sip_s = self._dice.uniform(0.05, 0.4)  # type: ignore[attr-defined]
        targets = [np.zeros(SCHEMA.block_bytes, np.uint8) for _ in prefix.keys]
        access = Access("off", self._dice)
        arrivals = ArrivedSegments(prefix, select(SCHEMA), access, targets)

        def replace_them() -> None:
            """Remove the blocks that are being read, and reuse their room, when the lease has
            expired. By another session, and over a connection that is not slow."""
            self.world.sleep(self._dice.uniform(0.5, 2.0) * REMOTE_LEASE_S)
            other = Peer(peer.address, Credentials(), self.name)
            try:
                with contextlib.suppress(TiffinError):
                    other.call(messages.Remove(0, prefix.key_bytes), 0.3)
                    self._purge(other)
            finally:
                other.close()

        replacer = threading.Thread(target=replace_them, name="replacer")
        replacer.start()
        try:
            fetched = fetch(peer, prefix, arrivals, deadline=deadline)
        finally:
            replacer.join()
        for key, target in list(zip(prefix.keys, targets, strict=True))[: fetched.blocks]:
            if not is_right(key, target):
                raise Violation("bytes", f"{self.name} sipped wrong bytes of {key.hex()[:8]}")

    def _purge(self, peer: Peer) -> None:
        """Remove many blocks, and write other ones into their room."""
        for prefix in self._dice.sample(PREFIXES, 3):
            peer.call(messages.Remove(0, prefix.key_bytes), 0.3)
        for prefix in self._dice.sample(ODD, 2):
            reply = self._reserve(peer, prefix)
            if reply.lease:
                self._write(peer, reply, *self._parts(prefix, reply, payloads_of(prefix)))
                peer.call(messages.Commit(0, reply.lease), 0.3)

    def _abort_while_writing(self, peer: Peer) -> None:
        """Abort a reservation while its bytes are still being sent."""
        prefix = self._prefix()
        reply = self._reserve(peer, prefix)
        if not reply.lease:
            return
        ranges, sources = self._parts(prefix, reply, payloads_of(prefix))

        def write() -> None:
            with contextlib.suppress(TiffinError):
                self._write(peer, reply, ranges, sources, 0.1)

        writer = threading.Thread(target=write, name="writer")
        writer.start()
        try:
            self.world.sleep(self._dice.uniform(0, 0.3))
            peer.call(messages.Abort(0, reply.lease), 0.3)
        finally:
            writer.join()
