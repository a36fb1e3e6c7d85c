"""Releases for clients that have many held requests: one call waits for all of them.

A prompt is scheduled with a name of the client's own choice, `waiter`. What is released, or has to
leave its queue, is put into the mailbox of that name, and a call of `POST /v1/releases/{waiter}`
takes all that is there. A busy client so pays for a call and not for one of each request.

A letter that is lost, with the answer of a call, or as a mailbox is full or was not looked into for
long, costs time and nothing else: who waits asks for its request itself now and then.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

# Clients; of more, those that have looked into theirs longest ago lose it.
MAILBOXES_MAX = 1024
# Names in one: more than a gateway has requests at a time.
LETTERS_MAX = 8192
# How many more expected names than those that are held make it worth to look for them.
_SPARE = 1024


@dataclass(slots=True)
class _Mailbox:
    names: deque[str] = field(default_factory=lambda: deque(maxlen=LETTERS_MAX))
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class ReleaseMailboxes:
    """See the module. `holds`: whether a request is held. For one event loop."""

    def __init__(self, holds: Callable[[str], bool]) -> None:
        self._holds = holds
        self._waiter_of: dict[str, str] = {}
        self._room = _SPARE
        self._mailboxes: OrderedDict[str, _Mailbox] = OrderedDict()
        self._closed = False

    def __len__(self) -> int:
        """How many requests are expected to be released."""
        return len(self._waiter_of)

    def expect(self, name: str, waiter: str) -> None:
        """Put this request's name into the mailbox of `waiter` once it is held no more."""
        self._waiter_of[name] = waiter
        if len(self._waiter_of) > self._room:  # some ended while they were held
            held = {one: of for one, of in self._waiter_of.items() if self._holds(one)}
            self._waiter_of, self._room = held, 2 * len(held) + _SPARE

    def put(self, names: Iterable[str]) -> None:
        """The holds of these requests have ended."""
        for name in names:
            waiter = self._waiter_of.pop(name, None)
            if waiter is not None:
                mailbox = self._mailbox(waiter)
                mailbox.names.append(name)
                mailbox.arrived.set()

    async def take(self, waiter: str, wait_s: float) -> list[str]:
        """All names in the mailbox; if there are none, waits for the first, up to `wait_s`."""
        mailbox = self._mailbox(waiter)
        self._mailboxes.move_to_end(waiter)
        if not mailbox.names and not self._closed:
            try:
                async with asyncio.timeout(wait_s):
                    await mailbox.arrived.wait()
            except TimeoutError:
                pass
        names = list(mailbox.names)
        mailbox.names.clear()
        mailbox.arrived.clear()
        return names

    def close(self) -> None:
        """Let nobody wait any longer."""
        self._closed = True
        for mailbox in self._mailboxes.values():
            mailbox.arrived.set()

    def _mailbox(self, waiter: str) -> _Mailbox:
        found = self._mailboxes.get(waiter)
        if found is None:
            found = self._mailboxes[waiter] = _Mailbox()
            if len(self._mailboxes) > MAILBOXES_MAX:
                self._mailboxes.popitem(last=False)
        return found
