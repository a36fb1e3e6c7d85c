"""The endpoints of a Kubernetes service, by its EndpointSlices. Pure.

A service has several slices, by address family and of a hundred endpoints each. They come as a
list, and then as events that add, change and delete one. An endpoint counts while it is ready, as
for the service's own traffic; the first of its addresses, which Kubernetes says are
interchangeable.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..errors import ConductorUnavailable, InvalidRequest
from .discovery import Place

# Beyond this a list is no service's: a hundred endpoints in each.
SLICES_MAX = 1024


class _Conditions(msgspec.Struct, frozen=True):
    ready: bool | None = None


class _Target(msgspec.Struct, frozen=True):
    name: str = ""


class _Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: list[str] = []
    conditions: _Conditions = _Conditions()
    target_ref: _Target | None = None


class _Port(msgspec.Struct, frozen=True):
    name: str | None = None
    port: int | None = None


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Slice(msgspec.Struct, frozen=True, rename="camel"):
    metadata: _Metadata
    address_type: str = "IPv4"
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class _List(msgspec.Struct, frozen=True):
    metadata: _Metadata
    items: list[_Slice]


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class Expired(Exception):
    """The API server has forgotten the version from which to watch: list again."""


class EndpointSlices:
    """The slices of one service. `version`: from which to watch."""

    def __init__(self, scheme: str, port: str) -> None:
        self._scheme, self._port = scheme, port
        self._slices: dict[str, _Slice] = {}
        self.version = ""

    def take_list(self, body: bytes) -> None:
        """Take the answer to a list. Raises ConductorUnavailable if it is none."""
        found = _decoded(body, _List)
        self._slices = {one.metadata.name: one for one in found.items[:SLICES_MAX]}
        self.version = found.metadata.resource_version

    def take_event(self, line: bytes) -> bool:
        """Take a line of a watch; returns whether slices have changed. Raises Expired, and
        ConductorUnavailable for what is no event."""
        event = _decoded(line, _Event)
        if event.type == "ERROR":
            status = _decoded(bytes(event.object), _Status)
            if status.code == 410:
                raise Expired(status.message)
            raise ConductorUnavailable(f"the watch ended: {status.code} {status.message}")
        one = _decoded(bytes(event.object), _Slice)
        self.version = one.metadata.resource_version or self.version
        if event.type == "BOOKMARK":
            return False
        if event.type == "DELETED":
            return self._slices.pop(one.metadata.name, None) is not None
        if len(self._slices) < SLICES_MAX or one.metadata.name in self._slices:
            self._slices[one.metadata.name] = one
        return True

    def places(self) -> list[Place]:
        """Where its ready endpoints are; the pods' names are those of the instances. Raises
        InvalidRequest if it can't be told which port to take."""
        return [
            Place(f"{self._scheme}://{_where(address, port)}", name or _where(address, port))
            for one in self._slices.values()
            if one.address_type in ("IPv4", "IPv6") and one.endpoints
            for port in (self._port_of(one),)
            for address, name in _ready(one)
        ]

    def _port_of(self, one: _Slice) -> int:
        ports = [port for port in one.ports or () if port.port]
        wanted = [p for p in ports if self._port in (p.name, str(p.port))] if self._port else ports
        if len(wanted) != 1 or wanted[0].port is None:
            there = ", ".join(f"{p.name or 'unnamed'} ({p.port})" for p in ports) or "none"
            raise InvalidRequest(f"its ports are {there}: name one by the option port")
        return wanted[0].port


def _ready(one: _Slice) -> list[tuple[str, str]]:
    return [
        (endpoint.addresses[0], endpoint.target_ref.name if endpoint.target_ref else "")
        for endpoint in one.endpoints or ()
        if endpoint.addresses and endpoint.conditions.ready is not False  # unknown: ready
    ]


def _where(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _decoded(text: bytes, kind: type[Any]) -> Any:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.DecodeError as error:
        raise ConductorUnavailable(f"this is no answer of an API server: {error}") from error
