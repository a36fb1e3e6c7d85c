"""The HBM tier in front of the pool, on device `cpu`: every path of the bytes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from kvsupport import wait_until  # noqa: E402
from llamasupport import (  # noqa: E402
    BLOCK,
    POOL,
    assert_same_cache,
    computed,
    greedy,
    make_model,
    plain,
    tokens,
)

from tiffin.kvstore import Client  # noqa: E402
from tiffin.kvstore.connectors.transformers import PrefixCache, schema_of  # noqa: E402
from tiffin.kvstore.errors import InvalidInput  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvsupport import Daemon

MIB = 1 << 20


@pytest.fixture
def fronted(client: Client, model: Any) -> Iterator[Callable[..., PrefixCache]]:
    """A function that makes caches with an HBM tier of so many blocks; each must end whole."""
    made: list[PrefixCache] = []

    def make(blocks: int = 16, **options: Any) -> PrefixCache:
        quantised = {
            name: options[name] for name in ("quantise", "scale_tokens") if name in options
        }
        block_bytes = schema_of(model, block_tokens=BLOCK, **quantised).block_bytes
        made.append(
            PrefixCache(
                client, model, block_tokens=BLOCK, hbm_bytes=blocks * block_bytes, **options
            )
        )
        return made[-1]

    yield make
    for cached in made:
        assert cached.hbm is not None
        cached.hbm.check()
        cached.close()
        cached.close()


def numbers(cached: PrefixCache) -> dict[str, Any]:
    assert cached.hbm is not None
    found = cached.hbm.statistics()
    states = ("free", "reserved", "committed", "quarantined")
    assert sum(found[f"{state}_bytes"] for state in states) == found["capacity_bytes"]
    return found


def in_pool(cached: PrefixCache, ids: Any) -> list[bool]:
    return cached.client.exists(cached.schema.prefix(ids))


@pytest.mark.parametrize(
    "options",
    [{}, {"checksum": "xxh3_64_pages"}, {"checksum": "xxh3_64_pages", "quantise": "int8"}],
    ids=["plain", "pages", "int8"],
)
def test_a_second_load_comes_from_hbm(
    fronted: Callable[..., PrefixCache], client: Client, model: Any, options: dict[str, Any]
) -> None:
    cached, ids = fronted(**options), tokens(5 * BLOCK + 17)
    expected = computed(model, ids)
    result = cached.save(expected, ids)
    assert (result.stored, result.reason) == ((0, 1, 2, 3, 4), None)
    loaded, hit = cached.load(ids)
    assert hit == 5 * BLOCK
    if "quantise" not in options:
        assert_same_cache(loaded, expected, hit)
    found = numbers(cached)
    assert (found["published"], found["hbm_hits"], found["pool_hits"]) == (5, 5, 0)
    assert client.statistics()["counters"]["dram_hits"] == 0


def test_greedy_tokens_are_the_same(fronted: Callable[..., PrefixCache], model: Any) -> None:
    cached, ids = fronted(), tokens(4 * BLOCK + 5)
    expected = plain(model, ids)
    for _ in range(3):
        assert greedy(cached.generate, ids) == expected
    assert cached.last.hit_tokens == 4 * BLOCK


def test_what_is_saved_goes_down_at_once(fronted: Callable[..., PrefixCache], model: Any) -> None:
    cached, ids = fronted(blocks=64), tokens(3 * BLOCK)  # far below any watermark
    cached.save(computed(model, ids), ids)
    wait_until(lambda: all(in_pool(cached, ids)), "every block in the pool")
    wait_until(lambda: numbers(cached)["dirty_blocks"] == 0, "nothing that only HBM has")


@pytest.mark.parametrize("options", [{}, {"checksum": "xxh3_64_pages"}], ids=["plain", "pages"])
def test_what_others_stored_comes_up(
    fronted: Callable[..., PrefixCache], client: Client, model: Any, options: dict[str, Any]
) -> None:
    ids = tokens(4 * BLOCK + 1)
    expected = computed(model, ids)
    PrefixCache(client, model, block_tokens=BLOCK, **options).save(expected, ids)
    cached = fronted(**options)
    for _ in range(2):
        loaded, hit = cached.load(ids)
        assert hit == 4 * BLOCK
        assert_same_cache(loaded, expected, hit)
    found = numbers(cached)
    assert (found["pool_hits"], found["hbm_hits"]) == (4, 4)
    assert cached.save(expected, ids).stored == ()


def test_a_prompt_that_is_larger_than_hbm(
    fronted: Callable[..., PrefixCache], client: Client, model: Any
) -> None:
    """HBM serves its part and the pool the rest; blocks without room in HBM go to the pool."""
    ids = tokens(8 * BLOCK + 1)
    expected = computed(model, ids)
    cached = fronted(blocks=3)
    result = cached.save(expected, ids)
    assert (result.stored, result.reason) == (tuple(range(8)), None)
    wait_until(lambda: all(in_pool(cached, ids)), "every block in the pool")
    for _ in range(2):
        loaded, hit = cached.load(ids)
        assert (hit, cached.last.load_reason) == (8 * BLOCK, None)
        assert_same_cache(loaded, expected, hit)
    assert numbers(cached)["hbm_hits"] > 0
    assert PrefixCache(client, model, block_tokens=BLOCK).load(ids)[1] == 8 * BLOCK


@pytest.mark.slow
def test_hbm_serves_while_the_pool_is_away(
    own_daemon: Callable[..., Daemon], model: Any, caplog: pytest.LogCaptureFixture
) -> None:
    daemon, ids = own_daemon(dram=4 * MIB), tokens(3 * BLOCK + 5)
    with (
        Client.open(daemon.url) as client,
        PrefixCache(client, model, block_tokens=BLOCK, hbm_bytes=MIB) as cached,
    ):
        expected = plain(model, ids)
        assert greedy(cached.generate, ids) == expected
        daemon.kill()
        longer = torch.cat([ids, tokens(2 * BLOCK, seed=9)], 1)
        for _ in range(2):
            assert greedy(cached.generate, longer) == plain(model, longer)
        assert cached.last.hit_tokens == 5 * BLOCK  # saved after the pool was lost
        assert cached.failures == 0
        assert numbers(cached)["hbm_hits"] == 3 + 5
    assert "only HBM had are lost" in caplog.text


def test_damage_in_hbm_is_found(
    fronted: Callable[..., PrefixCache], client: Client, model: Any
) -> None:
    cached, ids = fronted(), tokens(4 * BLOCK + 3)
    expected = computed(model, ids)
    cached.save(expected, ids)
    wait_until(lambda: all(in_pool(cached, ids)), "every block in the pool")
    assert cached.hbm is not None
    with cached.hbm.lease(cached.schema.prefix(ids)) as blocks:
        blocks[2].tensor[77] ^= 1
    loaded, hit = cached.load(ids)
    assert hit in (2 * BLOCK, 4 * BLOCK)  # the pool has the right bytes
    assert_same_cache(loaded, expected, hit)
    assert numbers(cached)["damaged"] == 1
    loaded, hit = cached.load(ids)
    assert hit == 4 * BLOCK
    assert_same_cache(loaded, expected, hit)


def test_another_client_begins_with_an_empty_tier(
    fronted: Callable[..., PrefixCache], client: Client, model: Any
) -> None:
    cached, ids = fronted(), tokens(2 * BLOCK + 3)
    greedy(cached.generate, ids)
    with Client.open(POOL) as another:
        cached.client = another
        assert all(client.exists(cached.schema.prefix(ids)))  # was copied to the pool first
        assert cached.client is another
        assert cached.load(ids)[1] == 0
        greedy(cached.generate, ids)
        assert numbers(cached)["published"] == 2
        cached.client = client
    assert cached.load(ids)[1] == 2 * BLOCK


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"hbm_bytes": 100}, "hold no block"),
        ({"hbm_bytes": -1}, "pass a number of bytes"),
        ({"hbm_bytes": True}, "pass a number of bytes"),
        ({"hbm_bytes": 1 << 20, "hbm_device": "cuda:0"}, "kernels reach one"),
    ],
)
def test_a_tier_that_cannot_be(
    client: Client, model: Any, options: dict[str, Any], why: str
) -> None:
    with pytest.raises(InvalidInput, match=why):
        PrefixCache(client, model, block_tokens=BLOCK, **options)


WORKER = """
import sys
sys.path.insert(0, sys.argv[2])
import torch
torch.set_num_threads(1)
from llamasupport import BLOCK, greedy, make_model, tokens
from tiffin.kvstore import Client
from tiffin.kvstore.connectors.transformers import PrefixCache
with Client.open(sys.argv[1]) as client:
    with PrefixCache(client, make_model(), block_tokens=BLOCK, hbm_bytes=1 << 20) as cached:
        greedy(cached.generate, tokens(4 * BLOCK + 9))
        print(cached.last.stored_blocks, cached.hbm.statistics()["published"])
"""


@pytest.mark.slow
def test_two_processes_share_through_the_pool(own_daemon: Callable[..., Daemon]) -> None:
    daemon, model, ids = own_daemon(dram=4 * MIB), make_model(), tokens(4 * BLOCK + 9)
    done = subprocess.run(
        [sys.executable, "-c", WORKER, daemon.url, str(Path(__file__).parent)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.split()) == (0, ["4", "4"]), done.stderr
    with (
        Client.open(daemon.url) as client,
        PrefixCache(client, model, block_tokens=BLOCK, hbm_bytes=MIB) as cached,
    ):
        assert greedy(cached.generate, ids) == plain(model, ids)
        assert (cached.last.hit_tokens, cached.last.stored_blocks) == (4 * BLOCK, 0)
        assert numbers(cached)["brought"] == 4
