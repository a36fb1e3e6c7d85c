"""`tiffin status`: one node by its socket, or a whole pool by its URL."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ..client.client import Client
from ..deadlines import Within
from ..errors import InvalidInput
from ..sizes import format_bytes
from ..text import printable
from ..url import Embedded, Pool, parse_url
from .console import JsonFlag, SocketOption, WatchOption  # noqa: TC001 - typer reads them
from .pool_status import Overview
from .watching import show

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

Numbers = dict[str, Any]

# A matrix of more nodes does not fit a terminal; then the slowest ways are listed, this many.
MATRIX_NODES_MAX = 8
SLOWEST_SHOWN = 20

# How long the local node may take to welcome a caller, and then to answer.
NODE_S = 2.0

_STATE_STYLES = {"up": "green", "draining": "yellow", "unreachable": "bold red"}

UrlArgument = Annotated[
    str | None,
    typer.Argument(
        help="redis://..., tiffin://HOST:PORT,... or unix:PATH.", show_default="the local node"
    ),
]


def status(
    url: UrlArgument = None,
    socket: SocketOption = None,
    as_json: JsonFlag = False,
    watch: WatchOption = None,
    replicas: Annotated[
        bool, typer.Option(help="Count replicas, in a sample of the pool's blocks.")
    ] = True,
) -> None:
    """Show a node's tiers, hit rates, leases and clients, or all nodes of a pool.

    Exits with 1 if a node of the pool is unreachable, if the pool has none that we may read, and
    if it has several of one name.

    **Examples**

    `tiffin status`, `tiffin status --watch 1`, `tiffin status --json | jq .counters`

    `tiffin status "redis://10.0.0.1?token_file=/etc/tiffin/token" --watch 2`
    """
    if url is not None and socket is not None:
        raise InvalidInput("a URL and --socket: choose one")
    url = url or (f"unix:{socket}" if socket else "unix:")
    target = parse_url(url)
    if isinstance(target, Embedded):
        raise InvalidInput(f"{url}: an embedded node has no status but its own client's")
    with _looking(target, url, replicas) as (look, table):
        found = show(look, table, as_json, watch)
    # Of one node the exit code says whether it answers: probes restart it if it does not.
    nodes = found.get("nodes", ())
    if "nodes" in found and (
        _reasons(found) or any(node["state"] == "unreachable" for node in nodes)
    ):
        raise typer.Exit(1)


def _reasons(found: Numbers) -> list[str]:
    """What is wrong with a pool, or with a node's place in one."""
    if "nodes" in found:
        return list(found.get("reasons", ()))
    return [found["directory"]["reason"]] if found.get("directory", {}).get("reason") else []


@contextlib.contextmanager
def _looking(
    target: Any, url: str, replicas: bool
) -> Iterator[tuple[Callable[[], Numbers], Callable[[Numbers], RenderableType]]]:
    """What gives the numbers, and what draws them."""
    if isinstance(target, Pool):
        with contextlib.closing(Overview(target)) as overview:
            yield lambda: overview.look(replicas=replicas), pool_tables
    else:
        with Within(NODE_S).run(lambda: Client.open(url, name="tiffin status")) as client:
            yield lambda: client.statistics(timeout_s=NODE_S), status_table


# -- one node --------------------------------------------------------------------------------------


def status_table(numbers: dict[str, Any]) -> Group:
    """`Client.statistics()` as tables for people; nothing in it commands their terminal."""
    numbers = printable(numbers)
    return Group(
        *_socket_line(numbers),
        *_reason_lines(numbers),
        _tiers_table(numbers),
        _counters_table(numbers),
        _clients_table(numbers),
    )


def _reason_lines(found: Numbers) -> list[Text]:
    return [Text(reason, style="bold red") for reason in _reasons(found)]


def _socket_line(numbers: dict[str, Any]) -> list[Text]:
    found = numbers.get("socket", {"healthy": True})
    if found["healthy"]:
        return []
    return [Text(f"no client finds this node at {found['path']}: see its log", style="bold red")]


def _tiers_table(numbers: dict[str, Any]) -> Table:
    title = f"{escape(numbers['node'])}: {numbers['blocks']} blocks, up {numbers['uptime_s']:.0f} s"
    table = Table(title=title, title_justify="left")
    table.add_column("tier")
    tiers = numbers["tiers"]
    for name in tiers:
        table.add_column(name, justify="right")
    for row in ("capacity", "committed", "reserved", "quarantined", "free", "largest free"):
        field = row.replace(" ", "_") + "_bytes"
        table.add_row(row, *(format_bytes(tier[field]) for tier in tiers.values()))
    table.add_row("blocks", *(str(tier["blocks"]) for tier in tiers.values()))
    table.add_row("state", *(_tier_state(name, tier) for name, tier in tiers.items()))
    return table


def _tier_state(name: str, tier: dict[str, Any]) -> str:
    if not (tier["healthy"] and tier["writable"]):
        return "[red]takes no more blocks[/]"
    return "ok, buffered I/O" if name == "nvme" and not tier["direct_io"] else "ok"


def _counters_table(numbers: dict[str, Any]) -> Table:
    counters = numbers["counters"]
    hits = counters["dram_hits"] + counters["nvme_hits"]
    asked = hits + counters["misses"]
    rate = f"{hits / asked:.1%}" if asked else "none asked yet"
    table = Table(show_header=False)
    pairs = {
        "blocks asked for": asked,
        "hit rate": rate,
        "from DRAM": f"{counters['dram_hits']} ({format_bytes(counters['dram_hit_bytes'])})",
        "from NVMe": f"{counters['nvme_hits']} ({format_bytes(counters['nvme_hit_bytes'])})",
        "stored": f"{counters['commits']} ({format_bytes(counters['commit_bytes'])})",
        "evicted / demoted": "{evictions} / {demotions}".format(**counters),
        "promoted / written back": "{promotions} / {write_backs}".format(**counters),
        "corrupt / medium errors": "{corrupt} / {medium_errors}".format(**counters),
        "writes aborted / expired": "{aborts} / {expired}".format(**counters),
        "waiting requests / queued moves": f"{numbers['waiting_requests']} / "
        f"{numbers['queued_moves']}",
    }
    for name, value in pairs.items():
        table.add_row(name, str(value))
    return table


def _clients_table(numbers: dict[str, Any]) -> Table:
    table = Table(title="clients", title_justify="left")
    for column in ("name", "pid", "read leases", "write leases", "held", "state"):
        table.add_column(column, justify="left" if column in ("name", "state") else "right")
    for session in numbers["sessions"]:
        state = "gone, waiting for its process to end" if session["gone"] else "connected"
        if session["zombie_leases"]:
            state += f", {session['zombie_leases']} expired reservations"
        table.add_row(
            escape(session["name"] or "-"),
            str(session["pid"]),
            str(session["read_leases"]),
            str(session["write_leases"]),
            format_bytes(session["held_bytes"]),
            state,
        )
    return table


# -- a pool ----------------------------------------------------------------------------------------


def pool_tables(found: Numbers) -> Group:
    """`Overview.look()` as tables for people; nothing in it commands their terminal."""
    found = printable(found)
    parts: list[RenderableType] = [_directory_line(found), *_reason_lines(found)]
    parts.append(_nodes_table(found["nodes"]))
    if "replicas" in found:
        parts.append(_replicas_line(found["replicas"]))
    if links := _links(found["links"], found["nodes"]):
        parts.append(links)
    return Group(*parts)


def _directory_line(found: Numbers) -> Text:
    directory = found["directory"]
    if directory is None:
        return Text("no directory: the nodes of this URL")
    text = Text(f"pool {found['pool']}, directory")
    if "address" in directory:
        text.append(f" {directory['kind']} at {directory['address']}")
    if directory.get("healthy", True):
        text.append(f": answers in {directory['round_trip_s'] * 1e3:.1f} ms", style="green")
    else:
        text.append(f": {'; '.join(directory['down'])}", style="bold red")
    if strangers := directory.get("unauthenticated_records", 0):
        text.append(f"; {strangers} entries without our token's stamp are ignored", style="red")
    return text


def _nodes_table(nodes: list[Numbers]) -> Table:
    unreachable = sum(node["state"] == "unreachable" for node in nodes)
    title = f"{len(nodes)} nodes" + (f", {unreachable} unreachable" if unreachable else "")
    table = Table(title=title, title_justify="left")
    for column in ("node", "address", "state"):
        table.add_column(column, no_wrap=column != "state")
    for column in ("dram", "nvme", "blocks", "lag", "up"):
        table.add_column(column, justify="right", no_wrap=column in ("blocks", "lag"))
    for node in nodes:
        state = Text(node["state"], style=_STATE_STYLES[node["state"]])
        if node["error"]:
            state.append(f"\n{node['error']}", style="red")
        table.add_row(
            escape(node["name"]),
            escape(node["address"]),
            state,
            _filled(node["tiers"].get("dram")),
            _filled(node["tiers"].get("nvme")),
            _or_dash(node["blocks"]),
            _or_dash(node["lag_events"]),
            "-" if node["uptime_s"] is None else _duration(node["uptime_s"]),
        )
    return table


def _filled(tier: Numbers | None) -> str:
    if tier is None:
        return "-"
    filled = f"{format_bytes(tier['used_bytes'])} of {format_bytes(tier['capacity_bytes'])}"
    if not (tier.get("healthy", True) and tier.get("writable", True)):
        filled += " [red]takes no more[/]"
    return filled


def _or_dash(number: int | None) -> str:
    return "-" if number is None else str(number)


def _duration(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.0f} s"


def _replicas_line(replicas: Numbers) -> Text:
    if not replicas["of"]:
        return Text("no blocks")
    about = "" if replicas["exact"] else f"about (a sample of {replicas['of']}) "
    counts = replicas["blocks"]
    shown = (f"{counts['1']} on one node", f"{counts['2']} on two", f"{counts['3+']} on more")
    return Text(f"blocks: {about}{', '.join(shown)}")


def _links(links: dict[str, dict[str, list[float]]], nodes: list[Numbers]) -> RenderableType | None:
    """What the nodes measured on the way to each other, from the row's node to the column's."""
    names = [node["name"] for node in nodes]
    if not links:
        return None
    if len(names) <= MATRIX_NODES_MAX:
        table = Table("from \\ to", *map(escape, names), title="links", title_justify="left")
        for name in names:
            ways = links.get(name, {})
            table.add_row(escape(name), *(_way(ways.get(other)) for other in names))
        return table
    ways_found = [(way[0], a, b, way) for a, ways in links.items() for b, way in ways.items()]
    title = f"links, the {SLOWEST_SHOWN} slowest"
    table = Table("from", "to", "bandwidth, latency", title=title, title_justify="left")
    for _, start, end, way in sorted(ways_found)[:SLOWEST_SHOWN]:
        table.add_row(escape(start), escape(end), _way(way))
    return table


def _way(way: list[float] | None) -> str:
    if way is None:
        return "-"
    bandwidth_bytes_s, latency_s = way
    return f"{format_bytes(bandwidth_bytes_s)}/s, {latency_s * 1e3:.2f} ms"
