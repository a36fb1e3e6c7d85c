"""The allow-list of hosts that instances may register; checked before the conductor connects. Pure.

    allowed = AllowedHosts(("localhost", "*.engines.svc", "10.0.0.0/8"))
    allowed.check("http://prefill-3.engines.svc:8000", "its url")      # raises HostNotAllowed

An entry is a name, `*.DOMAIN` for every name in a domain, an address, a network, or `*` for all.
Names are compared with names, and addresses with addresses; **nothing is resolved**. So a network
allows addresses that are written out, and no name that resolves into it: a name's address at the
time of the check may differ from its address at the time of the connection (DNS rebinding). An
operator who allows a name trusts the DNS server that answers for it.

The host that is checked and the host that is connected to must be the same, so addresses are parsed
strictly: forms that libraries parse differently (`http://a\\@b`, `127.1`, `0x7f000001`) are
rejected.
"""

from __future__ import annotations

import functools
import ipaddress
import re
from typing import TYPE_CHECKING

from ..errors import HostNotAllowed, InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..records import InstanceSpec

    Address = ipaddress.IPv4Address | ipaddress.IPv6Address
    Network = ipaddress.IPv4Network | ipaddress.IPv6Network

# Labels of an instance: the URLs that take its new role and other orders, and the endpoints of its
# KV events.
ROLE_LABEL = "role_url"
ORDERS_LABEL = "orders_url"
EVENTS_LABEL = "kv_events"
REPLAY_LABEL = "kv_events_replay"
# The topic of an instance's KV events.
TOPIC_LABEL = "kv_events_topic"
# The LoRA adapters that are loaded at an instance, with commas.
ADAPTERS_LABEL = "adapters"

THIS_MACHINE = ("localhost", "127.0.0.0/8", "::1")
EVERY = "*"

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
# ASCII: without it IGNORECASE matches the Kelvin sign as a k.
_FLAGS = re.IGNORECASE | re.ASCII
_NAME = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}", _FLAGS)
# The last label of a name that `inet_aton` parses as an address.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", _FLAGS)
_HOST = (
    r"(?:\[(?P<v6>[0-9A-Fa-f:.]{2,45})(?:%[A-Za-z0-9_.-]{1,15})?\]|(?P<host>[A-Za-z0-9_.-]{1,254}))"
)
_HTTP = re.compile(rf"https?://{_HOST}(?::(?P<port>[0-9]{{1,5}}))?(?:[/?][!-~]*)?", _FLAGS)
_TCP = re.compile(rf"tcp://{_HOST}:(?P<port>[0-9]{{1,5}})")


class AllowedHosts:
    """A parsed allow-list. Raises ValueError for an entry that is no host."""

    def __init__(self, entries: Sequence[str]) -> None:
        self._entries = tuple(entries)
        self._every = EVERY in entries
        self._names: set[str] = set()
        self._domains: list[str] = []
        self._networks: list[Network] = []
        for entry in entries:
            if entry != EVERY:
                self._read(entry)

    def _read(self, entry: str) -> None:
        name = entry.removeprefix("*.")
        if _is_name(name):
            if name == entry:
                self._names.add(_plain(name))
            else:
                self._domains.append(f".{_plain(name)}")
            return
        try:
            self._networks.append(ipaddress.ip_network(entry))
        except ValueError as error:
            raise ValueError(
                f"{entry[:100]!r} is no host: write a name, *.DOMAIN, an address, a network such "
                f"as 10.0.0.0/8, or {EVERY} ({error})"
            ) from error

    def __str__(self) -> str:
        return ", ".join(self._entries) or "nothing"

    def has(self, host: str) -> bool:
        """Whether a host, a name or an address without brackets, is allowed."""
        address = _address(host)
        if address is None and not _is_name(host):
            return False
        if self._every:
            return True
        if address is not None:
            return any(address in network for network in self._networks)
        name = _plain(host)
        return name in self._names or any(name.endswith(domain) for domain in self._domains)

    def check(self, url: str, what: str, *, tcp: bool = False) -> None:
        """Check that a URL is at an allowed host: an `http://` URL, or with `tcp` an endpoint that
        ZeroMQ connects to. `what` describes the URL in the error message. Raises InvalidRequest for
        a malformed URL, and HostNotAllowed."""
        host = host_of(url, what, tcp=tcp)
        if not self.has(host):
            raise HostNotAllowed(
                f"{what} is at {host}, and instances may be at {self} only: add it to the "
                "conductor's setting instances.allowed_hosts (tiffin conductor --allowed-hosts)"
            )


@functools.lru_cache(maxsize=16)
def allowed_hosts(entries: tuple[str, ...]) -> AllowedHosts:
    """The parsed allow-list of `entries`, cached."""
    return AllowedHosts(entries)


def check_hosts(spec: InstanceSpec, entries: tuple[str, ...]) -> None:
    """Check that the `url` and every URL label of an instance are at an allowed host. Raises
    InvalidRequest and HostNotAllowed."""
    allowed = allowed_hosts(entries)
    if spec.url:
        allowed.check(spec.url, f"instance {spec.id!r}: its url")
    for label in (ROLE_LABEL, ORDERS_LABEL, EVENTS_LABEL, REPLAY_LABEL):
        url = spec.labels.get(label, "")
        if url:
            what = f"instance {spec.id!r}: its label {label}"
            allowed.check(url, what, tcp=label not in (ROLE_LABEL, ORDERS_LABEL))


def host_of(url: str, what: str, *, tcp: bool = False) -> str:
    """The host of a URL, as the library that connects to it parses it. Raises InvalidRequest, with
    `what` in the message, for a malformed URL: here, where the caller gets the error."""
    found = (_TCP if tcp else _HTTP).fullmatch(url)
    if found is not None and (not found["port"] or 0 < int(found["port"]) < 1 << 16):
        host: str = found["v6"] or found["host"]
        if (":" in host) == bool(found["v6"]) and (_address(host) or _is_name(host)):
            return host
    raise InvalidRequest(
        f"{what}: {url[:100]!r} is not {'tcp' if tcp else 'http'}://HOST:PORT, with a name or an "
        "address in full, an IPv6 address in brackets, and a port of 1 to 65535"
    )


def _address(host: str) -> Address | None:
    """The address that `host` is; None for a name. An IPv4-mapped IPv6 address becomes the IPv4
    address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _is_name(host: str) -> bool:
    plain = host.removesuffix(".")
    if len(plain) > 253 or not _NAME.fullmatch(plain):
        return False
    return not _NUMBER.fullmatch(plain.rpartition(".")[2])


def _plain(name: str) -> str:
    return name.removesuffix(".").lower()
