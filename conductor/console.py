"""What the commands of this package share: errors in one line."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from tiffin.kvstore.cli.console import errors_console
from tiffin.kvstore.extras import need
from tiffin.kvstore.text import printable

from .errors import ConductorError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from .client.client import ConductorClient

# What conductor, gateway and client import when they run. Without dnspython, statsmodels and
# fastapi-swagger only what is asked of these fails.
SERVICE = (
    "aiohttp",
    "fastapi",
    "httptools",
    "httpx",
    "httpx_sse",
    "prometheus_client",
    "uvicorn",
    "zmq",
)

OtlpOption = Annotated[
    str,
    typer.Option(
        help="Send spans of requests to this collector, as http://HOST:4318/v1/traces.",
        metavar="URL",
    ),
]


URL = "http://127.0.0.1:7800"

UrlOption = Annotated[str, typer.Option("--url", help="Where the conductor answers.")]
TokenOption = Annotated[
    Path | None,
    typer.Option(
        help="File with a token, alone; else the one TIFFIN_CONDUCTOR_TOKEN_FILE names.",
        show_default=False,
    ),
]
CaOption = Annotated[Path | None, typer.Option(help="CA of its certificate, for https.")]


@contextlib.contextmanager
def explained(program: str, *modules: str) -> Iterator[None]:
    """Errors as one line; first of all what to install, if `program` or `modules` are missing."""
    need(f"the {program}", *SERVICE, *modules)
    try:
        yield
    except ConductorError as error:
        errors_console.print(
            f"[bold red]{type(error).__name__}:[/] {escape(printable(str(error)))}", soft_wrap=True
        )
        raise typer.Exit(2) from error


@contextlib.contextmanager
def asking(url: str, token_file: Path | None, tls_ca: Path | None) -> Iterator[ConductorClient]:
    """A client of the conductor at `url`, with errors as one line."""
    with explained("conductor's client"):
        from .client.client import ConductorClient

        with ConductorClient(url, token_file=token_file, tls_ca=tls_ca) as client:
            yield client
