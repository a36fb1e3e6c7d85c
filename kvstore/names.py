"""Text that others read on their terminals: names of nodes and clients, and what they say.

A control character in it could clear a screen, change its title or write a line that looks like
ours. So our own names are checked where they are given, those of others where they are decoded,
and what was not decoded by a rule is cleaned before it is shown.
"""

from __future__ import annotations

from typing import Any

from .errors import InvalidInput

# For people to read, in tables.
NAME_MAX = 200

# What decoders take for a name: no control characters of ASCII or Latin-1.
PLAIN = r"\A[^\x00-\x1f\x7f-\x9f]*\Z"


def check_name(name: str) -> str:
    """`name`, if it can be a node's. Raises InvalidInput."""
    if not name or len(name) > NAME_MAX or not name.isprintable():
        shown = repr(name[:NAME_MAX])
        raise InvalidInput(
            f"a node's name is 1 to {NAME_MAX} characters that can be printed, on one line; "
            f"not {shown}, of {len(name)}"
        )
    return name


def printable(value: Any) -> Any:
    """Nested plain values, as JSON has them, with "?" for all in their strings, keys included, that
    can't be printed. Lines and tabs stay."""
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in value)
    if isinstance(value, dict):
        return {printable(key): printable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [printable(one) for one in value]
    return value
