"""The hierarchy of exceptions; each names the cause and what to do.

A miss is a value (`hit.blocks == 0`, `blocks.missing`), never an exception. An exception is either
the caller's mistake (`InvalidInput` and below), the pool's condition (`NoRoom`, `NodeUnavailable`),
or damage that was detected before it could be served (`CorruptBlock`).
"""

from __future__ import annotations

import contextlib
import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


class TiffinError(Exception):
    """The base class of all exceptions that Tiffin raises on purpose."""


class InvalidInput(TiffinError, ValueError):
    """The caller passed an invalid argument; the message says which values are valid."""


class MissingExtra(InvalidInput):
    """An optional library is not installed; the message has the whole line that installs it."""


class SchemaError(InvalidInput):
    """A schema that describes no valid block, or bytes that do not fit the schema."""


class TokenError(InvalidInput):
    """Token ids that are not integers in [0, 2**32)."""


class CorruptBlock(TiffinError):
    """A block failed a check: magic, checksum, identity, position. Its bytes were not served."""


class NoRoom(TiffinError):
    """A tier could not make room within the deadline; the message says what occupies the space."""


class TierUnavailable(TiffinError):
    """A tier's medium failed an operation (ENOSPC, EIO, read-only); a node works on without it."""


class Draining(NoRoom):
    """The node is draining: it serves its blocks and accepts no new ones."""


class StaleLease(TiffinError):
    """The lease or reservation has ended, expired, was released before, or is another client's."""


class DeadlineExceeded(TiffinError):
    """An operation without partial results did not finish within its `timeout_s`."""


class ClientBusy(DeadlineExceeded):
    """Other calls of the same client took all the time, so that the node was not asked: that says
    nothing about the node."""


class ClientClosed(TiffinError):
    """The caller used a verb or a view after `close()`, or after the release of its lease."""


class NodeUnavailable(TiffinError, ConnectionError):
    """No node answers at this address, or the connection to it broke."""


class NotAuthenticated(NodeUnavailable):
    """Authentication failed: node or client rejected the other's token proof or certificate."""


class DirectoryUnavailable(TiffinError, ConnectionError):
    """A pool's directory does not answer; clients continue with the nodes that they know."""


class ProtocolError(TiffinError):
    """The peer sent bytes that are not this protocol: garbage, truncated, oversized."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol or of the block format."""


def lacks_descriptors(error: BaseException) -> bool:
    """Whether this error, or one that led to it, is that no file descriptor was left."""
    if isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE):
        return True
    before = error.__cause__ or error.__context__
    return before is not None and lacks_descriptors(before)


@contextlib.contextmanager
def open_errors() -> Iterator[None]:
    """Around the opening of a client: raises NodeUnavailable, with what to do about it, for every
    error that comes from a lack of file descriptors, and for a bare OSError."""
    try:
        yield
    except Exception as error:
        if lacks_descriptors(error):
            raise NodeUnavailable(
                f"no file descriptor is left to open this client ({error}): close what this "
                "process has open, or raise its limit (ulimit -n; LimitNOFILE= of a service)"
            ) from error
        if isinstance(error, OSError) and not isinstance(error, TiffinError):
            raise NodeUnavailable(f"this client can't be opened: {error}") from error
        raise
