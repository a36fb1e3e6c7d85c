"""What an engine is, from its own answers, and the registration that follows. Pure.

    facts = read_facts(answers)                          # what it told
    spec, schema = registration(facts, options, url)     # raises InvalidRequest for what it did not

Every engine lists its models. Block size and capacity are in vLLM's `/metrics` and in SGLang's
server information; the latter also has its role and where it publishes KV events, which vLLM tells
only in its development mode. No engine tells how fast it is: that is a latency profile.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import msgspec

from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.format.layer_spec import LayerSpec
from tiffin.kvstore.format.schema import KVSchema

from ..errors import InvalidRequest
from ..records import InstanceSpec, Role
from ..state.allowed_hosts import ADAPTERS_LABEL, EVENTS_LABEL, REPLAY_LABEL, TOPIC_LABEL
from ..state.part_keys import PART_TOKENS
from .engine_metrics import EngineMetrics, read_metrics

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..wire.announced_spaces import Keyed
    from ..wire.engine_models import EngineOptions

T = TypeVar("T")

BLOCK_TOKENS = 512
# Of an engine without a pool, nobody else reads blocks: the schema only decides the keys.
OWN_FORMAT = "engine"
# vLLM's default for max_num_seqs, and about what SGLang takes.
BATCH_MAX = 256


@dataclass(frozen=True, slots=True)
class EngineAnswers:
    """The bodies that an engine answered; empty for routes that it does not have."""

    metrics: str
    models: bytes
    server_info: bytes = b""
    version: bytes = b""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine told of itself; None and empty: it did not. `models` are its base models,
    `adapters` the LoRA adapters of each. `events` are the ports of its KV events and of their
    replay (0: none), and the topic; None if it did not tell whether it publishes any."""

    metrics: EngineMetrics
    models: tuple[str, ...]
    version: str = ""
    max_model_len: int | None = None
    block_tokens: int | None = None
    kv_capacity_tokens: int | None = None
    batch_max: int | None = None
    role: Role | None = None
    events: tuple[int, int, str] | None = None
    adapters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prefix_caching: bool = True


class _Model(msgspec.Struct):
    id: str
    parent: str | None = None
    root: str | None = None
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[_Model] = field(default_factory=list)


def read_facts(answers: EngineAnswers) -> EngineFacts:
    """Read the answers. Raises InvalidRequest if they are not an engine's."""
    metrics = read_metrics(answers.metrics)
    try:
        models = msgspec.json.decode(answers.models, type=_Models).data
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"/v1/models is no list of models: {error}") from error
    bases = [one for one in models if one.parent is None]
    info = _object(answers.server_info)
    told = _sglang(info) if metrics.engine == "sglang" else _vllm(metrics, info)
    return EngineFacts(
        metrics=metrics,
        models=tuple(one.id for one in bases),
        version=str(_object(answers.version).get("version") or info.get("version") or ""),
        max_model_len=bases[0].max_model_len if bases else None,
        adapters={
            base.id: tuple(
                one.id for one in models if one.parent and one.parent in (base.id, base.root)
            )
            for base in bases
        },
        **told,
    )


def _vllm(metrics: EngineMetrics, info: dict[str, Any]) -> dict[str, Any]:
    cache = metrics.cache or {}
    block, blocks = _number(cache.get("block_size")), _number(cache.get("num_gpu_blocks"))
    # The first: with several groups of layers a block of each holds the same tokens.
    capacity = _number(cache.get("kv_cache_size_tokens"))
    if capacity is None and block and blocks:
        capacity = block * blocks
    config = _part(info, "vllm_config")
    transfer = _part(config, "kv_transfer_config").get("kv_role")
    role = {"kv_producer": Role.PREFILL, "kv_consumer": Role.DECODE, "kv_both": Role.MIXED}
    return {
        "block_tokens": block,
        "kv_capacity_tokens": None if capacity is None else capacity * metrics.ranks,
        "batch_max": _number(_part(config, "scheduler_config").get("max_num_seqs")),
        "role": role.get(str(transfer)) if transfer else None,
        "events": _events(config.get("kv_events_config"), told=bool(config)),
        "prefix_caching": cache.get("enable_prefix_caching") != "False",
    }


def _sglang(info: dict[str, Any]) -> dict[str, Any]:
    role = {"null": Role.MIXED, "prefill": Role.PREFILL, "decode": Role.DECODE}
    config = info.get("kv_events_config")
    if isinstance(config, str):  # as it was given on the command line
        config = _object(config.encode())
    capacity = _number(info.get("max_total_num_tokens"))  # of one rank
    ranks = _number(info.get("dp_size")) or 1
    return {
        "block_tokens": _number(info.get("page_size")),
        "kv_capacity_tokens": None if capacity is None else capacity * ranks,
        "batch_max": _number(info.get("max_running_requests")),
        "role": role.get(str(info.get("disaggregation_mode"))),
        "events": _events(config, told=bool(info)),
        "prefix_caching": info.get("disable_radix_cache") is not True,
    }


def _events(config: Any, *, told: bool) -> tuple[int, int, str] | None:
    """The ports of a publisher's configuration, which both engines have in one form."""
    if not isinstance(config, dict) or config.get("publisher") == "null":
        return (0, 0, "") if told else None
    if not config.get("enable_kv_cache_events", True):
        return (0, 0, "")
    live = _port(config.get("endpoint") or "tcp://*:5557")  # the default of both
    return live, _port(config.get("replay_endpoint")), str(config.get("topic") or "")


def _port(endpoint: Any) -> int:
    """The port of an endpoint at which an engine listens, 0 if it is none over TCP."""
    text = str(endpoint or "")
    port = text.rpartition(":")[2]
    return int(port) if text.startswith("tcp://") and port.isdigit() else 0


def registration(
    facts: EngineFacts,
    options: EngineOptions,
    url: str,
    name: str,
    known: KVSchema | None,
    home: tuple[str, Keyed] | None = None,
) -> tuple[InstanceSpec, KVSchema]:
    """What to register the engine at `url` as, under the id `name`, and the schema of its blocks:
    `known`, if other instances of the model have one. `home`: the node that it has open, and what
    it has announced there. Raises InvalidRequest, which names the option, for what the engine did
    not tell."""
    model = chosen_model(facts, options.model)
    engine_block = facts.block_tokens or 1
    block_tokens = options.block_tokens or (
        BLOCK_TOKENS if BLOCK_TOKENS % engine_block == 0 else engine_block
    )
    if known is not None and options.block_tokens is None:
        block_tokens = known.block_tokens
    if block_tokens % engine_block:
        raise InvalidRequest(
            f"its blocks have {engine_block} tokens, of which the index's {block_tokens} are no "
            "multiple: give the option block_tokens"
        )
    capacity = _needed(
        options.kv_capacity_tokens or facts.kv_capacity_tokens,
        "kv_capacity_tokens",
        "how much its KV cache holds",
    )
    schema = known or own_schema(model, block_tokens)
    node, fetches = options.node, options.fetches
    if home is not None:
        node, fetches = node or home[0], fetches or home[1].space.loads
    spec = InstanceSpec(
        id=options.id or name,
        model=model,
        role=Role(options.role) if options.role else facts.role or Role.MIXED,
        profile=_needed(
            options.profile, "profile", "how fast it is (`tiffin profile URL` measures one)"
        ),
        url=url,
        node=node,
        block_tokens=block_tokens,
        block_bytes=schema.block_bytes if fetches else 0,
        kv_capacity_tokens=capacity,
        batch_max=options.batch_max or facts.batch_max or BATCH_MAX,
        fetches=fetches,
        prefix_caching=facts.prefix_caching,
        labels=_labels(facts, options, url) | _adapters(facts, model),
        part_tokens=facts.block_tokens or PART_TOKENS,
    )
    return spec, schema


def own_schema(model: str, block_tokens: int) -> KVSchema:
    """A schema for the keys of engines whose blocks nobody else reads. Raises InvalidRequest."""
    try:
        layer = LayerSpec.opaque(nbytes=1, format=OWN_FORMAT)
        return KVSchema.of(model, [layer], block_tokens=block_tokens)
    except InvalidInput as error:
        raise InvalidRequest(f"no schema for {model!r}: {error}") from error


def chosen_model(facts: EngineFacts, model: str) -> str:
    """The model by the option `model`; the first one without. Raises InvalidRequest."""
    if not model:
        return _needed(facts.models[0] if facts.models else "", "model", "what it serves")
    if model not in facts.models:
        listed = ", ".join(map(repr, facts.models[:10])) or "nothing"
        raise InvalidRequest(f"the option model is {model!r}, and it serves {listed}")
    return model


def _adapters(facts: EngineFacts, model: str) -> dict[str, str]:
    # A name with a comma could not be told from two.
    named = [name for name in facts.adapters.get(model, ()) if "," not in name]
    return {ADAPTERS_LABEL: ",".join(named)} if named else {}


def _labels(facts: EngineFacts, options: EngineOptions, url: str) -> dict[str, str]:
    live, replay, topic = facts.events or (0, 0, "")
    live, replay = options.kv_events_port or live, options.kv_events_replay_port or replay
    if options.kv_events_topic is not None:
        topic = options.kv_events_topic
    if not live:
        return {}
    if facts.metrics.ranks > 1:
        raise InvalidRequest(
            f"it has {facts.metrics.ranks} data-parallel ranks behind one URL, which publish their "
            "KV events apart: the index could not tell whose blocks they are. Give each rank a "
            "port of its own (vLLM: --data-parallel-external-lb), or no kv_events_port"
        )
    host = urlsplit(url).hostname or ""
    host = f"[{host}]" if ":" in host else host
    labels = {EVENTS_LABEL: f"tcp://{host}:{live}"}
    if replay:
        labels[REPLAY_LABEL] = f"tcp://{host}:{replay}"
    if topic:
        labels[TOPIC_LABEL] = topic
    return labels


def _needed(value: T | None, option: str, what: str) -> T:
    if not value:
        raise InvalidRequest(f"it does not tell {what}: give the option {option}")
    return value


def _object(text: bytes) -> dict[str, Any]:
    """A JSON object; empty if it is none."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {}


def _part(whole: dict[str, Any], name: str) -> dict[str, Any]:
    part = whole.get(name)
    return part if isinstance(part, dict) else {}


def _number(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError):
        return None
    return number if 0 < number < 1 << 40 else None
