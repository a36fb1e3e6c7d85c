"""`tiffin up`: a pool on this machine under one supervisor, to try things out and for small needs.

The supervisor itself is `local_pool.py`; this is what a person sees of it.
"""

from __future__ import annotations

import json
import os
import shlex
import time
from pathlib import Path  # noqa: TC003 - typer reads annotations
from typing import Annotated

import typer

from ..errors import NodeUnavailable
from ..url import parse_nvme
from .console import say, warn
from .interruptible import interruptible
from .local.local_pool import Happening, LocalPool, LocalPoolOptions

LOOK_S = 0.2


def up(
    nodes: Annotated[int, typer.Option(help="How many nodes.", min=1)] = 1,
    redis: Annotated[
        bool, typer.Option("--redis", help="Start a Redis for them, private and empty.")
    ] = False,
    directory: Annotated[
        str, typer.Option(help="Use this one instead, redis://HOST:PORT.", metavar="URL")
    ] = "",
    dram: Annotated[str, typer.Option(help="Size of each node's DRAM tier.")] = "1GiB",
    nvme: Annotated[
        str | None,
        typer.Option(help="NVMe tier of each node, in a folder of DIR.", metavar="DIR:SIZE"),
    ] = None,
    listen_host: Annotated[
        str, typer.Option(help="Address of this machine where the nodes (and Redis) listen.")
    ] = "127.0.0.1",
    pool: Annotated[str, typer.Option(help="Name of the pool in the directory.")] = "default",
    token_file: Annotated[
        Path | None, typer.Option(help="The pool's token.", show_default="a new one")
    ] = None,
    restart: Annotated[
        bool, typer.Option("--restart", help="Start again what dies, after 1 s, 2 s, ... 60 s.")
    ] = False,
    flush_s: Annotated[
        float, typer.Option(help="Seconds that a stop may take to write DRAM to NVMe.", min=0.0)
    ] = 30.0,
    node_options: Annotated[
        str, typer.Option(help="More options of `tiffin node`, for every node.", metavar="TEXT")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="When all is up, print one line of JSON about it.")
    ] = False,
) -> None:
    """Start a pool on this machine: nodes, and Redis as their directory; stop it with Ctrl-C.

    It runs in the foreground. What dies is reported with its last words, and stays dead without
    `--restart`; with the last node the command ends, with status 2. Nothing outlives the command,
    even if it is killed. Several nodes without `--redis` or `--directory` get `--redis`.

    **Examples**

    `tiffin up --nodes 2 --redis`

    `tiffin up --nodes 2 --dram 8GiB --nvme /var/lib/tiffin:100GiB --restart`

    `tiffin up --directory redis://10.0.0.1 --listen-host 10.0.0.5 --token-file /etc/tiffin/token`
    """
    if nodes > 1 and not (redis or directory):
        warn("several nodes need a directory: starting a Redis (--redis)")
        redis = True
    options = LocalPoolOptions(
        nodes=nodes,
        dram=dram,
        nvme=parse_nvme(nvme) if nvme else None,
        listen_host=listen_host,
        pool=pool,
        redis=redis,
        directory=directory,
        token_file=token_file,
        restart=restart,
        flush_s=flush_s,
        more=node_options,
    )
    local = LocalPool(options)
    killed: list[str] = []
    with interruptible(handled=True):
        try:
            local.start(_tell)
            _announce(local, as_json)
            _supervise(local)
        except KeyboardInterrupt:
            warn("stopping; Ctrl-C again to stop at once")
        finally:
            killed = local.stop()
    if killed:
        warn(f"did not stop in time and had to be killed: {', '.join(killed)}")


def _supervise(local: LocalPool) -> None:
    """Until somebody stops it, or nothing is left to supervise."""
    while True:
        for happening in local.look():
            _tell(happening)
        if not local.running:
            raise NodeUnavailable("no node is left; --restart would start them again")
        time.sleep(LOOK_S)


def _tell(happening: Happening) -> None:
    """In one write, so that no other process's lines come between a death and its last words."""
    last_words = happening.lines if happening.kind == "ended" else ()
    quoted = (f"    {happening.name} | {line}" for line in last_words)
    warn("\n".join((f"{happening.name} {happening.words}", *quoted)))


def _announce(local: LocalPool, as_json: bool) -> None:
    records = local.records()
    pids = local.pids()
    nodes = [
        {
            "name": name,
            "pid": pids[name],
            "socket": str(local.socket(index)),
            "address": records[name].address if name in records else "",
        }
        for index, name in enumerate(local.names)
    ]
    if as_json:
        known = {"url": local.url, "pid": os.getpid(), "folder": str(local.folder)}
        typer.echo(json.dumps({**known, "nodes": nodes, "pids": pids}))
        return
    for node in nodes:
        at = f" and {node['address']}" if node["address"] else ""
        say(f"{node['name']} (process {node['pid']}) serves unix:{node['socket']}{at}")
    say("")
    say(f"clients  {local.url}")
    say(f"status   tiffin status {shlex.quote(local.url)}")
    say(f"logs     {local.folder}/*.log")
    say(f"stop     Ctrl-C, or: kill {os.getpid()}")
