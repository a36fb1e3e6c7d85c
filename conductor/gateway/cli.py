"""`tiffin gateway`: an OpenAI-compatible endpoint in front of the instances."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path  # noqa: TC003 # typer reads it
from typing import Annotated

import typer

from tiffin.kvstore.cli.console import check_log_level, log_to_stderr

from ..console import OtlpOption, explained


def commands(app: typer.Typer) -> None:
    """Add the gateway's command."""
    app.command("gateway")(gateway)


def gateway(
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
    otlp_endpoint: OtlpOption = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run the gateway: an OpenAI-compatible endpoint that asks the conductor where each request
    runs, and passes the answer on.

    Clients use it as they use any OpenAI endpoint, at `http://HOST:PORT/v1`. `/metrics` is for
    Prometheus.

    **Examples**

    `tiffin gateway`

    `tiffin gateway --listen 10.0.0.9:7900 --token-file /etc/tiffin/api-keys --config
    /etc/tiffin/gateway.toml --conductor http://10.0.0.9:7800 --conductor-token-file
    /etc/tiffin/conductor`
    """
    check_log_level(log_level)
    log_to_stderr(log_level)
    for noisy in ("aiohttp", "asyncio"):  # a line per call
        logging.getLogger(noisy).setLevel(logging.WARNING)
    with explained("gateway"):
        import uvloop
        from prometheus_client import disable_created_metrics

        from tiffin.kvstore.credentials import parse_address

        from ..web.auth import Tokens, load_tokens
        from .config import GatewayConfig, read_config
        from .server import GatewayOptions, serve

        disable_created_metrics()  # type: ignore[no-untyped-call] # a second line per counter, of when this process began
        options = GatewayOptions(
            listen=parse_address(listen),
            conductor=conductor,
            conductor_token_file=conductor_token_file,
            conductor_tls_ca=conductor_tls_ca,
            config=read_config(config) if config else GatewayConfig(),
            tokens=load_tokens(token_file) if token_file else Tokens(),
            tls_cert=tls_cert,
            tls_key=tls_key,
            otlp_endpoint=otlp_endpoint,
        )
        with contextlib.suppress(KeyboardInterrupt):
            uvloop.run(serve(options))
