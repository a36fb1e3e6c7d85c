"""Runs the verbs of an HBM store in another thread when the main thread calls them.

Verbs change state that all uses of the memory share: extents, leases, counts. An exception of a
signal handler must not interrupt such a change (`messenger/signal_safe.py`). When one comes, the
main thread abandons the call and raises the exception at once, which is safe as the verb touches
nothing of the caller's: the other thread finishes the verb, and its lease or reservation ends when
its result is garbage (`lease_claims.py`). The current CUDA stream is per thread, so the call passes
it on.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from tiffin.messenger.signal_safe import off_main_thread, uninterrupted

from ..format.keys import Prefix
from .device.device_memory import on_current_stream

if TYPE_CHECKING:
    from .device.device_memory import HbmMemory


class Owner(Protocol):
    """The object with the verbs: `HbmStore`."""

    _memory: HbmMemory


def _elsewhere(owner: Owner, action: partial[Any]) -> Any:
    # Copy prefixes: after it has abandoned a call, the caller may extend its prefix.
    given = [_fixed(argument) for argument in action.args]
    named = {name: _fixed(argument) for name, argument in action.keywords.items()}
    fixed = partial(action.func, *given, **named)
    return uninterrupted(on_current_stream(owner._memory.device, fixed))


def _fixed(argument: object) -> object:
    return argument[:] if isinstance(argument, Prefix) else argument


in_one_piece = off_main_thread(_elsewhere)
