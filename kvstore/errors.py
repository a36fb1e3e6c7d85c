"""One small tree of errors, each saying whose fault it is and what to do.

A miss is a value (`hit.blocks == 0`, `blocks.missing`), never an exception. What is raised here is
either the caller's mistake (`InvalidInput` and below), the pool's condition (`NoRoom`,
`NodeUnavailable`), or damage that was detected before it could be served (`CorruptBlock`).
"""


class TiffinError(Exception):
    """Root of everything that Tiffin raises on purpose."""


class InvalidInput(TiffinError, ValueError):
    """The caller passed something that can never work; the message says what would."""


class SchemaError(InvalidInput):
    """A schema that describes no valid block, or bytes that do not fit the schema."""


class TokenError(InvalidInput):
    """Token ids that are not integers in [0, 2**32)."""


class CorruptBlock(TiffinError):
    """Bytes that fail a check: magic, checksum, identity, position. They were not served."""


class NoRoom(TiffinError):
    """A tier could not make room within the deadline; what holds the space is in the message."""


class TierUnavailable(TiffinError):
    """A tier's medium refused an operation (ENOSPC, EIO, read-only); a node goes on without it."""


class Draining(NoRoom):
    """The node is being emptied: it serves what it has and takes nothing new."""


class StaleLease(TiffinError):
    """A lease or reservation that ended, expired, was released before, or belongs to another."""


class DeadlineExceeded(TiffinError):
    """An operation without partial results did not finish within its `timeout_s`."""


class ClientClosed(TiffinError):
    """A verb, or a view, was used after `close()` or after its lease was released."""


class NodeUnavailable(TiffinError, ConnectionError):
    """No node answers at this address, or the connection to it broke."""


class NotAuthenticated(NodeUnavailable):
    """The node does not know this client, or the client not the node: tokens or certificates."""


class DirectoryUnavailable(TiffinError, ConnectionError):
    """The directory of a pool does not answer; clients go on with the nodes that they know."""


class ProtocolError(TiffinError):
    """The peer sent bytes that are not this protocol: garbage, truncated, oversized."""


class VersionMismatch(ProtocolError):
    """The peer speaks another version of the protocol or of the block format."""
