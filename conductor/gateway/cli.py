"""`tiffin gateway`: an OpenAI-compatible endpoint in front of the instances."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path  # noqa: TC003 # typer reads it
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Group
from rich.markup import escape
from rich.text import Text

from tiffin.kvstore.cli.console import (  # typer reads options
    JsonFlag,
    WatchOption,
    check_log_level,
    console,
    errors_console,
    log_to_stderr,
)
from tiffin.kvstore.cli.watching import show
from tiffin.kvstore.credentials import read_token
from tiffin.kvstore.errors import InvalidInput
from tiffin.kvstore.text import printable

from ..console import CaOption, OtlpOption, explained
from ..errors import ConductorError, ConductorUnavailable

URL = "http://127.0.0.1:7900"
# How long the gateway may take to say whether it is ready.
STATUS_S = 3.0


def commands(app: typer.Typer) -> None:
    """Add the gateway's command."""
    group = typer.Typer(rich_markup_mode="markdown")
    group.callback(invoke_without_command=True)(gateway)
    group.command("check")(check)
    group.command("status")(status)
    app.add_typer(group, name="gateway")


def gateway(
    context: typer.Context,
    listen: Annotated[
        str, typer.Option(help="Serve here; beyond loopback only with tokens.", metavar="HOST:PORT")
    ] = "127.0.0.1:7900",
    conductor: Annotated[
        str, typer.Option(help="Where the conductor answers.", metavar="URL")
    ] = "http://127.0.0.1:7800",
    config: Annotated[
        Path | None, typer.Option(help="Models, limits, timeouts: TOML or JSON.")
    ] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="The clients' API keys: a line per key, RIGHTS KEY.", show_default=False),
    ] = None,
    conductor_token_file: Annotated[
        Path | None,
        typer.Option(
            help="Our token for the conductor; else the one TIFFIN_CONDUCTOR_TOKEN_FILE names.",
            show_default=False,
        ),
    ] = None,
    conductor_tls_ca: Annotated[
        Path | None, typer.Option(help="CA of the conductor's certificate, for https.")
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Serve https with this certificate.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    workers: Annotated[
        int, typer.Option(min=1, max=256, help="Processes that serve this port as one gateway.")
    ] = 1,
    otlp_endpoint: OtlpOption = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the gateway: an OpenAI-compatible endpoint that asks the conductor where each request
    runs, and passes the answer on.

    Clients use it as they use any OpenAI endpoint, at `http://HOST:PORT/v1`. `/metrics` is for
    Prometheus. SIGHUP reloads clients' limits, objectives and API keys.

    **Examples**

    `tiffin gateway`, `tiffin gateway --workers 4`

    `tiffin gateway --listen 10.0.0.9:7900 --token-file /etc/tiffin/api-keys --config
    /etc/tiffin/gateway.toml --conductor http://10.0.0.9:7800 --conductor-token-file
    /etc/tiffin/conductor`
    """
    if context.invoked_subcommand is not None:
        return
    check_log_level(log_level)
    log_to_stderr(log_level)
    for noisy in ("aiohttp", "asyncio"):  # a line per call
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with explained("gateway", *("opentelemetry",) * bool(otlp_endpoint)):
        import uvloop
        from prometheus_client import disable_created_metrics

        from tiffin.kvstore.credentials import parse_address

        from .server import GatewayOptions, serve
        from .workers.supervisor import Supervisor, WorkerSpec

        disable_created_metrics()  # type: ignore[no-untyped-call] # a second line per counter, of when this process began
        options = GatewayOptions(
            listen=parse_address(listen),
            conductor=conductor,
            conductor_token_file=conductor_token_file,
            conductor_tls_ca=conductor_tls_ca,
            config_file=config,
            token_file=token_file,
            tls_cert=tls_cert,
            tls_key=tls_key,
            otlp_endpoint=otlp_endpoint,
        )
        worker = WorkerSpec.from_environment()
        if workers > 1 and worker is None:
            stop_s = options.config.timeouts.stop_s
            raise typer.Exit(Supervisor(options.listen, workers, stop_s).run())
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(options, worker=worker))


def status(
    url: Annotated[str, typer.Option("--url", help="Where the gateway answers.")] = URL,
    token_file: Annotated[
        Path | None, typer.Option(help="File with an API key, alone.", show_default=False)
    ] = None,
    tls_ca: CaOption = None,
    as_json: JsonFlag = False,
    watch: WatchOption = None,
) -> None:
    """Say whether the gateway could serve a request now, and if not, why. Exits with 1 if it could
    not, and with 2 if it does not answer. A gateway with API keys tells why to whoever has one.

    **Example**

    `tiffin gateway status --url https://10.0.0.9:7900 --token-file /etc/tiffin/my-key --watch 2`
    """
    with explained("gateway"):
        import httpx

        from ..client import calls
        from ..client.http_session import trusting

        call = calls.ready()
        tls = trusting(tls_ca) if url.startswith("https:") or tls_ca else True
        headers = {} if token_file is None else {"authorization": _bearer(token_file)}

        def look() -> dict[str, Any]:
            try:
                answer = http.get(call.path)
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                raise ConductorUnavailable(f"the gateway at {url}: {error}") from error
            return {
                "reasons": call.answered(answer.status_code, answer.content, again=False).reasons
            }

        with httpx.Client(
            base_url=url, headers=headers, verify=tls, trust_env=False, timeout=STATUS_S
        ) as http:
            found = show(look, _status_view, as_json, watch, errors=(ConductorError,))
    raise typer.Exit(1 if found["reasons"] else 0)


def _bearer(token_file: Path) -> str:
    return f"Bearer {read_token(token_file).decode('latin-1')}"


def _status_view(found: dict[str, Any]) -> Group:
    reasons = [Text(printable(f"not ready: {why}"), style="bold red") for why in found["reasons"]]
    return Group(*(reasons or [Text("ready", style="green")]))


def check(
    config: Annotated[Path, typer.Argument(help="The configuration: TOML or JSON.")],
    token_file: Annotated[
        Path | None,
        typer.Option(help="The clients' API keys, to compare names.", show_default=False),
    ] = None,
) -> None:
    """Say what is wrong with a configuration, and what each client may use by it. Exits with 1 if a
    gateway would not start with it.

    **Example**

    `tiffin gateway check /etc/tiffin/gateway.toml`
    """
    with explained("gateway"):
        from rich.table import Table

        from ..web.auth import load_tokens
        from .config import read_config
        from .config_check import errors, warnings

        try:
            read = read_config(config)
            tokens = load_tokens(token_file) if token_file else None
        except InvalidInput as error:
            errors_console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
            raise typer.Exit(1) from error
        wrong = list(errors(read))
        for line in wrong:
            errors_console.print(f"[bold red]error:[/] {escape(line)}", soft_wrap=True)
        for line in warnings(read, tokens):
            errors_console.print(f"[bold yellow]warning:[/] {escape(line)}", soft_wrap=True)
        everyone = {**read.clients, "(others)": read.client_default}
        table = Table("", *(escape(name) for name in everyone))
        for field in read.client_default.__struct_fields__:
            table.add_row(field, *(_cell(getattr(one, field)) for one in everyone.values()))
        console.print(table)
        if wrong:
            raise typer.Exit(1)
        console.print(f"{config}: a gateway would start with it")


def _cell(value: object) -> str:
    if isinstance(value, msgspec.Struct):
        given = {
            name: one for name, one in msgspec.structs.asdict(value).items() if one is not None
        }
        return ", ".join(f"{name} {one:g}" for name, one in given.items()) or "-"
    if isinstance(value, tuple):
        return escape(", ".join(value)) or "any"
    return "-" if value is None else f"{value:,}"
