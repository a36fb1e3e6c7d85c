"""The group `[discovery]` of the conductor's settings file: where engines are, and what they do not
tell of themselves. Pure. docs/conductor/discovery.md explains each.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..errors import InvalidRequest
from ..wire.engine_models import EngineOptions

Text = Annotated[str, Meta(max_length=1024)]
Seconds = Annotated[float, Meta(ge=0.1, le=3600)]

# A source may have thousands of engines, an operator some dozens of sources.
SOURCES_MAX = 256


class SourceSettings(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Engines at one place: exactly one of `url`, `dns`, `srv` and `kubernetes`. Raises
    ValueError."""

    url: Text = ""
    """One engine, `http://HOST:PORT`."""

    dns: Text = ""
    """`NAME:PORT`: one at every address of this name."""

    srv: Text = ""
    """`_SERVICE._tcp.NAME`: one at every host and port of these SRV records."""

    kubernetes: Text = ""
    """`NAMESPACE/SERVICE`, or `SERVICE` in the conductor's own namespace: its ready endpoints."""

    port: Text = ""
    """Of `kubernetes`: name or number of the port, if the service has several."""

    scheme: Literal["http", "https"] = "http"
    """Of all but `url`."""

    schema_file: Text = ""
    """A file with the model's schema (`KVSchema.canonical_bytes()`), for engines of a pool."""

    def __post_init__(self) -> None:
        given = [name for name in ("url", "dns", "srv", "kubernetes") if getattr(self, name)]
        if len(given) != 1:
            raise ValueError(
                f"a source is one of url, dns, srv and kubernetes: it has {given or 'none'}"
            )
        if self.id and not self.url:
            raise ValueError(f"id goes with url: {self.name} may have several engines")
        if self.dns and not self.dns.rpartition(":")[2].isdigit():
            raise ValueError(f"dns is NAME:PORT, not {self.dns!r}")

    @property
    def name(self) -> str:
        """How reports call it."""
        kinds = ("url", "dns", "srv", "kubernetes")
        return next(f"{kind} {where}" for kind in kinds if (where := getattr(self, kind)))


class KubernetesSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The API server; the defaults are those of a pod with a service account."""

    api_url: Text = ""
    """Else that of KUBERNETES_SERVICE_HOST and KUBERNETES_SERVICE_PORT."""

    account_folder: Text = "/var/run/secrets/kubernetes.io/serviceaccount"
    """With `token`, which is read anew as it is renewed, `ca.crt` and `namespace`."""


class DiscoverySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Everything about discovery. Raises ValueError."""

    engines: Annotated[tuple[SourceSettings, ...], Meta(max_length=SOURCES_MAX)] = ()

    scrape_s: Seconds = 1.0
    """How often each engine is asked how busy it is: as often as heartbeats come."""

    models_s: Seconds = 15.0
    """How often each engine is asked what it serves: adapters are loaded while it runs."""

    timeout_s: Seconds = 2.0
    """How long one may take to answer. With three failures it has been silent for less than
    `core.heartbeat_timeout_s`."""

    resolve_s: Seconds = 10.0
    """How often names are looked up."""

    api_key_file: Text = ""
    """A file with the engines' API key, alone: vLLM wants one for `/v1/models`."""

    tls_ca: Text = ""
    """The CA of engines that serve https; else the CAs that this machine trusts."""

    key_spaces: bool = True
    """Whether what engines announce of their keys counts (docs/key-spaces.md). Without it prompts
    are keyed by registered schemas, and of engines' blocks in the pool nothing is known."""

    secret_files: Annotated[tuple[Text, ...], Meta(max_length=SOURCES_MAX)] = ()
    """Files with the secrets that engines' keys have, one in each; engines whose secret is not here
    announce keys that can't be made."""

    kubernetes: KubernetesSettings = KubernetesSettings()

    def __post_init__(self) -> None:
        names = [source.name for source in self.engines]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"{name} is there twice")


def read_discovery(content: dict[str, Any]) -> DiscoverySettings:
    """Take the group `discovery` out of the content of a settings file. Raises InvalidRequest,
    which names the field."""
    try:
        return msgspec.convert(content.pop("discovery", {}), DiscoverySettings)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"settings: discovery: {error}") from error
