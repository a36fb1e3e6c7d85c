"""`tiffin conductor`: run it, look at it, ask it why, change its settings."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path  # noqa: TC003 # typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tiffin.kvstore.cli.console import (
    JsonFlag,
    WatchOption,
    check_log_level,
    console,
    log_to_stderr,
)
from tiffin.kvstore.cli.watching import show
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.gc_tuning import collect_young_only
from tiffin.kvstore.text import printable

from .console import URL, CaOption, OtlpOption, TokenOption, UrlOption, asking, explained
from .engine_cli import add, profile
from .errors import ConductorError
from .web.connection_limits import PER_PEER

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .wire.models import CandidateReply, EntryReply, InstanceReply


# Of an instance's id on one line: an IPv4 address and a port are 21.
ID_WIDTH_MAX = 24


def commands(app: typer.Typer) -> None:
    """Add the conductor's commands."""
    group = typer.Typer(rich_markup_mode="markdown")
    group.callback(invoke_without_command=True)(conductor)
    group.command("status")(status)
    group.command("why")(why)
    group.command("policy")(policy)
    group.command("add")(add)
    app.add_typer(group, name="conductor")
    app.command("profile")(profile)


# -- tiffin conductor ------------------------------------------------------------------------------


def conductor(
    context: typer.Context,
    listen: Annotated[
        str, typer.Option(help="Serve here; beyond loopback only with tokens.", metavar="HOST:PORT")
    ] = "127.0.0.1:7800",
    token_file: Annotated[
        Path | None,
        typer.Option(help="Who may do what: a line per token, RIGHTS TOKEN.", show_default=False),
    ] = None,
    policy_name: Annotated[
        str | None,
        typer.Option("--policy", help="How instances are chosen.", show_default="of the settings"),
    ] = None,
    allowed_hosts: Annotated[
        str | None,
        typer.Option(
            help="Where instances may be, with commas: names, *.DOMAIN, addresses, networks.",
            metavar="HOSTS",
            show_default="of the settings: this machine",
        ),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Settings, TOML or JSON, as `tiffin conductor policy` shows them."),
    ] = None,
    profiles: Annotated[
        Path | None,
        typer.Option(help="Folder with latency profiles of your own, one JSON file each."),
    ] = None,
    directory: Annotated[
        str,
        typer.Option(
            help="Follow the nodes of the pool at redis://HOST:PORT, or, without one, the nodes "
            "at tiffin://HOST:PORT,HOST:PORT.",
            metavar="URL",
        ),
    ] = "",
    share: Annotated[
        str,
        typer.Option(help="Share load and instances with other conductors here.", metavar="URL"),
    ] = "",
    advertise: Annotated[
        str,
        typer.Option(
            help="With --share: where clients reach this conductor, for its requests' events.",
            metavar="URL",
            show_default="where it listens",
        ),
    ] = "",
    pool: Annotated[str, typer.Option(help="Name of the pool in the directory.")] = "default",
    pool_token_file: Annotated[
        Path | None, typer.Option(help="The pool's token, to ask its nodes.", show_default=False)
    ] = None,
    pool_tls_ca: Annotated[Path | None, typer.Option(help="CA of the pool's nodes.")] = None,
    peer_connections: Annotated[
        int,
        typer.Option(help="From one address, before they have shown a token.", min=1),
    ] = PER_PEER,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Serve https with this certificate.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Record each request and what came of it here, for `tiffin whatif`.",
            metavar="FILE",
            dir_okay=False,
            show_default=False,
        ),
    ] = None,
    record_bytes: Annotated[
        str, typer.Option(help="Size of the record; then it becomes FILE.1.", metavar="SIZE")
    ] = "1GiB",
    otlp_endpoint: OtlpOption = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the conductor: it decides which instances serve which requests.

    Instances register over HTTP and send heartbeats; whoever routes requests asks `POST
    /v1/schedule` and reports what became of them. `/docs` describes all of it, `/metrics` is for
    Prometheus. It stops on Ctrl-C or SIGTERM, and keeps nothing: after a restart everybody says
    again what there is.

    **Examples**

    `tiffin conductor`

    `tiffin conductor --listen 10.0.0.9:7800 --token-file /etc/tiffin/conductor-tokens
    --allowed-hosts 10.0.0.0/24 --config /etc/tiffin/conductor.toml`

    `tiffin conductor --directory redis://10.0.0.1 --pool-token-file /etc/tiffin/token`

    `tiffin conductor --directory redis://10.0.0.1 --share redis://10.0.0.1`

    `tiffin conductor --record requests.jsonl`
    """
    if context.invoked_subcommand is not None:
        return
    check_log_level(log_level)
    in_redis = any(one and not one.startswith("tiffin:") for one in (directory, share))
    more = ("redis",) * in_redis + ("opentelemetry",) * bool(otlp_endpoint)
    with explained("conductor", *more):
        import uvloop
        from prometheus_client import disable_created_metrics

        from tiffin.kvstore.credentials import load_credentials, parse_address
        from tiffin.kvstore.sizes import parse_bytes

        from .api.request_bodies import Limits
        from .core.conductor import Conductor
        from .core.settings import Settings, patched
        from .cost.latency_profiles import own_or_shipped
        from .discovery.settings import read_discovery
        from .service.server import ConductorOptions, read_settings, serve
        from .web.auth import Tokens, load_tokens

        changes = parse_changes([f"policy.name={policy_name}"] if policy_name else [])
        if allowed_hosts is not None:
            changes["instances"] = {"allowed_hosts": allowed_hosts.replace(",", " ").split()}
        content = read_settings(config) if config else {}
        discovery = read_discovery(content)
        settings = patched(patched(Settings(), content), changes)
        core = Conductor(settings, profile=own_or_shipped(profiles))
        if share:
            from .replicas.redis_link import unique_name
            from .replicas.replica import SharedConductor

            core = SharedConductor(
                unique_name(),
                settings,
                profile=own_or_shipped(profiles),
                unix_offset_s=time.time() - time.monotonic(),
            )
        options = ConductorOptions(
            listen=parse_address(listen),
            share=share,
            advertise=advertise,
            tokens=load_tokens(token_file) if token_file else Tokens(),
            directory=directory,
            pool=pool,
            credentials=load_credentials(pool_token_file, pool_tls_ca),
            limits=Limits(peer_connections=peer_connections),
            tls_cert=tls_cert,
            tls_key=tls_key,
            otlp_endpoint=otlp_endpoint,
            record=record,
            record_bytes=parse_bytes(record_bytes),
            discovery=discovery,
        )
        log_to_stderr(log_level)
        # Otherwise each counter has a second line with its time of creation.
        disable_created_metrics()  # type: ignore[no-untyped-call]
        collect_young_only()
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(core, options))


# -- tiffin conductor status -----------------------------------------------------------------------


def status(
    url: UrlOption = URL,
    token_file: TokenOption = None,
    tls_ca: CaOption = None,
    as_json: JsonFlag = False,
    watch: WatchOption = None,
) -> None:
    """Show the instances, and what keeps requests from being scheduled. Exits with 1 if anything
    does.

    **Examples**

    `tiffin conductor status`, `tiffin conductor status --watch 2`

    `tiffin conductor status --url https://10.0.0.9:7800 --json`
    """
    import msgspec

    with asking(url, token_file, tls_ca) as client:

        def look() -> dict[str, Any]:
            health = client.ready()
            instances = msgspec.json.decode(msgspec.json.encode(client.instances()))
            return {"reasons": health.reasons, "notes": health.notes, "instances": instances}

        found = show(look, _status_view, as_json, watch, errors=(ConductorError,))
    raise typer.Exit(1 if found["reasons"] else 0)


def _status_view(found: dict[str, Any]) -> Group:
    """What `status` shows, for people."""
    import msgspec

    from .wire.models import InstanceReply

    lines = [
        Text(printable(f"not ready: {reason}"), style="bold red") for reason in found["reasons"]
    ]
    lines += [Text(printable(note), style="yellow") for note in found["notes"]]
    instances = msgspec.convert(found["instances"], list[InstanceReply])
    return Group(_instances_table(instances), *lines)


def _instances_table(instances: list[InstanceReply]) -> Table:
    table = Table(title=f"{len(instances)} instances", title_justify="left")
    table.add_column("instance", overflow="fold", min_width=_id_width(one.id for one in instances))
    for column in ("model", "role", "status", "node"):
        table.add_column(column, overflow="fold")
    for column in ("heard", "queued tokens", "running", "context", "KV used"):
        table.add_column(column, justify="right", overflow="fold")
    for one in instances:
        heard = "-" if one.heard_s is None else f"{one.heard_s:.1f} s"
        names = (one.id, one.model, one.role, one.status, one.node)
        load = (_number(one.load.get(name)) for name in _SHOWN_LOAD)
        table.add_row(*(escape(printable(name)) for name in names), heard, *load)
    return table


def _id_width(ids: Iterable[str]) -> int:
    """The width of a column of instances' ids: whole, as people copy them; the longest in lines."""
    return min(ID_WIDTH_MAX, max(map(len, ids), default=1))


_SHOWN_LOAD = ("queued_tokens", "batch", "context_tokens", "kv_used_tokens")


# -- tiffin conductor why --------------------------------------------------------------------------


def why(
    request: Annotated[str, typer.Argument(help="The request's id.")],
    tenant: Annotated[
        str, typer.Option(help="Whose it is; else the latest with this id.", show_default=False)
    ] = "",
    url: UrlOption = URL,
    token_file: TokenOption = None,
    tls_ca: CaOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Show why a request runs where it runs: the candidates and every term of their cost.

    **Examples**

    `tiffin conductor why chatcmpl-7f3a`, `tiffin conductor why chat-1 --tenant acme`
    """
    with asking(url, token_file, tls_ca) as client:
        entry = client.why(request, tenant=tenant)
    if as_json:
        _print_json(entry)
        return
    console.print(escape(printable(_in_words(entry))), highlight=False)
    for line in (_became(entry), _left_out(entry)):
        if line:
            console.print(escape(printable(line)), highlight=False)
    for title, candidates in (
        ("prefill", entry.candidates),
        ("decode", entry.decode_candidates),
    ):
        if candidates:
            console.print(_candidates_table(title, candidates))


def _became(entry: EntryReply) -> str:
    """What was observed, as it was predicted before."""
    seen = entry.became
    if seen is None:
        return ""
    found = "" if seen.found_tokens is None else f"; {seen.found_tokens} cached tokens were found"
    times = f"TTFT {_seconds(seen.observed_ttft_s)}, TBT {_seconds(seen.observed_tbt_s)}"
    return f"{seen.end or 'in flight'}: observed {times}, {seen.output_tokens} tokens{found}"


def _left_out(entry: EntryReply) -> str:
    """How many instances are not listed, and why."""
    found = []
    for what, counts in (("prefill", entry.left_out), ("decode", entry.decode_left_out)):
        if counts:
            each = (f"{count} {why.replace('_', ' ')}" for why, count in counts.items())
            found.append(f"{what}: {', '.join(each)}")
    return f"not listed for {'; for '.join(found)}" if found else ""


def _in_words(entry: EntryReply) -> str:
    predicted = f"predicted TTFT {_seconds(entry.predicted_ttft_s)}"
    predicted += f", TBT {_seconds(entry.predicted_tbt_s)}"
    predicted += f"; tenant {entry.tenant}" if entry.tenant else ""
    if entry.outcome == "rejection":
        return f"rejected, {entry.reason}: {entry.message} ({predicted})"
    used = f"uses {entry.cached_tokens} of {entry.available_tokens} cached tokens"
    words = f"prefill on {entry.prefill}, decode on {entry.decode}, by {entry.policy}; {used}"
    if entry.local_s is not None or entry.remote_s is not None:
        costs = f"{_seconds(entry.local_s)} where it decodes, {_seconds(entry.remote_s)} elsewhere"
        words += f"; prefill would cost {costs} ({entry.placement})"
    return f"{words}; {predicted}"


def _candidates_table(title: str, candidates: list[CandidateReply]) -> Table:
    terms = list(dict.fromkeys(name for one in candidates for name in one.terms))
    table = Table(title=f"{title}, the cheapest first", title_justify="left")
    table.add_column(
        "instance", overflow="fold", min_width=_id_width(one.instance for one in candidates)
    )
    for column in ("cost", *terms):
        table.add_column(escape(printable(column)), justify="right")
    for one in candidates:
        numbers = (_number(one.terms.get(name)) for name in terms)
        table.add_row(escape(printable(one.instance)), _number(one.cost), *numbers)
    return table


# -- tiffin conductor policy -----------------------------------------------------------------------


def policy(
    changes: Annotated[
        list[str] | None, typer.Argument(help="What to change.", metavar="[NAME=VALUE]...")
    ] = None,
    url: UrlOption = URL,
    token_file: TokenOption = None,
    tls_ca: CaOption = None,
) -> None:
    """Show all settings as JSON, after changing some of them. Values are JSON, or else text. If
    anything is wrong, nothing is changed.

    **Examples**

    `tiffin conductor policy`

    `tiffin conductor policy policy.name=least_loaded core.heartbeat_timeout_s=5`
    """
    wanted = parse_changes(changes or [])
    with asking(url, token_file, tls_ca) as client:
        _print_json(client.patch(wanted) if wanted else client.settings())


def parse_changes(changes: list[str]) -> dict[str, Any]:
    """`a.b=1` as {"a": {"b": 1}}. Raises InvalidInput."""
    tree: dict[str, Any] = {}
    for change in changes:
        path, equals, text = change.partition("=")
        *groups, name = path.split(".")
        if not equals or not all((*groups, name)):
            raise InvalidInput(f"{change!r}: write NAME=VALUE, such as policy.name=random")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        at = tree
        for group in groups:
            at = at.setdefault(group, {})
            if not isinstance(at, dict):
                raise InvalidInput(f"{change!r}: {group!r} was given a value before")
        at[name] = value
    return tree


# -- what they share -------------------------------------------------------------------------------


def _print_json(value: Any) -> None:
    import msgspec

    typer.echo(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.4g}"


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g} s"
