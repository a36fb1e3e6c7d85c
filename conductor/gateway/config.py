"""The gateway's configuration as typed structs, and the reader of the configuration file.

    [models."llama-3-8b"]
    tokenizer = "/models/llama-3-8b"
    schema_file = "/etc/tiffin/llama-3-8b.schema.json"

    [timeouts]
    first_token_s = 120

Unknown fields are rejected: a misspelt limit would be no limit. Secrets are in files of their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tiffin.kvstore.errors import InvalidInput

from ..service.server import read_settings
from ..web.connection_limits import PER_PEER
from .clients.client_settings import ClientSettings, ObjectiveBounds

if TYPE_CHECKING:
    from pathlib import Path

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_ORIGIN = r"^(\*|https?://[^/\s]+)$"
Share = Annotated[float, Meta(gt=0, le=1e6)]
Handoff = Literal["vllm", "pool", "stream"]
Header = Literal["priority", "tenant", "objectives", "urgent", "output"]


class _Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of all groups in the configuration file: frozen, unknown fields rejected."""


class ModelConfig(_Group, frozen=True, kw_only=True):
    """How the gateway turns prompts of one model into tokens and block keys."""

    tokenizer: Annotated[str, Meta(min_length=1)] = "engine"
    """`engine` asks an instance (`POST /tokenize`, as vLLM has it), `estimate` counts bytes, and
    anything else is a folder with the model's tokenizer."""

    keys: Literal["auto", "gateway", "conductor", "none"] = "auto"
    """Who makes block keys of tokens: the gateway, by `schema_file`; the conductor, by the schema
    that instances registered; or nobody, and then requests are placed by load alone. `auto`: the
    gateway if it has a `schema_file`, else the conductor for models of which it has a schema."""

    schema_file: str = ""
    """A file with the schema's canonical text, `KVSchema.canonical_bytes()`."""

    namespace: str = ""
    """What may share blocks, as in the store."""

    secret_file: str = ""
    """The store's secret, if its keys have one."""

    handoff: Handoff = "vllm"
    """How a prefill instance hands over to a decode instance: by `kv_transfer_params` that travel
    through the gateway, or by the pool alone, where the one puts what the other gets: with `pool`
    the decode instance is asked once the prefill has ended, with `stream` both are at once, if the
    decision says `layerwise`."""

    bytes_per_token: Annotated[float, Meta(ge=0.25, le=64)] = 4.0
    """To estimate lengths: OpenAI's rule of thumb for English, and of UTF-8 right for Chinese, too,
    within a third."""

    objectives: ObjectiveBounds = ObjectiveBounds()
    """What is promised to requests for this model, and the bounds of what they may name."""

    def __post_init__(self) -> None:
        if self.secret_file and not self.schema_file:
            raise ValueError("secret_file goes with schema_file: keys are made here or not at all")


class GatewayTimeouts(_Group, frozen=True, kw_only=True):
    """Timeouts of the gateway's calls, streams and shutdown."""

    conductor_s: Seconds = 2.0
    """A decision, repetitions included. Deciding takes less than a millisecond."""

    connect_s: Seconds = 2.0
    """A connection to an instance; then it counts as gone."""

    tokenize_s: Seconds = 2.0
    """An instance's `/tokenize`; then the length is estimated."""

    first_token_s: Seconds = 300.0
    """From sending to the first token: queue, transfer and prefill. Ten times the longest TTFT
    objective that is published."""

    idle_s: Seconds = 120.0
    """Between two pieces of a stream. Preempted requests are computed again, from the start."""

    total_s: Seconds = 3600.0
    """From the whole request to the end of its answer."""

    head_s: Seconds = 10.0
    """A request's head, from the connection or its first byte on."""

    stop_s: Seconds = 30.0
    """Answers under way may take so long to end when the gateway stops."""


class GatewayLimits(_Group, frozen=True, kw_only=True):
    """Limits on the resources that all clients together may use."""

    requests: Annotated[int, Meta(ge=1, le=1_000_000)] = 1024
    """Requests at a time; one costs some 100 KB here, and two connections."""

    class_shares: Annotated[dict[str, Annotated[float, Meta(gt=0, le=1)]], Meta(max_length=64)] = {}
    """By priority class: its requests are taken while those under way, of all classes together, are
    fewer than this part of `requests`. The rest is room for other classes; a class that is not
    named may use all of it."""

    body_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 8 << 20
    """One request: 8 MiB are a million token ids, or some images."""

    held_bytes: Annotated[int, Meta(ge=1024, le=1 << 40)] = 512 << 20
    """Bodies of all requests at a time: they are kept until the answer begins, to be sent again."""

    answer_bytes: Annotated[int, Meta(ge=1024, le=1 << 30)] = 64 << 20
    """An answer that is not streamed."""

    peer_connections: Annotated[int, Meta(ge=1, le=1_000_000)] = PER_PEER
    """Connections from one address (IPv6: one /64) that have not shown an API key yet: if they are
    more, those leave that were silent for longest."""

    tokenizer_threads: Annotated[int, Meta(ge=1, le=256)] = 4
    """100,000 tokens take a thread 50 to 100 ms."""


class BreakerSettings(_Group, frozen=True, kw_only=True):
    """When instances get no requests from this gateway, and how they come back."""

    failures: Annotated[int, Meta(ge=1, le=1000)] = 3
    """In a row, of requests and of health checks: then the instance gets no requests."""

    open_s: Seconds = 5.0
    """For so long, and twice as long each time that it fails again as it comes back."""

    open_max_s: Seconds = 60.0

    slow_start_s: Seconds = 20.0
    """An instance that comes back gets a share of its requests that rises to all in this time."""

    check_s: Annotated[float, Meta(ge=0, le=86_400)] = 2.0
    """How often every instance is asked at `/health`; 0: never."""

    check_timeout_s: Seconds = 2.0
    """An engine answers there also while it computes."""


class GatewayConfig(_Group, frozen=True, kw_only=True):
    """The whole configuration of a gateway."""

    default: ModelConfig = ModelConfig()
    """For models that are not listed."""

    models: Annotated[dict[str, ModelConfig], Meta(max_length=1024)] = {}

    aliases: Annotated[dict[str, dict[str, Share]], Meta(max_length=1024)] = {}
    """Names of models that stand for others, each with its share: a canary is one with a small
    share. A conversation stays with one of them."""

    clients: Annotated[dict[str, ClientSettings], Meta(max_length=1024)] = {}
    """What the API keys may use to which the token file gives a name, by that name."""

    client_default: ClientSettings = ClientSettings()
    """What every other API key may use; without keys, all clients together."""

    quota_file: str = ""
    """A SQLite file that keeps what was used today; without it, quotas begin anew when the gateway
    starts."""

    breakers: BreakerSettings = BreakerSettings()
    timeouts: GatewayTimeouts = GatewayTimeouts()
    limits: GatewayLimits = GatewayLimits()

    fallback: bool = True
    """Whether instances take turns while the conductor does not answer."""

    reschedules: Annotated[int, Meta(ge=0, le=16)] = 2
    """How often a request is placed again whose instance was gone. Few: it may be the request that
    ends instances."""

    honour: tuple[Header, ...] = ("priority", "tenant", "objectives", "urgent", "output")
    """Which of the clients' `x-tiffin-...` headers count. Whoever may set `tenant` can take what is
    another's fair share."""

    allowed_origins: tuple[Annotated[str, Meta(pattern=_ORIGIN)], ...] = ()
    """Web pages of which origins may call from a browser (CORS); `*`: all. An API key in a page is
    everyone's who sees it."""

    engine_token_file: str = ""
    """The API key of the instances."""

    engine_tls_ca: str = ""
    """The CA of instances that answer at https, if this machine does not trust it anyway."""

    report_tokens: Annotated[int, Meta(ge=1, le=65_536)] = 32
    report_s: Seconds = 1.0
    """The conductor is told of so many tokens of a request at a time, or after so long: what it
    does not know yet is less than a hundredth of a usual context."""

    report_batch_s: Annotated[float, Meta(ge=0, le=1)] = 0.025
    """Events of all requests are collected for so long and sent in one call: 40 calls a second at
    most. What a gateway that dies has not told is no older."""

    continuation: Literal["off", "greedy", "always"] = "greedy"
    """Which streams go on at another instance when their own breaks off: those whose answer can't
    differ but by the order of an engine's sums, or sampled ones, too."""

    asks_usage: bool = True
    """Whether engines are asked for the usage of each stream (`stream_options`), so that the
    conductor hears how much of a prompt was cached. Clients that did not ask do not see it."""

    keepalive_s: Annotated[float, Meta(ge=0, le=86_400)] = 15.0
    """A stream without a token for so long begins, with a comment every so often: proxies end
    connections that say nothing, many after 60 s. 0: never."""

    refresh_s: Seconds = 2.0
    """How often the gateway asks which instances there are."""

    def model(self, name: str) -> ModelConfig:
        """The settings of the model `name`; `default` if the model is not listed."""
        return self.models.get(name, self.default)


_RELOADED = ("aliases", "clients", "client_default")


def needs_restart(before: GatewayConfig, after: GatewayConfig) -> list[str]:
    """The fields that differ and can't change while the gateway runs: all but clients' settings,
    objectives and aliases."""

    def fixed(model: ModelConfig) -> ModelConfig:
        return msgspec.structs.replace(model, objectives=ObjectiveBounds())

    def value(config: GatewayConfig, field: str) -> object:
        if field == "default":
            return fixed(config.default)
        if field == "models":
            return {name: fixed(model) for name, model in config.models.items()}
        return getattr(config, field)

    fields = [field for field in before.__struct_fields__ if field not in _RELOADED]
    return [field for field in fields if value(before, field) != value(after, field)]


def read_config(path: Path) -> GatewayConfig:
    """Read the configuration from a TOML or JSON file; the suffix selects the format. Raises
    InvalidInput, which names the invalid field."""
    content = read_settings(path)
    try:
        return msgspec.convert(content, GatewayConfig)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"{path}: {_placed(content, error)}") from error


def _placed(content: dict[str, Any], error: msgspec.ValidationError) -> str:
    """The error with the place of its field. In a table of names msgspec's path says `[...]`, so
    the entry that is wrong is looked for."""
    for group, kind in (("models", ModelConfig), ("clients", ClientSettings)):
        entries = content.get(group)
        for name, entry in entries.items() if isinstance(entries, dict) else ():
            try:
                msgspec.convert(entry, kind)
            except msgspec.ValidationError as wrong:
                why, _, place = str(wrong).partition(" - at `$")
                return f"{why} - at `{group}.{name}{place.rstrip('`')}`"
    return str(error)
