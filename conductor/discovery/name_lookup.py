"""Looks up the engines behind a DNS name: every address of a host, or SRV records.

Addresses come from the machine's resolver, so that `/etc/hosts`, search domains and what else it
has count. It has no SRV records: these come from dnspython, by `/etc/resolv.conf`.
"""

from __future__ import annotations

import asyncio
import socket

from ..errors import ConductorUnavailable
from .discovery import Place


async def addresses(name_and_port: str, scheme: str) -> list[Place]:
    """One place for every address of `NAME:PORT`, IPv4 and IPv6. Raises ConductorUnavailable."""
    name, _, port = name_and_port.rpartition(":")
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(name, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError, OverflowError) as error:
        raise ConductorUnavailable(f"no address of {name}: {error}") from error
    hosts = dict.fromkeys(str(address[0]) for *_, address in found)
    return [place(scheme, host, int(port)) for host in hosts]


async def services(
    name: str, timeout_s: float, nameserver: tuple[str, int] | None = None
) -> list[tuple[str, int]]:
    """(host, port) of every SRV record of a name. `nameserver`: an address and a port; else those
    of this machine. Raises ConductorUnavailable."""
    import dns.asyncresolver
    import dns.exception

    try:
        resolver = dns.asyncresolver.Resolver(configure=nameserver is None)
        if nameserver is not None:
            resolver.nameservers, resolver.port = [nameserver[0]], nameserver[1]
        found = await resolver.resolve(name, "SRV", lifetime=timeout_s)
    except (dns.exception.DNSException, OSError) as error:
        raise ConductorUnavailable(f"no SRV records of {name}: {error}") from error
    # A target "." says that there is no such service (RFC 2782).
    return [
        (str(record.target).rstrip("."), int(record.port))
        for record in found
        if str(record.target) != "."
    ]


def place(scheme: str, host: str, port: int, name: str = "") -> Place:
    """The place of an engine at a host and a port."""
    where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return Place(f"{scheme}://{where}", name or where)
