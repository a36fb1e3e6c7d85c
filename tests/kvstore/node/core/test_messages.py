"""Messages: every field has a limit, and bytes beyond a limit do not decode."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import inspect

from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.node.core import messages

REQUESTS = messages.AnyRequest.__args__
REPLIES = messages.AnyReply.__args__
SIZED = (inspect.BytesType, inspect.StrType, inspect.ListType, inspect.DictType)


def least(kind: inspect.Type) -> Any:
    """The smallest value that a field takes."""
    match kind:
        case inspect.BytesType(min_length=length):
            return bytes(length or 0)
        case inspect.StrType():
            return ""
        case inspect.ListType():
            return []
        case inspect.DictType():
            return {}
        case inspect.BoolType():
            return False
        case inspect.IntType(ge=ge):
            return ge or 0
        case inspect.FloatType():
            return 1.0
    raise AssertionError(f"a field of a kind that this test does not know: {kind}")


def filled(kind: inspect.Type, length: int) -> Any:
    """A value of so many bytes, characters or items."""
    match kind:
        case inspect.BytesType():
            return bytes(length)
        case inspect.StrType():
            return "x" * length
        case inspect.ListType(item_type=item):
            return [least(item)] * length
        case inspect.DictType():
            return {str(i): 0 for i in range(length)}
    raise AssertionError(kind)


def fields_of(kind: type) -> list[inspect.Field]:
    found = inspect.type_info(kind)
    assert isinstance(found, inspect.StructType)
    return list(found.fields)


def sized_fields() -> list[Any]:
    return [
        pytest.param(kind, place, id=f"{kind.__name__}.{field.name}")
        for kind in (*REQUESTS, *REPLIES)
        for place, field in enumerate(fields_of(kind))
        if isinstance(field.type, SIZED)
    ]


def encoded(kind: type, change: dict[int, Any]) -> bytes:
    values = [least(field.type) for field in fields_of(kind)]
    for place, value in change.items():
        values[place] = value
    return msgspec.msgpack.encode([kind.__struct_config__.tag, *values])


def decode(kind: type, body: bytes) -> Any:
    decoder = messages.request_decoder if kind in REQUESTS else messages.reply_decoder
    return decoder.decode(body)


@pytest.mark.parametrize("kind", [*REQUESTS, *REPLIES], ids=lambda kind: kind.__name__)
def test_the_smallest_message_is_one(kind: type) -> None:
    """The control: the messages that the tests below change decode before the change."""
    assert isinstance(decode(kind, encoded(kind, {})), kind)


@pytest.mark.parametrize(("kind", "place"), sized_fields())
def test_every_list_and_string_has_a_limit(kind: type, place: int) -> None:
    field = fields_of(kind)[place]
    limit = field.type.max_length
    assert limit is not None, "without a limit, one message may fill the memory"
    at_limit = filled(field.type, limit)
    assert decode(kind, encoded(kind, {place: at_limit})) is not None
    beyond = filled(field.type, limit + 1)
    with pytest.raises(messages.NOT_A_MESSAGE):
        decode(kind, encoded(kind, {place: beyond}))


@pytest.mark.parametrize(("kind", "place"), sized_fields())
@settings(max_examples=20)
@given(value=st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.lists(st.text())))
def test_anything_else_in_its_place_is_no_message(kind: type, place: int, value: Any) -> None:
    """Unless the field happens to allow the value; only decoding errors are raised."""
    try:
        body = encoded(kind, {place: value})
    except OverflowError:  # larger than any number on the wire
        return
    try:
        message = decode(kind, body)
    except messages.NOT_A_MESSAGE:
        return
    assert isinstance(message, kind)


@pytest.mark.parametrize("text", ["\x1b[2J", "a\rb", "bell\a", "\x9b31m", "\x7f"])
def test_texts_that_would_command_a_terminal(text: str) -> None:
    for kind, place in ((messages.Welcome, 2), (messages.Refused, 2), (messages.Hello, 2)):
        with pytest.raises(messages.NOT_A_MESSAGE):
            decode(kind, encoded(kind, {place: text}))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("two\nlines", "two\nlines"),
        ("\x1b[2J", "?[2J"),
        ("a path \udcff", "a path ?"),
        ("ü" * 9000, "ü" * messages.REFUSAL_MAX),
    ],
    ids=["lines", "control", "surrogate", "long"],
)
def test_a_refusal_can_be_decoded_whatever_it_is_about(text: str, told: str) -> None:
    sent = messages.encoder.encode(messages.refusal(7, InvalidInput(text)))
    got = messages.reply_decoder.decode(sent)
    assert got == messages.Refused(7, "InvalidInput", told)
