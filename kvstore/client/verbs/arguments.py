"""Argument validation: checks and converts the arguments of every client's verbs, once.

A parameter means the same in all clients and verbs, so one table has the check for each of them.
The code behind it gets plain floats and ints, and prefixes: numbers of other libraries, which
messages can't carry, are converted to Python's, and an unusable argument raises InvalidInput before
the client sends anything. `put`'s payloads and `get`'s `into` are checked against the schema
(`payload_buffers.py`).
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from itertools import islice
from numbers import Integral, Real
from operator import methodcaller
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar, cast

import numpy as np

from ...deadlines import Within
from ...errors import InvalidInput, SchemaError
from ...format.key_space import KeySpace
from ...format.keys import Prefix
from ...node.core import messages
from ...node.node import Node
from ...text import shown

Verify = Literal["always", "sampled", "off"]
VERIFY: tuple[Verify, ...] = ("always", "sampled", "off")
BLOCKS_MAX = messages.KEYS_BYTES_MAX // 16
FOREVER_S = 1e9
# The most layers that a stream may prefetch, each of all blocks: for 131,072 tokens of a large
# model, a layer is half a GiB. More than a few hide no more latency than one or two do.
AHEAD_MAX = 16
# More replicas of one prompt are a mistake of the caller: each takes memory.
REPLICAS_MAX = 16
# The most nodes to which one call replicates a prompt, one after the other.
TARGETS_MAX = 1024

P = ParamSpec("P")
R = TypeVar("R")
Check = Callable[[Any], Any]


# -- numbers ---------------------------------------------------------------------------------------


def _real(value: object) -> float:
    """A plain float; NaN for what is no number. A bool is a mistake of the caller, not 1.0."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf if cast("Any", value) > 0 else -math.inf


def _integer(value: object) -> int | None:
    """A plain int that messages can carry; None if `value` is no such number."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    number = int(value)
    return number if abs(number) <= messages.NATURAL_MAX else None


def _count(what: str, lowest: int, highest: int) -> Callable[[object], int]:
    def check(value: object) -> int:
        number = _integer(value)
        if number is None or not lowest <= number <= highest:
            raise InvalidInput(
                f"{what}={shown(value)}; it is a whole number from {lowest} to {highest}"
            )
        return number

    return check


def check_timeout(timeout_s: float) -> float:
    """`timeout_s` as a float if a node accepts it; raises InvalidInput."""
    seconds = timeout_s if type(timeout_s) is float else _real(timeout_s)
    if not 0 <= seconds <= messages.TIMEOUT_S_MAX:
        raise InvalidInput(
            f"timeout_s={shown(timeout_s)}; it must be a number of seconds from 0 to "
            f"{messages.TIMEOUT_S_MAX:.0f}"
        )
    return seconds


def check_ttl(ttl_s: float | None) -> float:
    """A pin's time to live in seconds, FOREVER_S for None and at most; raises InvalidInput."""
    if ttl_s is None:
        return FOREVER_S
    seconds = _real(ttl_s)
    if not seconds > 0:
        raise InvalidInput(f"ttl_s must be a positive number of seconds, not {shown(ttl_s)}")
    return min(seconds, FOREVER_S)


check_ahead = _count("ahead", 0, AHEAD_MAX)
check_replicas = _count("replicas", 1, REPLICAS_MAX)
_check_number = _count("node", 0, messages.NATURAL_MAX)


def _check_node(node: object) -> int | None:
    return None if node is None else _check_number(node)


def _check_targets(to: Iterable[object]) -> list[int]:
    try:
        targets = list(islice(to, TARGETS_MAX + 1))
    except TypeError as error:
        raise InvalidInput(f"to={shown(to)}; pass a list of nodes' numbers") from error
    if len(targets) > TARGETS_MAX:
        raise InvalidInput(f"more than {TARGETS_MAX} nodes in one call; that is the limit")
    return [_check_number(target) for target in targets]


# -- what a call is about --------------------------------------------------------------------------


def check_prefix(prefix: Prefix) -> Prefix:
    """`prefix` if it is a Prefix; raises InvalidInput."""
    if not isinstance(prefix, Prefix):
        raise InvalidInput(
            f"pass a Prefix, schema.prefix(token_ids), not {shown(prefix)}, which is a "
            f"{type(prefix).__name__}"
        )
    return prefix


def check_blocks(prefix: Prefix) -> Prefix:
    """`prefix` if it is a Prefix of at most BLOCKS_MAX blocks; raises InvalidInput."""
    if len(check_prefix(prefix)) > BLOCKS_MAX:
        raise InvalidInput(f"{len(prefix)} blocks in one call; the limit is {BLOCKS_MAX}")
    return prefix


def _part(what: str) -> Check:
    """A check that a choice of layers or heads has plain ints; the schema checks their range."""

    def whole(value: object) -> int | None:
        number = None if value is None else _integer(value)
        if value is not None and number is None:
            raise SchemaError(f"{what} are chosen by whole numbers, not by {shown(value)}")
        return number

    def check(chosen: object) -> object:
        if isinstance(chosen, range):
            for number in (chosen.start, chosen.stop, chosen.step):
                whole(number)
            return chosen
        if isinstance(chosen, slice):
            if whole(chosen.step) not in (None, 1):
                raise SchemaError(f"{what} are consecutive: the step must be 1")
            return slice(whole(chosen.start), whole(chosen.stop))
        if isinstance(chosen, tuple):
            return tuple(map(whole, chosen))
        return whole(chosen)

    return check


def _check_layer(layer: object) -> int:
    number = _integer(layer)
    if number is None:
        raise SchemaError(f"a layer is a whole number, not {shown(layer)}")
    return number


def _check_shard(shard: object) -> object:
    """(rank, ranks) or a Shard, with plain ints; the schema checks whether it allows them."""
    if isinstance(shard, tuple):  # the stages of a Shard are one as well
        return tuple(_check_shard(value) for value in shard)
    number = _integer(shard)
    return shard if number is None else number


def _flag(what: str) -> Check:
    def check(value: object) -> bool:
        if isinstance(value, bool | np.bool_):
            return bool(value)
        raise InvalidInput(f"{what}={shown(value)}; it is True or False")

    return check


def check_verify(verify: str) -> Verify:
    """`verify` if it is a verification policy; raises InvalidInput."""
    for policy in VERIFY:
        if isinstance(verify, str) and verify == policy:
            return policy
    raise InvalidInput(f"verify={shown(verify)}; choose one of {', '.join(VERIFY)}")


def check_name(name: str) -> str:
    """`name` if a node accepts it as a client's name; raises InvalidInput."""
    # Printable, because status commands show it on other users' terminals.
    if not (isinstance(name, str) and len(name) <= messages.NAME_MAX and name.isprintable()):
        raise InvalidInput(
            f"a client's name is printable text of at most {messages.NAME_MAX} characters"
        )
    return str(name)


def _check_own_node(node: object) -> Node:
    if not isinstance(node, Node):
        raise InvalidInput(f"pass a Node of this process, not {shown(node)}; a URL is opened")
    node._check_process()
    return node


def _check_space(space: object) -> object:
    if not isinstance(space, KeySpace):
        raise InvalidInput(f"space is a {type(space).__name__}; pass a KeySpace")
    return space


def _as_it_is(value: Any) -> Any:
    """No check here: the code that has the schema, or parses the URL, checks the argument."""
    return value


# -- the table -------------------------------------------------------------------------------------

_OF_VERBS: Mapping[str, Check] = {
    "prefix": check_blocks,
    "timeout_s": check_timeout,
    "ttl_s": check_ttl,
    "hard": _flag("hard"),
    "sync": _flag("sync"),
    "by_layer": _flag("by_layer"),
    "writing": _flag("writing"),
    "at_least": _count("at_least", 0, messages.KEYS_MAX),
    "verify": lambda verify: None if verify is None else check_verify(verify),
    "layers": _part("layers"),
    "heads": _part("heads"),
    "layer": _check_layer,
    "shard": _check_shard,
    "ahead": check_ahead,
    "replicas": check_replicas,
    "node": _check_node,
    "to": _check_targets,
    "payloads": _as_it_is,
    "into": _as_it_is,
    "space": _check_space,
}
_OF_OPENING: Mapping[str, Check] = {
    "url": _as_it_is,  # `parse_url`
    "node": _check_own_node,
    "verify": check_verify,
    "name": check_name,
    "populate": _flag("populate"),
}


class Usable(Protocol):
    """An object with verbs: a client, or a handle that it returned."""

    def _check_open(self) -> None:
        """Raise the error for an object that can't be used any more, such as a closed client."""


U = TypeVar("U", bound=Usable)
C = TypeVar("C")


def verb(method: Callable[Concatenate[U, P], R]) -> Callable[Concatenate[U, P], R]:
    """Decorate a verb: check that its client is open, check and convert its arguments by the table,
    and end the call soon after its `timeout_s` (`deadlines.py`). Raises the errors of
    `_check_open`, and InvalidInput; a coroutine raises them when it is awaited."""
    return _through(method, _OF_VERBS, methodcaller("_check_open"))


def opening(method: Callable[Concatenate[C, P], R]) -> Callable[Concatenate[C, P], R]:
    """Decorate a class method that makes a client: check its arguments, but no open client."""
    return _through(method, _OF_OPENING, _as_it_is)


def _through(
    method: Callable[Concatenate[C, P], R], table: Mapping[str, Check], enter: Callable[[C], object]
) -> Callable[Concatenate[C, P], R]:
    names = list(inspect.signature(method).parameters)[1:]
    checks = {name: table[name] for name in names}  # KeyError: the table lacks a row
    in_order = list(checks.values())
    time_s = getattr(inspect.signature(method).parameters.get("timeout_s"), "default", None)

    def convert(args: Any, options: dict[str, Any]) -> tuple[Any, ...]:
        """Return the positional arguments converted; convert those by name in place. Surplus
        arguments and unknown names pass, and Python refuses them at the call. Keep this short: a
        whole `match` takes 15 us."""
        for name in options:
            if name in checks:
                options[name] = checks[name](options[name])
        first = [check(value) for check, value in zip(in_order, args, strict=False)]
        return (*first, *args[len(first) :])

    if inspect.iscoroutinefunction(method):

        @wraps(method)
        async def awaited(owner: C, /, *args: P.args, **options: P.kwargs) -> Any:
            enter(owner)
            given = convert(args, options)
            if time_s is None:
                return await method(owner, *given, **options)
            call = Within(cast("float", options.get("timeout_s", time_s)))
            return await call.run_soon(partial(method, owner, *given, **options))

        return cast("Callable[Concatenate[C, P], R]", awaited)

    @wraps(method)
    def checked(owner: C, /, *args: P.args, **options: P.kwargs) -> R:
        enter(owner)
        given = convert(args, options)
        if time_s is None:
            return method(owner, *given, **options)
        call = Within(cast("float", options.get("timeout_s", time_s)))
        return call.run(partial(method, owner, *given, **options))

    return checked
