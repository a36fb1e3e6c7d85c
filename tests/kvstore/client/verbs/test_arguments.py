"""Odd values of every parameter of every verb of every kind of client lead to a result or one of
Tiffin's own errors, and the client works as before."""

from __future__ import annotations

import inspect
from decimal import Decimal
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from kvsupport import SCHEMA, assert_right, fresh_prefix
from verbsupport import GOOD, PREFIX, verbs_of

from tiffin.kvstore import AsyncClient, Client
from tiffin.kvstore.client.verbs.slots import Slots
from tiffin.kvstore.errors import InvalidInput, TiffinError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from waysupport import Pool

# Values that are no numbers, and numbers that no node has.
ODD: list[Any] = [
    None, True, False, np.True_, 0, -1, 7, 0.25, -0.0, 2**64, -(2**64), 10**400, 10**5000,
    float("nan"), float("inf"), -float("inf"), 1j, Fraction(1, 4), Decimal("0.25"),
    np.float64(0.25), np.float32(0.25), np.float16(0.25), np.longdouble(0.25), np.float64("nan"),
    np.int64(7), np.uint8(7), np.int64(-1), np.complex128(1), np.datetime64(1, "s"),
    "", "1", "always", np.str_("always"), b"", b"1", bytearray(2), memoryview(b"12"),
    (), (0,), (0, 1), (1, 0), (np.int64(0), np.int64(1)), (True, 2), (0, 2**64), (0.0, 1.0),
    (None, None), ("a", "b"), [], [0, 1], [1, 2, 3], [None], [[]], {}, {0: 1}, {1}, iter([1]),
    slice(None), slice(0, 1), slice(0, 1, 0), slice(0, 1, -1), slice("a", "b"), slice(0.0, 1.0),
    slice(np.int64(0), np.int64(1)), slice(0, 10**5000), range(1), range(0), range(10**5000),
    np.zeros(()), np.zeros(1), np.zeros(3), np.zeros((2, 2), object), np.zeros(3, "U0"),
    np.ma.masked, np.ma.masked_array([1, 2]), object(), object, int, len, lambda: 1, ...,
]  # fmt: skip


def used(pool: Pool, verb: str, arguments: dict[str, Any]) -> Any:
    """Call a verb, use its result, and release it."""
    method = getattr(pool.client.raw, verb)
    if pool.way.startswith("asyncio"):
        return pool.loop.run(_used_async(method, arguments))
    found = method(**arguments)
    if verb == "stream":
        with found as stream:
            return [layer.index for layer in stream]
    if verb in ("get", "reserve"):
        with found:
            pass
    return found


async def _used_async(method: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    found = method(**arguments)
    if method.__name__ == "stream":
        async with found as stream:
            return [layer.index async for layer in stream]
    if method.__name__ in ("get", "reserve"):
        async with found as held:
            return held
    return await found


def shown(value: object) -> str:
    try:
        return repr(value)[:80]
    except ValueError:
        return "a number of many digits"


def test_odd_values_get_a_result_or_an_error_of_ours(pool: Pool) -> None:
    """And leases that the client holds meanwhile stay held, so the node has not disconnected it."""
    kept = pool.put(fresh_prefix(1))
    held = pool.client.get(kept)
    pool.touched.append(PREFIX)
    verbs = verbs_of(pool.client.raw)
    assert set(verbs) <= set(GOOD), "a verb without a row in the table"
    wrong = []
    for verb in verbs:
        method = getattr(pool.client.raw, verb)
        for parameter in inspect.signature(method).parameters:
            for odd in ODD:
                try:
                    used(pool, verb, {**GOOD[verb], parameter: odd})
                except TiffinError:
                    pass
                except Exception as error:  # noqa: BLE001 - that is what is looked for
                    wrong.append(f"{verb}({parameter}={shown(odd)}): {error!r}"[:200])
    assert not wrong, "\n".join(wrong)
    assert pool.client.match(kept).blocks == 1
    assert_right(held, kept)
    held.release()
    pool.client.remove(PREFIX)
    again = pool.put(fresh_prefix(2))
    with pool.client.get(again) as blocks:
        assert_right(blocks, again)
    pool.quiet()


@pytest.mark.parametrize("number", [np.float64(0.5), np.float32(0.5), Fraction(1, 2), np.int8(1)])
def test_numbers_of_other_libraries_are_numbers(pool: Pool, number: Any) -> None:
    prefix = pool.put(fresh_prefix(1))
    assert pool.client.match(prefix, timeout_s=number).blocks == 1
    with pool.client.get(prefix, timeout_s=number) as blocks:
        assert_right(blocks, prefix)
    assert pool.client.pin(prefix, ttl_s=number, timeout_s=number) == 1
    assert pool.client.pin(prefix, ttl_s=2**64) == 1  # for ever
    assert pool.client.unpin(prefix) == 1


def test_ranges_of_other_libraries_are_ranges(pool: Pool) -> None:
    prefix = pool.put(fresh_prefix(1))
    one: Any = np.int64(1)
    for layers in (one, (one, np.int64(2)), slice(one, None)):
        with pool.client.get(prefix, layers=layers, heads=(np.int64(0), one)) as blocks:
            assert blocks[0].layer(1).k.shape == (1, 16, 8)


@pytest.mark.parametrize("value", [True, False, np.True_])
def test_a_flag_is_no_number(pool: Pool, value: Any) -> None:
    """True would count as 1 s, and was most likely meant for another parameter."""
    for call in (
        lambda: pool.client.match(PREFIX, timeout_s=value),
        lambda: pool.client.pin(PREFIX, ttl_s=value),
        lambda: pool.client.get(PREFIX, layers=value),
    ):
        with pytest.raises(InvalidInput):
            call()


@pytest.mark.parametrize("prefix", [[1, 2, 3], None, "text", np.arange(3), SCHEMA])
def test_what_is_no_prefix(pool: Pool, prefix: Any) -> None:
    for verb in ("match", "exists", "get", "reserve", "stream", "pin", "unpin", "remove"):
        with pytest.raises(InvalidInput, match=r"schema\.prefix"):
            used(pool, verb, {"prefix": prefix})
    with pytest.raises(InvalidInput, match=r"schema\.prefix"):
        used(pool, "put", {"prefix": prefix, "payloads": []})


def test_slots_are_published_or_not(pool: Pool) -> None:
    """The only verb of slots with a parameter."""
    prefix = fresh_prefix(1)
    slots: Any = pool.client.reserve(prefix)
    publish = getattr(slots, "publish", None)
    publish = slots._held.publish if hasattr(slots, "_held") else publish
    wrong = []
    for parameter in inspect.signature(Slots.publish).parameters:
        for odd in ODD if parameter != "self" else []:
            try:
                pool.loop.call(lambda o=odd, p=parameter: publish(**{"layer": 0, p: o}))
            except TiffinError:
                pass
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                wrong.append(f"publish({parameter}={shown(odd)}): {error!r}"[:200])
    slots.abort()
    assert not wrong, "\n".join(wrong)
    pool.quiet()


def test_odd_ways_to_open(tmp_path: Path) -> None:
    wrong = []
    for parameter in ("url", "verify", "name", "populate"):
        for odd in ODD:
            try:
                Client.open(**{"url": "embedded:?dram=1MiB", parameter: odd}).close()
            except TiffinError:
                pass
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                wrong.append(f"open({parameter}={shown(odd)}): {error!r}"[:200])
    for odd in ODD:
        with pytest.raises(InvalidInput):
            Client.attach(odd)
    assert not wrong, "\n".join(wrong)


def test_odd_ways_to_open_in_asyncio(loop_thread: Any) -> None:
    async def opened(arguments: dict[str, Any]) -> None:
        async with AsyncClient.open(**arguments):
            pass

    async def attached(odd: Any) -> None:
        await AsyncClient.attach(odd)

    wrong = []
    for parameter in ("url", "verify", "name", "populate"):
        for odd in ODD:
            try:
                loop_thread.run(opened({"url": "embedded:?dram=1MiB", parameter: odd}))
            except TiffinError:
                pass
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                wrong.append(f"open({parameter}={shown(odd)}): {error!r}"[:200])
    for odd in ODD:
        with pytest.raises(InvalidInput):
            loop_thread.run(attached(odd))
    assert not wrong, "\n".join(wrong)
