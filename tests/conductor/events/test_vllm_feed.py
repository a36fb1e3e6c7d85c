"""Engines' events on the wire, from a publisher with real sockets to a real index."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import itertools
import json
import socket
import threading
import time
import zlib
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import pytest
import zmq
from kvsupport import wait_until

from tiffin.conductor.core import Conductor
from tiffin.conductor.errors import InvalidRequest
from tiffin.conductor.events import sequence_numbers, vllm_feed
from tiffin.conductor.events.block_regrouper import EngineChain, EngineRemoved, EngineStored, Folder
from tiffin.conductor.events.index_updates import NODE_TIERS, Added
from tiffin.conductor.events.routed_blocks import ROUTED_S
from tiffin.conductor.events.update_inbox import UpdateInbox
from tiffin.conductor.events.vllm_events import BadEvents, CacheCleared, EventReader
from tiffin.conductor.events.vllm_feed import EventPublisher, VllmFeed
from tiffin.conductor.state.part_keys import part_keys
from tiffin.kvstore import KVSchema
from tiffin.kvstore.errors import InvalidInput

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tiffin.conductor.state.prefix_index import PrefixIndex

PART = 16
SCHEMA = KVSchema.gqa(
    model="served", layers=1, kv_heads=1, head_dim=8, dtype="bfloat16", block_tokens=64
)
CHAIN = EngineChain.of(SCHEMA)
_encode = msgspec.msgpack.encode


def stored(prompt: list[int], start: int = 0, **fields: Any) -> dict[str, Any]:
    """vLLM 0.32's event for the parts of a prompt from `start` on; hashes derive from tokens."""
    names = hashes(prompt)
    return {
        "type": "BlockStored",
        "block_hashes": names[start:],
        "parent_block_hash": names[start - 1] if start else None,
        "token_ids": prompt[start * PART : len(names) * PART],
        "block_size": PART,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        **fields,
    }


def removed(*names: int, **fields: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(names), "medium": "GPU", **fields}


def hashes(prompt: list[int]) -> list[int]:
    found, before = [], 0
    for at in range(0, len(prompt) - PART + 1, PART):
        before = hash((before, *prompt[at : at + PART])) & (1 << 64) - 1
        found.append(before)
    return found


def payload(*events: Any) -> bytes:
    return _encode([1700000000.5, list(events), 0])


def keys(prompt: list[int], namespace: str = "") -> list[bytes]:
    return list(SCHEMA.prefix(prompt, namespace=namespace).keys)


def token_bytes(prompt: list[int]) -> bytes:
    return np.array(prompt, "<u4").tobytes()


# -- bytes -----------------------------------------------------------------------------------------


def test_maps_and_arrays_say_the_same() -> None:
    """vLLM changed from arrays to maps between 0.21 and 0.26: both are decoded."""
    prompt = list(range(32))
    names = hashes(prompt)
    expected = [
        EngineStored(names, None, token_bytes(prompt), PART, "hbm", ""),
        EngineRemoved(names[1:], "hbm"),
        CacheCleared(),
    ]
    new = [stored(prompt), removed(names[1], group_idx=0), {"type": "AllBlocksCleared"}]
    old = [
        ["BlockStored", names, None, prompt, PART, None, "GPU"],
        ["BlockRemoved", names[1:], "GPU"],
        ["AllBlocksCleared"],
    ]
    assert EventReader().read(payload(*new)) == expected
    assert EventReader().read(payload(*old)) == expected
    batch = {"ts": 1.0, "events": new, "data_parallel_rank": 3}
    assert EventReader().read(_encode(batch)) == expected


def test_hashes_are_64_bits_however_they_are_written() -> None:
    name = 0xFEDC_BA98_7654_3210
    digest = b"\x77" * 24 + name.to_bytes(8, "big")
    for written in (name, name - (1 << 64), digest):
        (event,) = EventReader().read(payload(removed(written)))
        assert event == EngineRemoved([name], "hbm")


def test_media_are_tiers_and_unknown_ones_are_nobodys() -> None:
    for medium, tier in {"GPU": "hbm", None: "hbm", "CPU": "dram", "STORAGE": "nvme"}.items():
        assert EventReader().read(payload(removed(1, medium=medium))) == [EngineRemoved([1], tier)]
    assert EventReader().read(payload(removed(1, medium="TAPE"))) == []


def test_only_groups_that_keep_every_token_are_followed() -> None:
    """Groups share hashes: an eviction from a sliding window must not remove the prompt."""
    prompt, reader = list(range(16)), EventReader()
    window = stored(prompt, group_idx=1, kv_cache_spec_kind="sliding_window")
    assert reader.read(payload(window)) == []
    assert len(reader.read(payload(stored(prompt)))) == 1
    assert reader.read(payload(removed(1, group_idx=1))) == []
    assert reader.read(payload(removed(1, group_idx=0))) == [EngineRemoved([1], "hbm")]


def test_adapters_are_namespaces_and_other_keys_are_nobodys() -> None:
    prompt = list(range(48))
    names, reader = hashes(prompt), EventReader()
    lora = stored(prompt, lora_name="sql", lora_id=3, extra_keys=[["sql"], ["sql"], ["sql"]])
    assert reader.read(payload(lora)) == [
        EngineStored(names, None, token_bytes(prompt), PART, "hbm", "lora:sql")
    ]
    image = stored(prompt, extra_keys=[None, ["image-hash"], None])
    assert reader.read(payload(image)) == [
        EngineStored(names[:1], None, token_bytes(prompt[:16]), PART, "hbm", ""),
        EngineStored(names[1:], names[0], token_bytes(prompt[16:]), PART, "hbm", None),
    ]
    # A name may have 1,024 characters, and a namespace as many bytes.
    for fields, namespace in (
        ({"lora_name": "a" * 1019}, "lora:" + "a" * 1019),
        ({"lora_name": "a" * 1020}, None),
        ({"lora_name": "ü" * 1000}, None),
        ({"lora_id": 7}, "lora:7"),
    ):
        (event,) = reader.read(payload(stored(prompt, **fields)))
        assert isinstance(event, EngineStored)
        assert event.namespace == namespace
    nobody = EventReader(lambda name, salt: None)
    (event,) = nobody.read(payload(lora))
    assert isinstance(event, EngineStored)
    assert event.namespace is None


def test_a_salt_is_what_the_first_block_has_beside_the_adapter() -> None:
    prompt = list(range(48))
    names = hashes(prompt)
    reader = EventReader(lambda name, salt: f"{name}/{salt}")
    for extra, namespace in (
        ([["pepper"], None, None], "/pepper"),
        ([["sql", "pepper"], ["sql"], ["sql"]], "sql/pepper"),
    ):
        adapter = "sql" if "sql" in extra[0] else None
        (event,) = reader.read(payload(stored(prompt, lora_name=adapter, extra_keys=extra)))
        assert event == EngineStored(names, None, token_bytes(prompt), PART, "hbm", namespace)
    # An image in the first block, two texts, and what comes behind another block are no salt.
    for first in ([["image", 3]], ["one", "two"]):
        (event,) = reader.read(payload(stored(prompt, extra_keys=[first, None, None])))
        assert isinstance(event, EngineStored)
        assert event.namespace is None
    later = stored(prompt, parent_block_hash=7, extra_keys=[["pepper"], None, None])
    (event,) = reader.read(payload(later))
    assert isinstance(event, EngineStored)
    assert event.namespace is None
    (event,) = EventReader().read(payload(stored(prompt, extra_keys=[["pepper"], None, None])))
    assert isinstance(event, EngineStored)
    assert event.namespace is None, "nobody has said what becomes of it"


def test_an_offloading_connector_may_name_blocks_only() -> None:
    bare = stored([], block_hashes=[5, 6], token_ids=[], block_size=0, medium="CPU")
    assert EventReader().read(payload(bare)) == [EngineStored([5, 6], None, b"", 0, "dram")]
    copies = removed(5, remaining_copy_counts=[2])
    assert EventReader().read(payload(copies)) == [EngineRemoved([5], "hbm", [2])]


@pytest.mark.parametrize(
    "wrong",
    [
        b"",
        b"\xc1",
        payload({"type": 5}),
        payload({"kind": "BlockStored"}),
        payload([5]),
        payload([]),
        payload(["BlockStored", "no list"]),
        payload(stored(list(range(16)), token_ids=[1, 2, 3])),
        payload(stored(list(range(16)), token_ids=[-1] * 16)),
        payload(stored(list(range(16)), token_ids=[1 << 32] * 16)),
        payload(stored(list(range(16)), block_hashes=["text"])),
        payload(stored(list(range(16)), medium=b"\xff")),
        _encode([1.0, [[[[[]]]]]]),
        _encode({"ts": 1.0}),
    ],
)
def test_what_is_no_batch_is_refused(wrong: bytes) -> None:
    with pytest.raises(BadEvents):
        EventReader().read(wrong)


@pytest.mark.parametrize("unheard", [{"type": "BlockTouched", "n": 1}, ["BlockTouched", 1]])
def test_an_event_of_an_unknown_kind_costs_only_itself(unheard: Any) -> None:
    reader, prompt = EventReader(), list(range(32))
    events = reader.read(payload(removed(5), unheard, stored(prompt), unheard))
    assert [type(event) for event in events] == [EngineRemoved, EngineStored]
    assert reader.left_out == {"events of the kind BlockTouched": 2}


@pytest.mark.parametrize(
    ("medium", "tier"),
    [
        ("gpu", "hbm"),
        ("cpu", "dram"),
        ("CPU_PINNED", "dram"),
        ("disk", "nvme"),
        ("STORAGE", "nvme"),
    ],
)
def test_media_of_all_engines(medium: str, tier: str) -> None:
    reader = EventReader()
    ours = stored(list(range(32)), medium=medium), removed(5, medium=medium)
    assert [event.tier for event in reader.read(payload(*ours))] == [tier, tier]  # type: ignore[union-attr]
    assert not reader.left_out


def test_what_is_in_no_tier_of_an_instance_is_counted() -> None:
    reader = EventReader()
    outside = stored(list(range(32)), medium="EXTERNAL"), removed(5, medium="EXTERNAL")
    assert reader.read(payload(*outside)) == []
    assert reader.left_out == {"blocks in EXTERNAL": 2}
    for number in range(100):
        reader.read(payload(removed(5, medium=f"M{number}")))
    assert len(reader.left_out) == 33
    assert reader.left_out["others"] == 69


# -- sockets ---------------------------------------------------------------------------------------


class Engine:
    """Publishes and replays like vLLM's publisher, from the thread of the test.

    Batches published with `lose` are only in the replay. A thread answers replays.
    """

    def __init__(
        self,
        context: zmq.Context[Any],
        *,
        endpoint: str = "tcp://127.0.0.1:*",
        replays: bool = True,
    ) -> None:
        self._pub = context.socket(zmq.XPUB)  # a PUB that reports its subscriptions
        self._pub.setsockopt(zmq.LINGER, 0)
        self._pub.bind(endpoint)
        self.endpoint = self._pub.getsockopt_string(zmq.LAST_ENDPOINT)
        self.seq = itertools.count()
        self.buffer: deque[tuple[int, bytes]] = deque(maxlen=1000)
        self._closing = threading.Event()
        self.replay = ""
        self._thread: threading.Thread | None = None
        if replays:
            router = context.socket(zmq.ROUTER)
            router.setsockopt(zmq.LINGER, 0)
            self.replay = f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}"
            self._thread = threading.Thread(target=self._serve, args=(router,))
            self._thread.start()

    def publisher(self, name: str = "engine", **fields: Any) -> EventPublisher:
        return EventPublisher(name, self.endpoint, CHAIN, replay=self.replay, **fields)

    def wait_for_subscriber(self) -> None:
        assert self._pub.poll(30_000), "nobody subscribed"
        assert self._pub.recv()[:1] == b"\x01"

    def publish(self, *events: Any, lose: bool = False, raw: bytes | None = None) -> None:
        seq, data = next(self.seq), payload(*events) if raw is None else raw
        self.buffer.append((seq, data))
        if not lose:
            self._pub.send_multipart([b"kv@topic", seq.to_bytes(8, "big"), data])

    def restart(self) -> None:
        self.seq = itertools.count()
        self.buffer.clear()

    def _serve(self, router: zmq.Socket[bytes]) -> None:
        with contextlib.closing(router):
            while not self._closing.is_set():
                if not router.poll(20):
                    continue
                client, _, start = router.recv_multipart()
                for seq, data in list(self.buffer):
                    if seq >= int.from_bytes(start, "big"):
                        router.send_multipart([client, b"", seq.to_bytes(8, "big"), data])
                router.send_multipart([client, b"", b"\xff" * 8, b""])

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
        self._pub.close()


class World:
    """A feed and the indexes that it feeds."""

    def __init__(self) -> None:
        self.inbox = UpdateInbox()
        self.core = Conductor()
        self.holdings, self.parts = self.core.holdings, self.core.parts
        self.feed = VllmFeed(self.inbox)
        self._now = itertools.count(1)

    def held(self, prompt: list[int], name: str = "engine", tier: str = "hbm") -> int:
        """The number of leading blocks of a prompt that are held, after all received events."""
        for update in self.inbox.take():
            self.core.apply(update, float(next(self._now)))
        return self._leading(self.holdings.index, keys(prompt), name, tier)

    def held_parts(self, prompt: list[int], name: str = "engine") -> int:
        """Likewise the number of leading part keys."""
        self.held(prompt)
        return self._leading(self.parts.index, part_keys(SCHEMA.prefix(prompt)), name, "hbm")

    def _leading(self, index: PrefixIndex, keys: Sequence[bytes], name: str, tier: str) -> int:
        number = index.find(name, tier)
        return 0 if number is None else int(index.match(keys).lengths(index.width)[number])

    def await_held(self, prompt: list[int], blocks: int, **where: str) -> None:
        wait_until(lambda: self.held(prompt, **where) == blocks, f"{blocks} blocks are held")

    def await_count(self, name: str, count: int) -> None:
        def reached() -> bool:
            return self.feed.statistics().get("engine", {}).get(name, -1) >= count

        wait_until(reached, f"{name} is {count}")


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.inbox.close()
    world.feed.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Engine]]:
    with contextlib.ExitStack() as stack:
        context: zmq.Context[Any] = zmq.Context()
        stack.callback(context.term)

        def start(**options: Any) -> Engine:
            engine = Engine(context, **options)
            stack.callback(engine.close)
            return engine

        yield start


def test_what_does_not_count_is_named_once_in_the_log_and_counted(
    world: World, start: Callable[..., Engine], caplog: pytest.LogCaptureFixture
) -> None:
    engine, prompt = start(), list(range(80))
    world.feed.follow(engine.publisher())
    engine.wait_for_subscriber()
    large = stored([], block_hashes=[1], token_ids=list(range(96)), block_size=96)
    for _ in range(2):
        engine.publish({"type": "BlockTouched"}, large, removed(5, medium="EXTERNAL"))
    engine.publish(stored(prompt))
    world.await_held(prompt, 1)
    assert world.feed.left_out() == {
        "engine": {
            "events of the kind BlockTouched": 2,
            "blocks in EXTERNAL": 2,
            "blocks of 96 tokens, in a pool of 64,": 2,
        }
    }
    said = [one.message for one in caplog.records if "not understood" in one.message]
    assert len(said) == 3


def test_a_live_port_that_is_dead_is_told_though_replays_come(
    world: World, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_feed, "_LOOK_S", 0.02)
    monkeypatch.setattr(vllm_feed, "_DEAF_S", 0.2)
    engine, other, prompt = start(), start(), list(range(80))
    with socket.socket() as taken:  # nobody speaks ZeroMQ there
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        dead = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        engine.publish(stored(prompt))
        world.feed.follow(dataclasses.replace(engine.publisher(), endpoint=dead))
        world.feed.follow(other.publisher("other"))
        other.wait_for_subscriber()
        world.await_held(prompt, 1)  # from the replay
        wait_until(lambda: world.feed.unheard() == {"engine": dead}, "it is told")
    world.feed.follow(engine.publisher())
    engine.wait_for_subscriber()
    wait_until(lambda: world.feed.unheard() == {}, "it is heard")
    other._pub.close()
    wait_until(lambda: "other" in world.feed.unheard(), "it was lost")


def test_a_publisher_that_is_there_at_once_is_heard(
    world: World, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a thread that others keep from listening."""
    monkeypatch.setattr(vllm_feed, "_LOOK_S", 0.02)
    monkeypatch.setattr(vllm_feed, "_DEAF_S", 0.0)
    listens = zmq.Socket.get_monitor_socket

    def late(socket: zmq.Socket[bytes], *events: int) -> zmq.Socket[bytes]:
        time.sleep(0.3)
        return listens(socket, *events)

    monkeypatch.setattr(zmq.Socket, "get_monitor_socket", late)
    engine = start()
    world.feed.follow(engine.publisher())
    engine.wait_for_subscriber()
    wait_until(lambda: world.feed.unheard() == {}, "it is heard")


def test_an_engine_is_followed_from_before_the_feed_to_its_departure(
    world: World, start: Callable[..., Engine]
) -> None:
    engine, prompt = start(), list(range(200))
    engine.publish(stored(prompt[:80]))
    world.feed.follow(engine.publisher())
    engine.wait_for_subscriber()
    world.await_held(prompt, 1)  # from the replay
    engine.publish(stored(prompt, 5))
    world.await_held(prompt, 3)
    engine.publish(removed(hashes(prompt)[8]))
    world.await_held(prompt, 2)
    engine.publish(stored(prompt[:64], medium="CPU", token_ids=[], block_size=0))
    world.await_held(prompt, 1, tier="dram")
    engine.publish({"type": "AllBlocksCleared"})
    world.await_held(prompt, 0)
    engine.publish(stored(prompt))
    world.await_held(prompt, 3)
    world.feed.unfollow("engine")
    world.await_held(prompt, 0)
    assert world.holdings.index.numbers() == []
    assert world.feed.statistics() == {}


def test_lost_batches_are_replayed(world: World, start: Callable[..., Engine]) -> None:
    engine, prompt = start(), list(range(256))
    world.feed.follow(engine.publisher())
    engine.wait_for_subscriber()
    engine.publish(stored(prompt[:64]))
    world.await_held(prompt, 1)
    engine.publish(stored(prompt[:128], 4), lose=True)
    engine.publish(stored(prompt[:192], 8), lose=True)
    engine.publish(stored(prompt, 12))
    world.await_held(prompt, 4)
    assert world.feed.statistics()["engine"]["gaps"] == 0


def test_without_a_replay_what_is_known_is_doubted_and_ends(
    world: World, start: Callable[..., Engine]
) -> None:
    engine, prompt, other = start(replays=False), list(range(64)), list(range(500, 564))
    world.feed.follow(engine.publisher())
    engine.wait_for_subscriber()
    engine.publish(stored(prompt))
    world.await_held(prompt, 1)
    engine.publish(removed(*hashes(prompt)), lose=True)
    engine.publish(stored(other))
    world.await_held(other, 1)
    assert world.held(prompt) == 1
    world.holdings.expire(ROUTED_S + 100.0)
    assert (world.held(prompt), world.held(other)) == (0, 1)
    assert world.feed.statistics()["engine"]["gaps"] == 1


def test_a_restarted_engine_has_nothing(world: World, start: Callable[..., Engine]) -> None:
    engine, prompt, other = start(), list(range(128)), list(range(500, 564))
    world.feed.follow(engine.publisher())
    engine.wait_for_subscriber()
    engine.publish(stored(prompt[:64]))
    engine.publish(stored(prompt, 4))
    world.await_held(prompt, 2)
    engine.restart()
    engine.publish(stored(other))
    world.await_held(other, 1)
    assert world.held(prompt) == 0
    assert world.feed.statistics()["engine"]["restarts"] == 1


@pytest.mark.slow
def test_a_restarted_engine_that_says_nothing_has_nothing(
    world: World, start: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It publishes only with its first request, which would be sent there in vain."""
    monkeypatch.setattr(sequence_numbers, "PROBE_S", 0.0)
    engine, prompt = start(), list(range(128))
    world.feed.follow(engine.publisher())
    engine.wait_for_subscriber()
    engine.publish(stored(prompt))
    world.await_held(prompt, 2)
    world.await_count("asked", 3)  # it was quiet, but did not restart
    assert world.held(prompt) == 2
    engine.restart()
    world.await_held(prompt, 0)
    world.await_count("restarts", 1)


class TestWhatVllmSent:
    """Recorded from vLLM 0.32 with blocks of 128 tokens and room for 48, prefix caching on: two
    prompts that share 600 tokens, the second one again with a `cache_salt`, four others that need
    the room, and a reset of the cache."""

    SCHEMA = KVSchema.gqa(model="tiny", layers=1, kv_heads=1, head_dim=8, dtype="float32")
    FIRST = tuple((i * 7 + 1) % 1000 + 4 for i in range(1100))
    SECOND = FIRST[:600] + tuple((i * 11 + 5) % 1000 + 4 for i in range(450))
    OTHERS = tuple(tuple((i * 13 + k * 77) % 1000 + 4 for i in range(1500)) for k in range(4))

    def folded(self) -> Iterator[tuple[set[bytes], Folder]]:
        """The keys that are held after each batch."""
        folder, reader = Folder(EngineChain.of(self.SCHEMA)), EventReader()
        for line in json.loads((Path(__file__).parent / "vllm_0_32_events.json").read_text()):
            for event in reader.read(zlib.decompress(base64.b64decode(line))):
                if isinstance(event, EngineStored):
                    folder.stored(event, 0.0)
                elif isinstance(event, EngineRemoved):
                    folder.removed(event)
                else:
                    folder.reset()
            yield set(folder.keys("hbm")), folder

    def keys(self, *prompts: Sequence[int]) -> set[bytes]:
        return {key for prompt in prompts for key in self.SCHEMA.prefix(prompt).keys}

    def tail(self, prompt: Sequence[int]) -> tuple[bytes, ...]:
        prefix = self.SCHEMA.prefix(prompt)
        return part_keys(prefix, after=len(prefix))

    def test_keys_are_those_of_the_prompts(self) -> None:
        after = [keys for keys, _ in self.folded()]
        assert after[0] == self.keys(self.FIRST)
        assert after[1] == after[2] == self.keys(self.FIRST, self.SECOND)
        assert after[4] == self.keys(self.FIRST, self.SECOND, *self.OTHERS[:2])
        # The third evicts seven blocks: the first prompt's last four, and three of the second's.
        assert after[5] == self.keys(self.FIRST[:512], *self.OTHERS[:3])
        assert after[7] == after[8] == set()

    def test_part_keys_are_those_of_the_blocks_of_128_tokens(self) -> None:
        after = [set(folder.starts.keys()) for _, folder in self.folded()]
        assert after[0] == set(part_keys(self.SCHEMA.prefix(self.FIRST)))  # the second shares them
        assert after[1] == after[2] == after[0]
        # Of two others 1,500 tokens: 476 behind two blocks, of which the engine has 384.
        tails = {key for p in self.OTHERS[:2] for key in self.tail(p)[:24]}
        assert tails < after[4]
        assert len(after[4] - tails) == 3 * 31
        assert (len(after[7]), len(after[8])) == (0, 8)

    def test_nothing_is_left_over(self) -> None:
        *_, (_, folder) = self.folded()
        assert len(folder) == 1  # the last prompt has one block of 128
        assert folder.waiting_parts == 0
        assert folder.counts.unknown_parents == folder.counts.refused_parts == 0


def test_prefixes_below_a_block_are_followed(world: World, start: Callable[..., Engine]) -> None:
    """Until a removal; of an engine that has said nonsense for a while; never after a restart."""
    engine, prompt = start(), list(range(60))
    world.feed.follow(engine.publisher())
    engine.wait_for_subscriber()
    engine.publish(stored(prompt))
    wait_until(lambda: world.held_parts(prompt) == 3, "48 tokens are held")
    assert world.held(prompt) == 0
    engine.publish(removed(hashes(prompt)[2]))
    wait_until(lambda: world.held_parts(prompt) == 2, "32 tokens are held")
    assert world.feed.statistics()["engine"]["part_keys"] == 2
    engine.publish(raw=b"\xc1 no msgpack")
    wait_until(lambda: world.held_parts(prompt) and world.parts.guessed_blocks == 2, "doubted")
    engine.restart()
    engine.publish(stored(list(range(500, 520))))
    wait_until(lambda: world.held_parts(prompt) == 0, "the engine has restarted")
    world.feed.unfollow("engine")
    wait_until(lambda: world.held_parts(list(range(500, 520))) == 0, "the engine has left")


def test_garbage_is_counted_and_what_is_known_doubted(
    world: World, start: Callable[..., Engine]
) -> None:
    engine, prompt = start(), list(range(64))
    world.feed.follow(engine.publisher())
    engine.wait_for_subscriber()
    engine.publish(stored(prompt))
    engine.publish(raw=b"\xc1 no msgpack")
    engine._pub.send_multipart([b"only a topic"])
    engine._pub.send_multipart([b"topic", b"not a number", b""])
    world.await_count("malformed", 3)
    wait_until(
        lambda: world.held(prompt) == 1 and world.holdings.guessed_blocks == 1, "it is doubted"
    )


def test_what_one_engine_says_does_not_end_the_feed_of_the_others(
    world: World, start: Callable[..., Engine]
) -> None:
    """An adapter's name that is not a valid namespace; keys that can't be made; a feed's fault."""

    def refuse(namespace: str) -> bytes:
        if namespace == "lora:fault":
            raise RuntimeError("nobody foresaw this")
        if namespace:
            raise InvalidInput("no such namespace")
        return CHAIN.root(namespace)

    one, two = start(replays=False), start(replays=False)
    prompt, second, third = (list(range(at, at + 64)) for at in (0, 1000, 2000))
    chain = EngineChain(CHAIN.block_tokens, refuse, CHAIN.follow)
    world.feed.follow(EventPublisher("engine", one.endpoint, chain))
    world.feed.follow(two.publisher("two"))
    for engine in (one, two):
        engine.wait_for_subscriber()
    one.publish(stored(prompt))
    one.publish(stored(third, lora_name="ü" * 1000))
    world.await_count("foreign_parts", 4)
    world.await_held(prompt, 1)
    assert world.holdings.guessed_blocks == 0
    one.publish(stored(third, lora_name="sql"), stored(second))
    world.await_count("refused", 1)
    world.await_held(second, 1)
    wait_until(
        lambda: world.held(prompt) and world.holdings.guessed_blocks == 2, "all of it is doubted"
    )
    one.publish(stored(list(range(3000, 3064)), lora_name="fault"))
    world.await_count("faults", 1)
    two.publish(stored(prompt))
    world.await_held(prompt, 1, name="two")
    one.publish(stored(list(range(4000, 4064))))
    world.await_held(list(range(4000, 4064)), 1)
    assert world.feed.alive


def test_a_feed_that_has_ended_says_so(start: Callable[..., Engine]) -> None:
    engine, world = start(replays=False), World()
    with contextlib.closing(world.feed):
        world.feed.follow(engine.publisher())
        engine.wait_for_subscriber()
        assert world.feed.alive
        world.inbox.close()
        engine.publish(stored(list(range(64))))
        wait_until(lambda: not world.feed.alive, "the feed has ended")


def test_an_engine_leaves_what_others_of_its_name_have(
    world: World, start: Callable[..., Engine]
) -> None:
    engine, prompt = start(replays=False), list(range(64))
    for tier in NODE_TIERS:
        world.holdings.apply(Added("engine", tier, keys(prompt)), 0.0)
    world.feed.follow(engine.publisher())
    engine.wait_for_subscriber()
    engine.publish(stored(prompt))
    world.await_held(prompt, 1)
    engine.publish({"type": "AllBlocksCleared"})
    world.await_held(prompt, 0)
    engine.publish(stored(prompt), stored(prompt, medium="STORAGE"))
    world.await_held(prompt, 1)
    world.feed.unfollow("engine")
    world.await_held(prompt, 0)
    assert world.held(prompt, tier="dram") == 1
    assert world.held(prompt, tier="nvme") == 0, "it spoke of that itself"


def test_engines_are_told_apart_and_topics_chosen(
    world: World, start: Callable[..., Engine]
) -> None:
    one, two, prompt = start(replays=False), start(replays=False), list(range(64))
    world.feed.follow(one.publisher("one", topic="kv@"))
    world.feed.follow(two.publisher("two", topic="another"))
    for engine in (one, two):
        engine.wait_for_subscriber()
    two.publish(stored(prompt))
    one.publish(stored(prompt))
    world.await_held(prompt, 1, name="one")
    assert world.held(prompt, name="two") == 0
    # Of two publishers with the same name the last one counts.
    world.feed.follow(two.publisher("one"))
    two.wait_for_subscriber()
    world.await_held(prompt, 0, name="one")
    two.publish(stored(prompt))
    world.await_held(prompt, 1, name="one")


def test_an_engine_that_is_not_there_yet_is_followed_when_it_comes(
    world: World, start: Callable[..., Engine], tmp_path: Path
) -> None:
    endpoint, prompt = f"ipc://{tmp_path}/events", list(range(64))
    world.feed.follow(EventPublisher("engine", endpoint, CHAIN))
    world.await_count("batches", 0)
    engine = start(endpoint=endpoint, replays=False)
    engine.wait_for_subscriber()
    engine.publish(stored(prompt))
    world.await_held(prompt, 1)


@pytest.mark.parametrize(
    "endpoint", ["", "tcp://*:5557", "http://host:80", "host:80", "inproc://x"]
)
def test_endpoints_that_nobody_can_connect_to_are_refused(world: World, endpoint: str) -> None:
    with pytest.raises(InvalidRequest, match="endpoint"):
        world.feed.follow(EventPublisher("engine", endpoint, CHAIN))
    world.feed.unfollow("engine")
    assert world.feed.statistics() == {}


def test_a_feed_ends_though_nobody_takes_its_updates(start: Callable[..., Engine]) -> None:
    engine, inbox = start(), UpdateInbox(keys_max=1)
    with VllmFeed(inbox) as feed:
        feed.follow(engine.publisher())
        engine.wait_for_subscriber()
        for seed in range(20):
            engine.publish(stored(list(range(64 * seed, 64 * seed + 64))))
        wait_until(lambda: len(inbox) >= 1, "an update waits")
        inbox.close()
    assert len(inbox) == 0
    feed.close()
