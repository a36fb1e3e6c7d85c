"""Encodes a decision as JSON text once for all subscribers, with any number of candidates."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from .conversions import by_cost, candidate_reply, entry_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..core.request_outcome import RequestOutcome
    from ..records import Candidate, Decision, Rejection

_encoder = msgspec.json.Encoder()
# The last fields of an encoded `EntryReply` without candidates.
_NO_CANDIDATES = b'"candidates":[],"decode_candidates":[]}'


class Shown:
    """An `entry` of the decision log with its text, which is encoded lazily and cached."""

    __slots__ = ("_became", "_decode", "_head", "_prefill", "_unix_s", "entry")

    def __init__(
        self,
        entry: Decision | Rejection,
        unix_s: Callable[[float], float],
        became: RequestOutcome | None = None,
    ) -> None:
        self.entry, self._became = entry, became
        self._unix_s = unix_s
        self._head = b""
        self._prefill = _Candidates(entry.candidates)
        self._decode = _Candidates(entry.decode_candidates)

    def text(self, candidates: int) -> bytes:
        """An `EntryReply` as JSON, with at most `candidates` of its candidates, the cheapest
        first."""
        if not self._head:
            whole = _encoder.encode(entry_reply(self.entry, self._unix_s, self._became))
            assert whole.endswith(_NO_CANDIDATES)
            self._head = whole[: -len(_NO_CANDIDATES)]
        shown = self._prefill.text(candidates), self._decode.text(candidates)
        return b'%b"candidates":[%b],"decode_candidates":[%b]}' % (self._head, *shown)


class _Candidates:
    """Candidates in order of cost, each encoded when it is first needed."""

    __slots__ = ("_given", "_ordered", "_texts")

    def __init__(self, given: Sequence[Candidate]) -> None:
        self._given = given
        self._ordered: list[Candidate] = []
        self._texts: list[bytes] = []

    def text(self, count: int) -> bytes:
        if count > 0 and not self._ordered:
            self._ordered = by_cost(self._given)
        for one in self._ordered[len(self._texts) : count]:
            self._texts.append(_encoder.encode(candidate_reply(one)))
        return b",".join(self._texts[:count])
