"""Request names: each tenant has its own request ids, isolated from those of other tenants. Pure.

Clients identify a request by its id and tenant. The core, and conductors among each other, use one
name, `TENANT/ID`, or `ID` where there are no tenants. Ids contain no slash, so the tenant ends at
the last slash, even if the tenant's name contains slashes.
"""

from __future__ import annotations


def name_of(tenant: str, request_id: str) -> str:
    """The name of a tenant's request."""
    return f"{tenant}/{request_id}" if tenant else request_id


def parted(name: str) -> tuple[str, str]:
    """Split a request's name into (tenant, id)."""
    tenant, _, request_id = name.rpartition("/")
    return tenant, request_id


class ById:
    """Request names by id, to look up an id without its tenant."""

    def __init__(self) -> None:
        self._names: dict[str, dict[str, None]] = {}

    def add(self, name: str) -> None:
        """Add a name as the latest of its id."""
        tenant, request_id = parted(name)
        if tenant:
            names = self._names.setdefault(request_id, {})
            names.pop(name, None)
            names[name] = None

    def discard(self, name: str) -> None:
        """Remove a name; no effect if it is unknown."""
        request_id = parted(name)[1]
        names = self._names.get(request_id)
        if names is not None:
            names.pop(name, None)
            if not names:
                del self._names[request_id]

    def latest(self, request_id: str) -> str:
        """The last added name with this id; "" if no tenant has such a request."""
        return next(reversed(self._names.get(request_id, {})), "")
