"""The bytes of a frame, and that no other bytes are accepted as one."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiffin.messenger.errors import FrameError, RangeError
from tiffin.messenger.transport import NOTHING, Range, Served
from tiffin.messenger.wire import frames
from tiffin.messenger.wire.frame_tags import Seal, can_tag_bytes
from tiffin.messenger.wire.frames import HEAD_BYTES, HEADER, RANGES_MAX, Kind
from tiffin.messenger.wire.framing import FRAME_BYTES_MAX

PAGE = Path(__file__).parents[3] / "docs" / "wire.md"
U64 = st.integers(0, 2**64 - 1)


def split(frame: bytes) -> tuple[Kind, bytes]:
    header = frames.parse_header(memoryview(frame), FRAME_BYTES_MAX)
    assert len(frame) == HEADER.size + header.body_bytes
    return header.kind, frame[HEADER.size :]


@given(st.sampled_from([Kind.READ, Kind.WRITE]), U64, st.lists(st.tuples(U64, U64), max_size=30))
def test_requests_come_back(kind: Kind, grant: int, pairs: list[tuple[int, int]]) -> None:
    ranges = [Range(*pair) for pair in pairs]
    frame = frames.request(kind, grant, ranges)
    assert len(frame) % 16 == 0
    found, body = split(frame)
    assert found is kind
    parsed, array = frames.parse_request(body)
    assert parsed == grant
    assert array.dtype == np.uint64
    assert [Range(*row) for row in array.tolist()] == ranges


@given(st.sampled_from([Kind.DATA, Kind.WRITTEN]), st.integers(0, 2**32 - 1), U64, st.text())
def test_answers_come_back(kind: Kind, ranges: int, nbytes: int, reason: str) -> None:
    frame = frames.answer(kind, Served(ranges, nbytes))
    assert len(frame) == HEAD_BYTES == 32
    assert split(frame)[0] is kind
    assert frames.parse_answer(split(frame)[1]) == (Served(ranges, nbytes), None)
    found, body = split(frames.refusal(kind, reason))
    assert found is kind
    served, why = frames.parse_answer(body)
    assert served == NOTHING
    assert why is not None
    assert len(why.encode("utf-8", "replace")) <= frames.REASON_BYTES_MAX + 2
    if len(reason.encode("utf-8", "replace")) <= frames.REASON_BYTES_MAX:
        assert why == reason.encode("utf-8", "replace").decode()


def test_long_reasons_are_cut() -> None:
    frame = frames.refusal(Kind.DATA, "ä" * 5000)
    assert len(frame) == HEAD_BYTES + frames.REASON_BYTES_MAX
    assert frames.parse_answer(split(frame)[1])[1] == "ä" * 512


def test_limits_of_what_we_send() -> None:
    frames.message_header(FRAME_BYTES_MAX)
    with pytest.raises(RangeError, match="limit"):
        frames.message_header(FRAME_BYTES_MAX + 1)
    frames.request(Kind.READ, 1, [Range(0, 1)] * RANGES_MAX)
    with pytest.raises(RangeError, match="limit"):
        frames.request(Kind.READ, 1, [Range(0, 1)] * (RANGES_MAX + 1))
    for grant, ranges in ((-1, []), (2**64, [Range(0, 0)]), (1, [Range(0, -1)])):
        with pytest.raises(RangeError, match=r"2\*\*64"):
            frames.request(Kind.READ, grant, ranges)


@pytest.mark.parametrize("kind", list(Kind))
def test_limits_of_what_we_take(kind: Kind) -> None:
    limit = frames.BODY_BYTES_MAX[kind]
    for length in (1, limit + 1):
        header = frames.parse_header(memoryview(HEADER.pack(length, kind)), FRAME_BYTES_MAX)
        assert header == (kind, length - 1)
    for length in (0, limit + 2, 2**32 - 1):
        with pytest.raises(FrameError, match="limit"):
            frames.parse_header(memoryview(HEADER.pack(length, kind)), FRAME_BYTES_MAX)


def test_strangers_may_send_less() -> None:
    header = memoryview(HEADER.pack(70_000, Kind.MESSAGE))
    assert frames.parse_header(header, FRAME_BYTES_MAX).body_bytes == 69_999
    with pytest.raises(FrameError, match="limit is 65537"):
        frames.parse_header(header, 65_536)


@pytest.mark.parametrize("code", [0, 6, 77, 255])
def test_unknown_kinds(code: int) -> None:
    with pytest.raises(FrameError, match="unknown kind"):
        frames.parse_header(memoryview(HEADER.pack(10, code)), FRAME_BYTES_MAX)


@given(st.binary(max_size=200))
def test_any_bytes_parse_or_raise(body: bytes) -> None:
    for parse in (frames.parse_request, frames.parse_answer):
        try:
            parse(body)
        except FrameError:
            continue
        assert len(body) >= HEAD_BYTES - HEADER.size
        assert body[1:3] == bytes(2)


def test_counts_that_do_not_match() -> None:
    _, body = split(frames.request(Kind.READ, 7, [Range(1, 2), Range(3, 4)]))
    for wrong in (body[:-1], body + b"\0", body[:-16], body[: HEAD_BYTES - 6], b""):
        with pytest.raises(FrameError):
            frames.parse_request(wrong)
    head = struct.Struct("<BHIIQQ")
    for fields in (
        (0, 0, 1, 0, 7, 0),  # one range announced, none there
        (0, 0, 2**32 - 1, 0, 7, 0),
        (1, 0, 0, 0, 7, 0),  # a request has no status
        (0, 1, 0, 0, 7, 0),
        (0, 0, 0, 1, 7, 0),
        (0, 0, 0, 0, 7, 1),
    ):
        with pytest.raises(FrameError):
            frames.parse_request(head.pack(*fields))
    for fields, reason in (
        ((2, 0, 0, 0, 0, 0), b""),  # an unknown status
        ((0, 0, 1, 0, 5, 0), b"why"),  # served, and a reason
        ((1, 0, 1, 0, 5, 0), b"why"),  # refused, and bytes
    ):
        with pytest.raises(FrameError):
            frames.parse_answer(head.pack(*fields) + reason)


def test_the_page_shows_what_is_sent() -> None:
    examples = {
        "message": frames.message_header(5) + b"lease",
        "read": frames.request(Kind.READ, 9, [Range(4096, 65536), Range(1 << 20, 32)]),
        "data": frames.answer(Kind.DATA, Served(2, 65568)),
        "refused": frames.refusal(Kind.DATA, "no such lease"),
        "write": frames.request(Kind.WRITE, 12, [Range(0, 4)]) + b"\1\2\3\4",
        "written": frames.answer(Kind.WRITTEN, Served(1, 4)),
    }
    seal = Seal(bytes(range(32)))
    head, raw = frames.request(Kind.WRITE, 12, [Range(0, 4)]), b"\1\2\3\4"
    examples["sealed"] = examples["message"] + seal.tag(examples["message"])
    sealed = head + seal.tag(head)
    if can_tag_bytes():
        shown = seal.of_bytes()
        shown.update([memoryview(raw)])
        examples["shown"] = sealed + raw + shown.tag()
    text = PAGE.read_text(encoding="utf-8")
    found = dict(re.findall(r"^```hex (\w+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    if not can_tag_bytes():
        del found["shown"]
    assert list(found) == list(examples)
    for name, dump in found.items():
        assert bytes.fromhex(dump) == examples[name], name


def test_every_kind_and_status_is_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for member in (*Kind, *frames.FrameStatus):
        assert re.search(rf"^\| `{member.name}` \| {member.value} \|", text, re.MULTILINE), member
