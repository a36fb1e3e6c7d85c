"""Sanitises text that is shown on terminals: names of nodes and clients, and text from peers.

A control character could clear a screen, change its title or forge a line of our output. So our own
names are checked when the user sets them, names from peers when they are decoded, and text for
which a decoder has no rule is cleaned (`printable`) before it is shown.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from .errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

# Names are shown in tables, to be read by people.
NAME_MAX = 200

# The pattern of names that decoders accept: no control characters of ASCII or Latin-1.
PLAIN = r"\A[^\x00-\x1f\x7f-\x9f]*\Z"


def check_name(name: str) -> str:
    """`name` if it is a valid name of a node. Raises InvalidInput."""
    if not name or len(name) > NAME_MAX or not name.isprintable():
        shown = repr(name[:NAME_MAX])
        raise InvalidInput(
            f"a node's name is 1 to {NAME_MAX} characters that can be printed, on one line; "
            f"not {shown}, of {len(name)}"
        )
    return name


# sun_path of unix(7), without the zero at its end.
SOCKET_PATH_MAX = 107


def check_socket_path(path: Path) -> Path:
    """`path` if a unix socket can have it. Raises InvalidInput."""
    nbytes = len(os.fsencode(path))
    if nbytes > SOCKET_PATH_MAX:
        raise InvalidInput(
            f"the path of a unix socket has at most {SOCKET_PATH_MAX} bytes, and "
            f"{shown(str(path))} has {nbytes}; choose a shorter one"
        )
    return path


def printable(value: Any) -> Any:
    """A copy of nested JSON-like values with "?" for each unprintable character in their strings
    and keys. Newlines and tabs stay."""
    if isinstance(value, str):
        if value.isprintable():
            return value
        return "".join(c if c.isprintable() or c in "\n\t" else "?" for c in value)
    if isinstance(value, dict):
        return {printable(key): printable(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [printable(one) for one in value]
    return value


# The most characters of a caller's value in an error message.
SHOWN_MAX = 100


def shown(value: object) -> str:
    """An invalid value as text for an error message: its `repr`, cut to SHOWN_MAX, or its type if
    `repr` fails. `repr` fails for an int of very many digits, and callers' classes may raise any
    exception in it."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - the error that this is a part of has to be raised
        return f"a {type(value).__name__}"
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."
