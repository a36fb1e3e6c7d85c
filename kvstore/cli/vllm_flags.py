"""`tiffin vllm-flags`: what to pass to `vllm serve` for a pool that runs.

It needs neither vLLM nor torch: what it prints is checked by the connector's own `settings.read`.
"""

from __future__ import annotations

import contextlib
import json
import shlex
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from ..client.client import Client
from ..client.verbs.arguments import VERIFY
from ..connectors.vllm.model.model_config import bytes_per_token, check_config, read_config
from ..connectors.vllm.model.model_files import files_fingerprint
from ..connectors.vllm.settings import read
from ..credentials import format_address, parse_address
from ..errors import InvalidInput, NodeUnavailable, TiffinError
from ..sizes import format_bytes
from ..url import Daemon, Embedded, Pool, parse_url
from .console import warn
from .pool_status import Overview

if TYPE_CHECKING:
    from collections.abc import Mapping

BLOCK_TOKENS = 512
_HEADER_BYTES = 4096  # of a block in a tier
_ROLES = {"both": "kv_both", "producer": "kv_producer", "consumer": "kv_consumer"}
_NAME = "tiffin vllm-flags"


def vllm_flags(
    url: Annotated[
        str | None,
        typer.Argument(
            help="unix:PATH, redis://... or tiffin://HOST:PORT,...", show_default="the local node"
        ),
    ] = None,
    role: Annotated[
        str, typer.Option(help="both, producer (only saves) or consumer (only loads).")
    ] = "both",
    namespace: Annotated[str, typer.Option(help="Engines share blocks only within it.")] = "",
    secret_file: Annotated[
        Path | None,
        typer.Option(help="File with the namespace's secret.", show_default=False),
    ] = None,
    verify: Annotated[
        str, typer.Option(help=f"When loads are checked: {', '.join(VERIFY)}.")
    ] = "always",
    loading: Annotated[str, typer.Option(help="auto, synchronous or asynchronous.")] = "auto",
    model: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the model: refuse one that the connector would refuse.",
            show_default=False,
        ),
    ] = None,
    page_tokens: Annotated[
        int | None,
        typer.Option(help="The engine's --block-size; it divides 512.", show_default="vLLM's"),
    ] = None,
    events: Annotated[
        str,
        typer.Option(
            help="Publish KV events: where the conductor reaches them; replays at the next port.",
            metavar="HOST:PORT",
        ),
    ] = "",
    instance: Annotated[
        str, typer.Option(help="The instance's name, also the topic of its events.", metavar="NAME")
    ] = "",
    gateway: Annotated[
        bool, typer.Option("--gateway", help="Also what `tiffin gateway` needs.")
    ] = False,
    check: Annotated[bool, typer.Option(help="Ask the pool whether it answers.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON instead of a shell's words.")
    ] = False,
) -> None:
    """Print what to pass to `vllm serve` so that it uses this pool.

    The flags go to stdout, quoted for a shell; what the pool and the model are goes to stderr.
    Exits with 1 if the pool does not answer, and with 2 for a model or a setting that the connector
    refuses. No secret is printed: a URL names files with tokens and passwords.

    To use them at once: `eval "vllm serve MODEL $(tiffin vllm-flags)"`

    **Examples**

    `tiffin vllm-flags`

    `tiffin vllm-flags unix:/run/tiffin/node.sock --namespace acme --page-tokens 128`

    `tiffin vllm-flags "redis://10.0.0.1?token_file=/etc/tiffin/token" --no-check --json`

    `tiffin vllm-flags --events 10.0.0.21:5557 --instance vllm-0 --gateway`
    """
    url = _absolute(url or "unix:")
    given = {
        "namespace": namespace,
        "secret_file": str(secret_file.absolute()) if secret_file else "",
        "verify": "" if verify == "always" else verify,
        "loading": "" if loading == "auto" else loading,
        "engine": instance,
    }
    printed: dict[str, Any] = {"kv_transfer_config": _transfer(url, role, given)}
    if events or instance:
        printed |= _events(events, instance)
    if page_tokens is not None:
        printed["block_size"] = _checked_pages(page_tokens)
    if gateway:
        printed["enable_prompt_tokens_details"] = True
        printed["gateway"] = {str(model) if model else "": {"keys": "conductor", "handoff": "pool"}}
    block_bytes = _check_model(model) if model else None
    if check:
        _ask_pool(url, block_bytes)
    typer.echo(json.dumps(printed, indent=2) if as_json else _as_shell(printed))


# -- what is printed -------------------------------------------------------------------------------


def _absolute(url: str) -> str:
    """The URL as an engine has it: its working directory and its default socket may be others.
    Raises InvalidInput for a pool that engines can't share."""
    read({"url": url})
    target = parse_url(url)
    if isinstance(target, Embedded):
        raise InvalidInput(
            f"{url}: an embedded node ends with the engine and nobody else has it; start a node "
            "(tiffin node) and give unix:PATH"
        )
    return f"unix:{quote(str(target.path.absolute()))}" if isinstance(target, Daemon) else url


def _transfer(url: str, role: str, given: Mapping[str, str]) -> dict[str, Any]:
    """vLLM's KVTransferConfig. Raises InvalidInput for what the connector would refuse."""
    if role not in _ROLES:
        raise InvalidInput(f"--role {role}; choose one of {', '.join(_ROLES)}")
    extra = {"url": url, **{name: text for name, text in given.items() if text}}
    read(extra).secret()
    return {
        "kv_connector": "TiffinConnector",
        "kv_connector_module_path": "tiffin.kvstore.connectors.vllm",
        "kv_role": _ROLES[role],
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def _events(address: str, instance: str) -> dict[str, Any]:
    """vLLM's KVEventsConfig, and the labels with which the instance registers at the conductor.
    vLLM listens on all addresses: an endpoint without a * is one to connect to."""
    if not address:
        raise InvalidInput("--instance names the topic of events: give --events HOST:PORT as well")
    host, port = parse_address(address)
    if not 1 <= port < 65535:
        raise InvalidInput(
            f"--events {address}: choose a port from 1 to 65534; replays get the next"
        )
    if not instance.isprintable():
        raise InvalidInput(f"--instance {instance!r}: a name has characters that can be printed")
    config: dict[str, Any] = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{port}",
        "replay_endpoint": f"tcp://*:{port + 1}",
    }
    labels = {
        "kv_events": f"tcp://{format_address((host, port))}",
        "kv_events_replay": f"tcp://{format_address((host, port + 1))}",
    }
    if instance:
        config["topic"] = labels["kv_events_topic"] = instance
    return {"kv_events_config": config, "labels": labels}


def _checked_pages(page_tokens: int) -> int:
    if page_tokens < 1 or BLOCK_TOKENS % page_tokens:
        raise InvalidInput(
            f"--page-tokens {page_tokens}: pages of so many tokens do not fill a block of "
            f"{BLOCK_TOKENS}; choose 16, 32, 64, 128, 256 or 512, as vLLM's platform allows"
        )
    return page_tokens


def _as_shell(printed: Mapping[str, Any]) -> str:
    """Flags for a shell, a line each; then comments."""
    flags = [
        f"--{name.replace('_', '-')} {shlex.quote(json.dumps(printed[name]))}"
        for name in ("kv_transfer_config", "kv_events_config", "block_size")
        if name in printed
    ]
    if "enable_prompt_tokens_details" in printed:
        flags.append("--enable-prompt-tokens-details")
    lines = [" \\\n".join(flags)]
    if "labels" in printed:
        lines.append(f"# labels of the instance at the conductor: {json.dumps(printed['labels'])}")
    for name, options in printed.get("gateway", {}).items():
        lines.append("# for the configuration of tiffin gateway:")
        lines.append(f"#   [models.{json.dumps(name)}]" if name else "#   [default]")
        lines.extend(f"#   {option} = {json.dumps(value)}" for option, value in options.items())
    return "\n".join(lines)


# -- what is asked ---------------------------------------------------------------------------------


def _check_model(folder: Path) -> int | None:
    """The bytes of a block of the model in a tier, if its configuration says. Raises InvalidInput
    for a model that the connector would refuse."""
    config = read_config(folder)
    check_config(config)
    warn(f"{folder}: weights {files_fingerprint(folder)}")
    of_token = bytes_per_token(config)
    return None if of_token is None else BLOCK_TOKENS * of_token + _HEADER_BYTES


def _ask_pool(url: str, block_bytes: int | None) -> None:
    """Tell what the nodes have free. Exits with 1 if none answers; raises InvalidInput for a URL
    that can't work."""
    try:
        nodes = _nodes(url)
    except InvalidInput:
        raise
    except TiffinError as error:
        warn(f"the pool does not answer: {error}")
        warn(
            "an engine that starts now computes everything until it does; --no-check prints anyway"
        )
        raise typer.Exit(1) from error
    for name, dram in nodes:
        line = f"{name}: {format_bytes(dram['free_bytes'])} of DRAM free, of "
        line += format_bytes(dram["capacity_bytes"])
        if block_bytes:
            tokens = dram["capacity_bytes"] // block_bytes * BLOCK_TOKENS
            line += f", which hold {tokens:,} tokens of this model"
        warn(line)


def _nodes(url: str) -> list[tuple[str, dict[str, int]]]:
    """The DRAM tier of each node that answers. Raises TiffinError if there is none."""
    target = parse_url(url)
    if not isinstance(target, Pool):
        with Client.open(url, name=_NAME) as client:
            numbers = client.statistics()
        return [(numbers["node"], numbers["tiers"]["dram"])]
    with contextlib.closing(Overview(target, _NAME)) as overview:
        nodes = overview.look(replicas=False)["nodes"]
    found = [(node["name"], node["tiers"]["dram"]) for node in nodes if "dram" in node["tiers"]]
    if not found:
        errors = "; ".join(f"{node['name']}: {node['error']}" for node in nodes if node["error"])
        raise NodeUnavailable(errors or "no node is registered")
    return found
