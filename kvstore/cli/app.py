"""The `tiffin` program: its entry point, and the commands that belong to the store.

Every installed package of ours adds commands through the entry point group `tiffin.commands`, so
that this module knows none of them and nothing below imports what stands above it.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import asdict
from importlib.metadata import entry_points, version
from pathlib import Path  # noqa: TC003 - typer reads annotations
from socket import gethostname
from typing import Annotated, Any

import typer
import uvloop
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..credentials import load_credentials, parse_address
from ..errors import TiffinError
from ..extras import missing_extra
from ..memory.eviction import POLICIES
from ..node.core.node_core import CoreOptions
from ..node.node import NodeOptions
from ..sizes import format_bytes, parse_bytes
from ..text import printable
from ..tiers.slab import inspect_slab
from ..url import default_socket, parse_nvme
from .console import (
    JsonFlag,
    SocketOption,
    TokenFileOption,
    check_log_level,
    console,
    errors_console,
    log_to_stderr,
)
from .daemon import DaemonOptions, serve
from .operate import drain, token
from .status import status
from .up import up
from .vllm_flags import vllm_flags


def main(*, installed: bool = True) -> None:
    """Run the `tiffin` program: with the commands of every installed package, or with ours only."""
    app = typer.Typer(
        name="tiffin",
        help="Tiffin keeps the KV caches of large language models in one pool.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_program)
    found = entry_points(group="tiffin.commands") if installed else ()
    for entry in sorted(found, key=lambda entry: entry.name):
        entry.load()(app)
    if not found:
        commands(app)
    try:
        app()
    except TiffinError as error:
        _explain(error)
        raise SystemExit(2) from error
    except ModuleNotFoundError as error:
        missing = missing_extra(error)
        if missing is None:
            raise
        _explain(missing)
        raise SystemExit(2) from error


def _explain(error: TiffinError) -> None:
    # One line, however narrow the terminal: logs count lines, and people copy commands from it.
    text = Text.assemble((f"{type(error).__name__}:", "bold red"), f" {printable(str(error))}")
    errors_console.print(text, soft_wrap=True)


def _program(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if show_version:
        typer.echo(f"tiffin {version('tiffin')}")
        raise typer.Exit


def commands(app: typer.Typer) -> None:
    """Add the store's commands."""
    app.command("node")(node)
    app.command("up")(up)
    app.command("status")(status)
    app.command("drain")(drain)
    app.command("token")(token)
    app.command("inspect")(inspect)
    app.command("vllm-flags")(vllm_flags)


# -- tiffin node -----------------------------------------------------------------------------------


def node(
    socket: SocketOption = None,
    dram: Annotated[str, typer.Option(help="Size of the DRAM tier.")] = "1GiB",
    nvme: Annotated[
        str | None, typer.Option(help="NVMe tier as DIRECTORY:SIZE.", metavar="DIR:SIZE")
    ] = None,
    policy: Annotated[str, typer.Option(help=f"Eviction: {', '.join(POLICIES)}.")] = "lru",
    hugepages: Annotated[bool, typer.Option(help="Back DRAM with 2 MiB pages.")] = False,
    prefault: Annotated[
        bool, typer.Option(help="Touch all of DRAM at start; without, first writes are slow.")
    ] = True,
    high_watermark: Annotated[
        float, typer.Option(help="Share of DRAM above which demotion to NVMe starts.")
    ] = 0.90,
    low_watermark: Annotated[float, typer.Option(help="Share of DRAM at which it stops.")] = 0.80,
    write_lease_s: Annotated[
        float, typer.Option(help="Seconds after which a silent writer's reservation ends.")
    ] = 60.0,
    demote_on_second_use: Annotated[
        bool, typer.Option(help="Write a block to NVMe only if it was read twice.")
    ] = False,
    flush_s: Annotated[
        float, typer.Option(help="Seconds that a stop may take to write DRAM back to NVMe.")
    ] = 30.0,
    remote_lease_s: Annotated[
        float, typer.Option(help="Seconds after which a network client's silent lease ends.")
    ] = 30.0,
    listen: Annotated[
        str | None, typer.Option(help="Also serve the network here.", metavar="HOST:PORT")
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(help="Address under which others reach it.", metavar="HOST:PORT"),
    ] = None,
    directory: Annotated[
        str, typer.Option(help="Directory of the pool, redis://HOST:PORT.", metavar="URL")
    ] = "",
    pool: Annotated[str, typer.Option(help="Name of the pool in the directory.")] = "default",
    token_file: TokenFileOption = None,
    tls_ca: Annotated[
        Path | None, typer.Option(help="CA of the pool; clients need a certificate of it.")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="This node's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    authenticate: Annotated[
        str,
        typer.Option(help="What clients and nodes show to be theirs: frames, or bytes as well."),
    ] = "frames",
    nixl: Annotated[
        bool, typer.Option(help="Offer DRAM for one-sided reads by NIXL (RDMA).")
    ] = False,
    nixl_lanes: Annotated[
        str, typer.Option(help="What UCX may use for it, such as rc,ud; empty: all but tcp.")
    ] = "",
    name: Annotated[str, typer.Option(help="Shown in `tiffin status`.")] = "",
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Run a node: the daemon whose memory the processes of this host share.

    It stops on Ctrl-C or SIGTERM, after writing back to NVMe what was only in DRAM. What is in
    NVMe is there again at the next start, also after a kill.

    **Examples**

    `tiffin node --dram 8GiB`

    `tiffin node --dram 64GiB --nvme /var/lib/tiffin:500GiB --socket /run/tiffin/node.sock`

    `tiffin node --dram 64GiB --listen 10.0.0.5:7700 --directory redis://10.0.0.1 --token-file
    /etc/tiffin/token`
    """
    check_log_level(log_level)
    log_to_stderr(log_level)
    nvme_path, nvme_bytes = parse_nvme(nvme) if nvme else (None, 0)
    options = NodeOptions(
        dram_bytes=parse_bytes(dram),
        nvme_path=nvme_path,
        nvme_bytes=nvme_bytes,
        policy=policy,
        hugepages=hugepages,
        prefault=prefault,
        flush_s=flush_s,
        core=CoreOptions(
            high_watermark, low_watermark, write_lease_s, demote_on_second_use, remote_lease_s
        ),
    )
    surroundings = DaemonOptions(
        options,
        name or f"{gethostname()}-{os.getpid()}",
        socket or default_socket(),
        listen=parse_address(listen) if listen else None,
        advertise=parse_address(advertise) if advertise else None,
        directory=directory,
        pool=pool,
        credentials=load_credentials(token_file, tls_ca, tls_cert, tls_key, authenticate),
        nixl=nixl,
        nixl_lanes=nixl_lanes,
    )
    with contextlib.suppress(KeyboardInterrupt):
        uvloop.run(serve(surroundings))


# -- tiffin inspect --------------------------------------------------------------------------------


def inspect(
    path: Annotated[Path, typer.Argument(help="An NVMe tier's directory, or its slab file.")],
    as_json: JsonFlag = False,
    verify: Annotated[bool, typer.Option(help="Also check every payload's checksums.")] = True,
    scan_all: Annotated[
        bool, typer.Option("--scan-all", help="Ignore the extent map; look at every 4 KiB page.")
    ] = False,
) -> None:
    """Read an NVMe slab offline: its blocks, and what is damaged. Exits with 1 if anything is.

    **Examples**

    `tiffin inspect /var/lib/tiffin`, `tiffin inspect /var/lib/tiffin --json --no-verify`
    """
    report = inspect_slab(path, verify_payload=verify, scan_all=scan_all)
    if as_json:
        typer.echo(json.dumps(asdict(report), indent=2, default=str))
    else:
        console.print(_slab_table(report))
    raise typer.Exit(1 if report.damaged_blocks else 0)


_TEXT = ("checksum", "key", "state")


def _slab_table(report: Any) -> Table:
    damaged = report.damaged_blocks
    checked = "payloads verified" if report.payload_verified else "payloads not verified"
    table = Table(
        title=f"{escape(str(report.path))}: {format_bytes(report.capacity_bytes)}, "
        f"{len(report.blocks)} blocks, {damaged} damaged ({checked})",
        title_justify="left",
    )
    for column in (
        "offset",
        "extent",
        "payload",
        "tokens",
        "generation",
        "checksum",
        "key",
        "state",
    ):
        table.add_column(column, justify="left" if column in _TEXT else "right")
    for block in report.blocks:
        table.add_row(
            str(block.offset),
            format_bytes(block.extent_bytes),
            format_bytes(block.payload_bytes),
            str(block.token_count),
            str(block.generation),
            block.algorithm or "-",
            block.key or "-",
            f"[red]{escape(block.damage)}[/]" if block.damage else "ok",
        )
    return table
