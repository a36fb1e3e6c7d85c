"""`tiffin gateway`: an OpenAI-compatible endpoint in front of the instances."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path  # noqa: TC003 # typer reads it
from typing import Annotated

import msgspec
import typer
from rich.markup import escape

from tiffin.kvstore.cli.console import check_log_level, console, errors_console, log_to_stderr
from tiffin.kvstore.errors import InvalidInput

from ..console import OtlpOption, explained


def commands(app: typer.Typer) -> None:
    """Add the gateway's command."""
    group = typer.Typer(rich_markup_mode="markdown")
    group.callback(invoke_without_command=True)(gateway)
    group.command("check")(check)
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
