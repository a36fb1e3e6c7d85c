"""Who is in the pool, for clients without a directory: a fixed list of nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..directory.base import NodeRecord

if TYPE_CHECKING:
    from collections.abc import Sequence


class Members(Protocol):
    """What a client needs of a directory; every `Directory` has it."""

    def nodes(self) -> dict[int, NodeRecord]:
        """The live nodes by number."""
        ...

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """Per key, the numbers of the nodes to ask for it."""
        ...

    def close(self) -> None:
        """Give back connections."""
        ...


class FixedMembers:
    """The nodes of a `tiffin://host:port,host:port` URL. Each may have every block: ask."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self._records = {
            number: NodeRecord(
                name=_joined(address),
                address=_joined(address),
                host="",
                socket="",
                capacity_bytes=0,
                free_bytes=0,
                number=number,
            )
            for number, address in enumerate(addresses, start=1)
        }

    def nodes(self) -> dict[int, NodeRecord]:
        """All of them."""
        return self._records

    def locate(self, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
        """All of them, for every key."""
        return [tuple(self._records)] * len(keys)

    def close(self) -> None:
        """Nothing to give back."""


def _joined(address: tuple[str, int]) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
