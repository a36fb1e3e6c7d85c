"""Mistakes of callers: always a typed error that says what would work, never a damaged pool.

After every mistake the pool must still be whole (`Node.check`) and still hold what it held.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import (
    EXTENT,
    SCHEMA,
    PoolOptions,
    assert_right,
    fresh_prefix,
    is_quiet,
    payload_of,
    payloads_of,
)

from tiffin.kvstore import AsyncClient, Client, KVSchema, Prefix
from tiffin.kvstore.errors import (
    InvalidInput,
    NodeUnavailable,
    SchemaError,
    TierUnavailable,
    TiffinError,
    TokenError,
)
from tiffin.kvstore.node.server.tcp_server import RemoteService
from tiffin.kvstore.sizes import format_bytes, parse_bytes
from tiffin.kvstore.url import parse_url

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tiffin.kvstore.node.node import Node

BYTES = SCHEMA.block_bytes
OTHER = KVSchema.gqa(model="o", layers=1, kv_heads=1, head_dim=4, dtype="float32", block_tokens=4)


@pytest.fixture
def node() -> Iterator[Node]:
    node = PoolOptions().start_node(Path())
    yield node
    node.close()


@pytest.fixture(params=["attached", "network"])
def client(node: Node, request: pytest.FixtureRequest) -> Iterator[Client]:
    """A client of a pool with one block in it, which no mistake may damage."""
    stored = fresh_prefix(1)
    with contextlib.ExitStack() as stack:
        if request.param == "network":
            service = stack.enter_context(contextlib.closing(RemoteService(node, ("127.0.0.1", 0))))
            client = Client.open(f"tiffin://127.0.0.1:{service.address[1]}")
        else:
            client = Client.attach(node)
        stack.enter_context(client)
        client.put(stored, payloads_of(stored))
        yield client
        node.check()
        numbers = node.statistics()
        assert is_quiet(numbers)
        assert numbers["tiers"]["dram"]["committed_bytes"] == EXTENT
        with client.get(stored) as blocks:
            assert blocks.complete
            assert_right(blocks, stored)


def good(count: int = 1) -> list[Any]:
    return [np.zeros(BYTES, np.uint8) for _ in range(count)]


class TestPayloads:
    @pytest.mark.parametrize(
        ("payload", "message"),
        [
            (np.zeros(BYTES - 1, np.uint8), "bytes"),
            (np.zeros(BYTES + 1, np.uint8), "bytes"),
            (np.zeros(0, np.uint8), "bytes"),
            (b"", "buffer|bytes"),
            (bytes(BYTES * 2), "bytes"),
            (np.zeros(BYTES // 4, np.float32), "float32"),
            (np.zeros(BYTES // 2, np.float16), "float16"),
            (np.zeros(BYTES // 2, ">u2"), "byte order"),
            (np.zeros(BYTES // 8, object), "dtype"),
            (np.zeros(BYTES // 8, "datetime64[s]"), "datetime"),
            (np.zeros(BYTES // 4, "U1"), "dtype|str"),
            (np.zeros((BYTES, 2), np.uint8)[:, 0], "contiguous"),
            (np.zeros((2, BYTES // 2), np.uint8).T, "contiguous"),
            (memoryview(bytes(2 * BYTES))[::2], "buffer"),
            ([0] * BYTES, "buffer"),
            ("x" * BYTES, "buffer"),
            (None, "buffer"),
            (7, "buffer"),
        ],
    )
    def test_a_payload_of_the_wrong_kind(self, client: Client, payload: Any, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            client.put(fresh_prefix(1), [payload])

    @pytest.mark.parametrize("payloads", [[], good(2), None, 5, iter(good(1)), {0: 1, 1: 2}])
    def test_a_wrong_number_of_payloads(self, client: Client, payloads: Any) -> None:
        with pytest.raises(InvalidInput):
            client.put(fresh_prefix(1), payloads)

    def test_one_bad_payload_stores_none(self, client: Client) -> None:
        prefix = fresh_prefix(3)
        with pytest.raises(SchemaError, match="payload 2"):
            client.put(prefix, [*payloads_of(prefix[:2]), bytes(BYTES - 1)])
        assert client.match(prefix).blocks == 0

    def test_numbers_of_another_byte_order_are_not_stored_as_they_lie(self, client: Client) -> None:
        swapped = np.ones(OTHER.block_bytes // 4, ">f4")
        with pytest.raises(InvalidInput, match="byte order"):
            client.put(fresh_prefix(1, OTHER), [swapped])

    @pytest.mark.parametrize(
        "make",
        [
            lambda torch: torch.zeros(BYTES // 4),
            lambda torch: torch.zeros(BYTES // 2, 2, dtype=torch.bfloat16)[:, 0],
            lambda torch: torch.zeros(BYTES // 2, dtype=torch.float16),
            lambda torch: torch.zeros(BYTES // 2, dtype=torch.bfloat16, device="meta"),
            lambda torch: torch.zeros(BYTES // 2 - 1, dtype=torch.bfloat16),
        ],
        ids=["float32", "gaps", "float16", "no memory", "size"],
    )
    def test_torch_tensors_are_checked_alike(self, client: Client, make: Any) -> None:
        torch = pytest.importorskip("torch")
        with pytest.raises(InvalidInput):
            client.put(fresh_prefix(1), [make(torch)])

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda torch: torch._neg_view(torch.zeros(BYTES // 4)), "resolve_neg"),
            (lambda torch: torch.zeros(BYTES // 8, dtype=torch.complex64).conj(), "resolve_conj"),
            (lambda torch: torch.zeros(BYTES // 4).to_sparse(), "to_dense"),
            (lambda torch: torch.zeros(4, BYTES // 16).to_sparse_csr(), "to_dense"),
            (lambda torch: torch.zeros(BYTES // 4).to_mkldnn(), "to_dense"),
            (lambda torch: torch._efficientzerotensor((BYTES // 4,)), "without memory"),
            (lambda torch: torch.nested.nested_tensor([torch.zeros(BYTES // 4)]), "without memory"),
        ],
        ids=["negative", "conjugate", "coo", "csr", "mkldnn", "zero", "nested"],
    )
    @pytest.mark.filterwarnings("ignore")  # torch's own: some of these are prototypes
    def test_tensors_whose_numbers_are_not_their_memory_are_refused(
        self, client: Client, make: Any, message: str
    ) -> None:
        tensor = make(pytest.importorskip("torch"))
        with pytest.raises(InvalidInput, match=message):
            client.put(fresh_prefix(1), [tensor])
        with pytest.raises(InvalidInput, match=message):
            client.get(fresh_prefix(1), into=tensor)

    @pytest.mark.parametrize("dtype", [np.uint8, np.float16])
    @pytest.mark.parametrize("mask", [True, False])
    def test_masked_arrays_are_refused(self, client: Client, dtype: Any, mask: bool) -> None:
        array = np.ma.masked_array(np.zeros(BYTES // np.dtype(dtype).itemsize, dtype), mask=mask)
        with pytest.raises(InvalidInput, match="masked array; pass its values"):
            client.put(fresh_prefix(1), [array])
        with pytest.raises(InvalidInput, match="masked array; pass its values"):
            client.get(fresh_prefix(1), into=array)

    def test_a_torch_tensor_with_a_gradient_is_only_bytes(self, client: Client) -> None:
        torch = pytest.importorskip("torch")
        prefix = fresh_prefix(1)
        tensor = torch.ones(BYTES // 2, dtype=torch.bfloat16, requires_grad=True)
        assert client.put(prefix, [tensor]).complete
        with client.get(prefix) as blocks:
            assert (blocks[0].layer(0).k == 1).all()
        client.remove(prefix)


class TestTargets:
    @pytest.mark.parametrize(
        ("into", "message"),
        [
            (np.zeros(2 * BYTES - 1, np.uint8), "bytes"),
            (np.zeros(3 * BYTES, np.uint8), "bytes"),
            (good(1), "1 buffers"),
            (good(3), "3 buffers"),
            ([], "0 buffers"),
            ([np.zeros(BYTES, np.uint8), np.zeros(BYTES - 1, np.uint8)], "buffer 1"),
            (bytes(2 * BYTES), "read-only"),
            ([bytes(BYTES)] * 2, "read-only"),
            (np.zeros((2 * BYTES, 2), np.uint8)[:, 0], "contiguous"),
            (np.zeros(2 * BYTES // 8, object), "dtype"),
            ("text", "buffer"),
            (5, "buffer"),
        ],
        ids=str,
    )
    def test_buffers_of_the_wrong_kind(self, client: Client, into: Any, message: str) -> None:
        with pytest.raises(InvalidInput, match=message):
            client.get(fresh_prefix(2), into=into)

    def test_a_read_only_array(self, client: Client) -> None:
        buffer = np.zeros(BYTES, np.uint8)
        buffer.flags.writeable = False
        with pytest.raises(InvalidInput, match="read-only"):
            client.get(fresh_prefix(1), into=buffer)

    def test_a_buffer_for_whole_blocks_does_not_fit_a_range(self, client: Client) -> None:
        with pytest.raises(InvalidInput, match="bytes"):
            client.get(fresh_prefix(1), into=good()[0], layers=0)


class TestRanges:
    @pytest.mark.parametrize(
        "layers",
        [2, -1, (0, 3), (1, 1), (1, 0), (0, 1, 2), slice(0, 2, 2), slice(5, 9), range(3, 9), "0",
         1.5, b"x", {}, {0}, [[0]], (0, None)],
        ids=repr,
    )  # fmt: skip
    def test_layers_that_the_schema_does_not_have(self, client: Client, layers: Any) -> None:
        for into in (None, good()[0]):
            with pytest.raises(SchemaError):
                client.get(fresh_prefix(1), layers=layers, into=into)

    @pytest.mark.parametrize("heads", [(0, 3), (2, 2), (1, 0), slice(0, 2, 2), "k", {}, 9, (-1, 1)])
    def test_heads_that_the_schema_does_not_have(self, client: Client, heads: Any) -> None:
        with pytest.raises(SchemaError):
            client.get(fresh_prefix(1), heads=heads)

    def test_an_unknown_verification_policy(self, client: Client) -> None:
        bad: Any = "never"
        with pytest.raises(InvalidInput, match="always, sampled, off"):
            client.get(fresh_prefix(1), verify=bad)


class TestTokens:
    @pytest.mark.parametrize(
        "tokens",
        [
            [-1] * 16,
            [2**32] * 16,
            [0.5] * 16,
            [True] * 16,
            ["1"] * 16,
            [None] * 16,
            "text",
            b"bytes",
            None,
            7,
            np.zeros(16),
            np.zeros((2, 16), np.int64),
            np.full(16, -1),
            np.full(16, 2**32),
            {1, 2},
        ],
        ids=str,
    )
    def test_what_is_no_token(self, tokens: Any) -> None:
        with pytest.raises(TokenError):
            SCHEMA.prefix(tokens)

    def test_a_namespace_is_text_and_a_secret_bytes(self) -> None:
        bad: Any
        for bad in (5, b"x", None, "x" * 2000, "\ud800"):
            with pytest.raises(InvalidInput):
                SCHEMA.prefix([1], namespace=bad)
        for bad in ("text", 5, bytes(65)):
            with pytest.raises(InvalidInput):
                SCHEMA.prefix([1], secret=bad)

    def test_another_schemas_prefix_is_another_prompt(self, client: Client) -> None:
        prefix, stranger = fresh_prefix(1), fresh_prefix(1, OTHER)
        client.put(prefix, payloads_of(prefix))
        twin = OTHER.prefix(prefix.tokens[:4], namespace=prefix.namespace)
        assert client.match(twin).blocks == 0
        with pytest.raises(SchemaError):
            client.put(stranger, [payload_of(prefix.keys[0])])
        client.remove(prefix)

    def test_more_blocks_than_one_call_takes(self, client: Client) -> None:
        tiny = KVSchema.gqa(model="t", layers=1, kv_heads=1, head_dim=1, dtype="int8",
                            block_tokens=1)  # fmt: skip
        prefix = tiny.prefix(range(65_537))
        for verb in (client.match, client.exists, client.get, client.pin, client.remove):
            with pytest.raises(InvalidInput, match="limit"):
                verb(prefix)


def verbs(client: Any, prefix: Prefix, timeout_s: Any) -> list[Callable[[], Any]]:
    return [
        lambda: client.match(prefix, timeout_s=timeout_s),
        lambda: client.exists(prefix, timeout_s=timeout_s),
        lambda: client.get(prefix, timeout_s=timeout_s),
        lambda: client.get(prefix, into=good()[0], timeout_s=timeout_s),
        lambda: client.put(prefix, good(), timeout_s=timeout_s),
        lambda: client.reserve(prefix, timeout_s=timeout_s),
        lambda: client.pin(prefix, timeout_s=timeout_s),
        lambda: client.unpin(prefix, timeout_s=timeout_s),
        lambda: client.remove(prefix, timeout_s=timeout_s),
        lambda: client.statistics(timeout_s=timeout_s),
    ]


class TestTimes:
    @pytest.mark.parametrize("timeout_s", [-1, -0.001, math.nan, math.inf, 3601, 1e308, "1", None])
    def test_timeouts_that_cannot_be(self, client: Client, timeout_s: Any) -> None:
        for verb in verbs(client, fresh_prefix(1), timeout_s):
            with pytest.raises(InvalidInput, match="timeout_s"):
                verb()

    @pytest.mark.parametrize("timeout_s", [-1, math.nan, math.inf, "1"])
    def test_timeouts_that_cannot_be_in_asyncio(self, node: Node, timeout_s: Any) -> None:
        async def use() -> None:
            async with await AsyncClient.attach(node) as client:
                for verb in verbs(client, fresh_prefix(1), timeout_s):
                    with pytest.raises(InvalidInput, match="timeout_s"):
                        await verb()

        asyncio.run(use())

    @pytest.mark.parametrize("ttl_s", [0, -1, math.nan, "1", [1]])
    def test_pins_that_end_before_they_begin(self, client: Client, ttl_s: Any) -> None:
        with pytest.raises(InvalidInput, match="ttl_s"):
            client.pin(fresh_prefix(1), ttl_s=ttl_s)

    def test_a_daemons_client_survives_its_mistakes(self, shared_daemon: Any) -> None:
        """The client refuses messages for which the node would close the connection."""
        prefix, bad = fresh_prefix(1), [-1, math.nan, 3601]
        with Client.open(shared_daemon(PoolOptions()).url) as client:
            link: Any = client.near_link
            (connection,) = link._connections._idle
            for timeout_s in bad:
                for verb in verbs(client, prefix, timeout_s):
                    with pytest.raises(InvalidInput):
                        verb()
            with pytest.raises(InvalidInput):
                client.pin(prefix, ttl_s=math.nan)
            assert client.match(prefix).blocks == 0
            assert link._connections._idle == [connection]

    def test_a_name_is_short_text(self, shared_daemon: Any) -> None:
        bad: Any
        for bad in ("x" * 201, 5, None, "\ud800"):
            with pytest.raises(InvalidInput, match="name"):
                Client.open(shared_daemon(PoolOptions()).url, name=bad)


class TestUrls:
    @pytest.mark.parametrize(
        "url",
        [
            "",
            "x",
            "http://host",
            "tiffin:",
            "tiffin://",
            "tiffin://host",
            "tiffin://host:0",
            "tiffin://host:99999",
            "tiffin://host:7700/path",
            "tiffin://host:7700#part",
            "tiffin://user@host:7700",
            "tiffin://user:secret@host:7700",
            "tiffin://host:7700,",
            "tiffin://host:7700,host:7700",
            "tiffin://" + ",".join(f"host:{port}" for port in range(1, 18)),
            "tiffin://host:7700?speed=9",
            "tiffin://host:7700?admission=sometimes",
            "tiffin://host:7700?home=",
            "tiffin://host:7700?hedge_s=0",
            "tiffin://host:7700?hedge_s=soon",
            "tiffin://host:7700?hedge_share=2",
            "tiffin://host:7700?streams=0",
            "tiffin://host:7700?streams=many",
            "tiffin://host:7700?token_file=/nowhere/token",
            "tiffin://host:7700?tls_cert=/nowhere/cert",
            "tiffin://host:7700?tls_ca=/nowhere/ca",
            "tiffin://host:7700?pool=a/b",
            "tiffin://a..b:7700",
            "redis://host?speed=9",
            "redis://host?pool=a/b",
            "redis://host?admission=",
            "redis://host?streams=9",
            "unix://host/path",
            "unix:/path?dram=1MiB",
            "unix://[bad",
            "embedded:?dram=",
            "embedded:?dram=nonsense",
            "embedded:?dram=-1",
            "embedded:?dram=0",
            "embedded:?dram=1",
            "embedded:?dram=1MiB&speed=9",
            "embedded:?dram=1MiB&policy=zzz",
            "embedded:?dram=1MiB&hugepages=maybe",
            "embedded:?dram=1MiB&high_watermark=x",
            "embedded:?dram=1MiB&high_watermark=nan",
            "embedded:?dram=1MiB&high_watermark=2",
            "embedded:?dram=1MiB&low_watermark=0.95",
            "embedded:?dram=1MiB&write_lease_s=-1",
            "embedded:?dram=1MiB&nvme=/path",
            "embedded:?dram=1MiB&nvme=:1MiB",
            "embedded:?dram=1MiB&nvme=/path:x",
            "embedded:?dram=1MiB&nvme=/a%00b:1MiB",
            "embedded:?dram=1MiB&nvme_queue_depth=nan",
            "embedded:?dram=1MiB&nvme_queue_depth=inf",
            "embedded:?dram=1MiB&nvme_queue_depth=1.5",
            "embedded:?dram=99999999999999999999TiB",
            None,
            5,
            b"embedded:",
            ["embedded:"],
        ],
        ids=repr,
    )
    def test_urls_that_open_nothing(self, url: Any) -> None:
        with pytest.raises(InvalidInput):
            Client.open(url)
        with pytest.raises(InvalidInput):
            asyncio.run(_open(url))

    @pytest.mark.parametrize(
        ("url", "error"),
        [
            ("embedded:?dram=1MiB&nvme=/dev/null/x:1MiB", TierUnavailable),
            ("embedded:?dram=1MiB&nvme={tmp}:0", InvalidInput),
            ("embedded:?dram=1MiB&nvme={tmp}:4000000TiB", (TierUnavailable, InvalidInput)),
            ("embedded:?dram=1MiB&nvme={tmp}:1MiB&nvme_queue_depth=0", InvalidInput),
            ("embedded:?dram=1MiB&nvme={tmp}:1MiB&nvme_queue_depth=65", InvalidInput),
            ("embedded:?dram=500TiB", TierUnavailable),
            ("unix:{tmp}/none", NodeUnavailable),
            ("tiffin://127.0.0.1:1", NodeUnavailable),
            ("tiffin://127.0.0.1:1,[::1]:1", NodeUnavailable),
            ("tiffin://no-such-host.invalid:7700", NodeUnavailable),
            ("unix:{tmp}", NodeUnavailable),
            ("unix:/" + "x" * 200, InvalidInput),
        ],
    )
    def test_places_that_cannot_be_had(self, tmp_path: Path, url: str, error: Any) -> None:
        with pytest.raises(error) as caught:
            Client.open(url.format(tmp=tmp_path))
        assert isinstance(caught.value, TiffinError)

    def test_urls_say_what_to_open(self) -> None:
        options: Any = parse_url(
            "embedded:?dram=2MiB&nvme=/a:b/c:1GiB&policy=sieve&hugepages=yes&prefault=0"
            "&high_watermark=0.7&low_watermark=0.5&write_lease_s=3&demote_on_second_use=on"
        )
        node = options.options
        assert (node.dram_bytes, node.nvme_bytes) == (2 << 20, 1 << 30)
        assert node.nvme_path == Path("/a:b/c")
        assert (node.policy, node.hugepages, node.prefault) == ("sieve", True, False)
        assert (node.core.write_lease_s, node.core.demote_on_second_use) == (3, True)
        socket: Any = parse_url("unix:/run/a%20b.sock")
        assert socket.path == Path("/run/a b.sock")
        assert parse_url("unix:///run/x") == parse_url("unix:/run/x")

    def test_urls_of_pools_say_whom_to_ask(self) -> None:
        fixed: Any = parse_url(
            "tiffin://10.0.0.5:7700,[::1]:7701?token_file=/t&hedge_s=0.2&streams=4&home=none"
        )
        assert fixed.addresses == (("10.0.0.5", 7700), ("::1", 7701))
        assert fixed.credentials == {"token_file": "/t"}
        assert fixed.numbers == {"hedge_s": 0.2, "streams": 4}
        assert (fixed.home, fixed.admission, fixed.directory) == ("none", "second", "")
        redis: Any = parse_url(
            "redis://10.0.0.1:6379/2?pool=prod&password_file=/p&timeout=0.2&admission=never"
        )
        assert (redis.addresses, redis.pool, redis.admission) == ((), "prod", "never")
        assert redis.directory == "redis://10.0.0.1:6379/2?password_file=%2Fp&timeout=0.2"


async def _open(url: Any) -> None:
    async with AsyncClient.open(url):
        pass


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "nbytes"),
        [("0", 0), ("1", 1), ("8GiB", 8 << 30), ("8gib", 8 << 30), ("500MB", 500_000_000),
         ("1.5k", 1500), (" 64 KiB ", 65536), ("1TiB", 1 << 40), (4096, 4096)],
    )  # fmt: skip
    def test_sizes_as_people_write_them(self, text: Any, nbytes: int) -> None:
        assert parse_bytes(text) == nbytes

    @pytest.mark.parametrize(
        "text",
        ["", "B", "iB", "1iB", "GiB", "-1", "1e3", "1 2", "0x10", "1GiBs", "nan", "inf", "1..5",
         "9" * 40, -1, 1 << 63, True, None, 1.5, b"1"],
        ids=repr,
    )  # fmt: skip
    def test_what_is_no_size(self, text: Any) -> None:
        with pytest.raises(InvalidInput):
            parse_bytes(text)

    def test_sizes_for_people(self) -> None:
        assert [format_bytes(n) for n in (0, 1023, 1536, 8 << 30, 5 << 40)] == [
            "0 B", "1023 B", "1.5 KiB", "8 GiB", "5 TiB",
        ]  # fmt: skip
