"""`tiffin status URL`, `tiffin drain` and `tiffin token`: a pool at a glance, and by hand."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import (
    EXTENT,
    fresh_prefix,
    payloads_of,
    wait_until,
)
from rich.console import Console
from rich.text import Text

from tiffin.kvstore import Client
from tiffin.kvstore.cli import main
from tiffin.kvstore.cli.local.local_pool import LocalPool, LocalPoolOptions
from tiffin.kvstore.cli.local.token_file import make_secret_file
from tiffin.kvstore.cli.operate import find_node
from tiffin.kvstore.cli.pool_status import Overview, Sample, clashes, count_replicas
from tiffin.kvstore.cli.status import MATRIX_NODES_MAX, NODE_S, pool_tables
from tiffin.kvstore.cli.watching import show
from tiffin.kvstore.client.connection import connection
from tiffin.kvstore.credentials import Credentials, read_token
from tiffin.kvstore.deadlines import OVERRUN_S
from tiffin.kvstore.directory import NodeRecord, open_directory
from tiffin.kvstore.errors import InvalidInput, NodeUnavailable
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.node.server.tcp_server import RemoteService
from tiffin.kvstore.url import Pool, parse_url

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tiffin.kvstore import Prefix


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """The program in this process: starting another takes most of a second."""
    monkeypatch.setenv("COLUMNS", "300")

    def tiffin(*arguments: object) -> Done:
        monkeypatch.setattr("sys.argv", ["tiffin", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main(installed=False)
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, *capsys.readouterr())

    return tiffin


# -- counting replicas -----------------------------------------------------------------------------


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def test_a_complete_sample_is_counted_exactly() -> None:
    """Block 1 is on one node, 2 on two, 3 on three, 4 on four."""
    inventories = {1: [1, 2, 3, 4], 2: [2, 3, 4], 3: [3, 4], 4: [4]}
    samples = [Sample(n, [key(k) for k in keys], len(keys)) for n, keys in inventories.items()]
    holders = {key(k): {n for n, keys in inventories.items() if k in keys} for k in range(1, 5)}
    counted = count_replicas(samples, holders, blocks=10)
    assert counted == {"blocks": {"1": 1, "2": 1, "3+": 2}, "of": 10, "exact": True}


def test_a_sample_is_scaled_without_favouring_blocks_of_many_replicas() -> None:
    """3,000 blocks on one node and 1,000 on two, of which a tenth is sampled."""
    rng = random.Random(7)
    one, two = [key(n) for n in range(3000)], [key(n) for n in range(3000, 4000)]
    holders: dict[bytes, set[int]] = {k: {rng.choice([1, 2])} for k in one}
    holders.update({k: {1, 2} for k in two})
    samples = []
    for node in (1, 2):
        inventory = [k for k, nodes in holders.items() if node in nodes]
        samples.append(Sample(node, rng.sample(inventory, 250), len(inventory)))
    counted = count_replicas(samples, holders, blocks=sum(s.blocks for s in samples))
    assert not counted["exact"]
    assert counted["blocks"]["1"] == pytest.approx(3000, rel=0.1)
    assert counted["blocks"]["2"] == pytest.approx(1000, rel=0.2)
    assert counted["blocks"]["3+"] == 0


def test_nodes_that_were_not_sampled_are_counted_as_like_the_others() -> None:
    sample = Sample(1, [key(1), key(2)], 2)
    counted = count_replicas([sample], {key(1): {1}, key(2): {1, 2}}, blocks=4)
    assert counted == {"blocks": {"1": 2, "2": 1, "3+": 0}, "of": 2, "exact": False}


def test_a_directory_that_has_forgotten_a_block_does_not_make_it_vanish() -> None:
    counted = count_replicas([Sample(1, [key(1)], 1)], {}, blocks=1)
    assert counted["blocks"] == {"1": 1, "2": 0, "3+": 0}
    assert count_replicas([], {}, blocks=0)["of"] == 0


# -- nodes without a directory ---------------------------------------------------------------------


class FixedPool:
    """Nodes in this process behind their network ports, and their `tiffin://` URL."""

    def __init__(self, stack: ExitStack, names: list[str]) -> None:
        self.nodes, self.services = [], []
        for name in names:
            node = Node(NodeOptions(8 * EXTENT, prefault=False), name=name)
            stack.callback(node.close)
            service = RemoteService(node, ("127.0.0.1", 0), Credentials())
            stack.callback(service.close)
            self.nodes.append(node)
            self.services.append(service)
        self.addresses = tuple(service.address for service in self.services)
        self.url = "tiffin://" + ",".join(f"{host}:{port}" for host, port in self.addresses)

    def put(self, index: int, prefix: Prefix) -> None:
        client = Client.attach(self.nodes[index])
        with client:
            client.put(prefix, payloads_of(prefix))

    def look(self) -> dict[str, Any]:
        with closing(Overview(Pool(self.addresses))) as overview:
            return overview.look()


@pytest.fixture
def fixed() -> Iterator[Callable[..., FixedPool]]:
    with ExitStack() as stack:
        yield lambda *names: FixedPool(stack, list(names))


def test_all_nodes_of_a_list_are_looked_at(fixed: Callable[..., FixedPool]) -> None:
    pool = fixed("a", "b")
    shared, own = fresh_prefix(2), fresh_prefix(3)
    for index in (0, 1):
        pool.put(index, shared)
    pool.put(1, own)
    found = pool.look()
    assert found["directory"] is None
    assert [(n["name"], n["state"], n["blocks"]) for n in found["nodes"]] == [
        ("a", "up", 2),
        ("b", "up", 5),
    ]
    for node in found["nodes"]:
        dram = node["tiers"]["dram"]
        assert dram["used_bytes"] + dram["free_bytes"] == dram["capacity_bytes"] == 8 * EXTENT
    assert found["replicas"] == {"blocks": {"1": 3, "2": 2, "3+": 0}, "of": 7, "exact": True}
    json.dumps(found)


def test_an_unreachable_node_does_not_hide_the_others(
    fixed: Callable[..., FixedPool], run: Run
) -> None:
    pool = fixed("a", "b")
    pool.put(0, fresh_prefix(1))
    pool.services[1].close()
    shown = run("status", pool.url, "--json")
    assert shown.returncode == 1, shown.stderr
    found = json.loads(shown.stdout)
    states = {node["state"]: node for node in found["nodes"]}
    assert set(states) == {"up", "unreachable"}
    assert states["up"]["name"] == "a"
    assert states["unreachable"]["error"]
    assert found["replicas"]["blocks"]["1"] == 1
    table = run("status", pool.url)
    assert table.returncode == 1
    assert "1 unreachable" in table.stdout
    assert "1 on one node" in table.stdout


def test_the_count_is_not_made_anew_at_every_look(fixed: Callable[..., FixedPool]) -> None:
    pool = fixed("a")
    with closing(Overview(Pool(pool.addresses))) as overview:
        assert overview.look()["replicas"]["of"] == 0
        pool.put(0, fresh_prefix(2))
        again = overview.look()
        assert again["nodes"][0]["blocks"] == 2
        assert again["replicas"]["of"] == 0
        assert "replicas" not in overview.look(replicas=False)


@pytest.mark.parametrize("arguments", [["embedded:"], ["unix:/x", "--socket", "/y"], ["nonsense"]])
def test_status_of_what_has_none(run: Run, arguments: list[str]) -> None:
    shown = run("status", *arguments)
    assert shown.returncode == 2
    assert len(shown.stderr.strip().splitlines()) == 1, shown.stderr


def test_nodes_of_one_name_are_named() -> None:
    nodes = [
        {"name": "a", "address": "h:1"},
        {"name": "a", "address": "h:1"},  # the last run of the same node
        {"name": "b", "address": "h:2"},
        {"name": "b", "address": "h:3"},
    ]
    assert clashes(nodes) == ["several nodes are called b, at h:2, h:3: give each its own --name"]


def test_a_stopped_node_costs_a_command_two_seconds_and_not_ten(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It accepts and never answers, as a node does that SIGSTOP stopped."""
    assert NODE_S <= 3
    monkeypatch.setattr("tiffin.kvstore.cli.status.NODE_S", 0.05)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        waited: list[float] = []
        receive = connection._received

        def timed(sock: socket.socket) -> Any:
            waited.append(sock.gettimeout() or 0.0)
            return receive(sock)

        monkeypatch.setattr(connection, "_received", timed)
        shown = run("status", "--socket", tmp_path / "s")
    assert shown.returncode == 2
    assert "no node answers" in shown.stderr
    assert waited
    assert max(waited) <= 0.05 + OVERRUN_S


def test_what_is_watched_goes_on_after_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    looks = iter([{"n": 1}, {"n": 2}, NodeUnavailable("gone for now"), {"n": 3}])

    def look() -> dict[str, Any]:
        found = next(looks, None)
        if found is None:
            raise KeyboardInterrupt
        if isinstance(found, Exception):
            raise found
        return found

    found = show(look, lambda found: Text(f"{found['n']}"), as_json=False, watch=0.001)
    assert found == {"n": 3}
    capsys.readouterr()
    looks = iter([{"n": 1}, {"n": 2}])
    show(look, lambda found: Text(""), as_json=True, watch=0.001)
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line) for line in lines] == [{"n": 1}, {"n": 2}]


# -- tables ----------------------------------------------------------------------------------------


def row(name: str, **changes: Any) -> dict[str, Any]:
    tier = {"capacity_bytes": 1 << 30, "used_bytes": 1 << 20, "free_bytes": 0}
    plain = {"number": 1, "name": name, "address": "10.0.0.1:7700", "state": "up", "error": None}
    numbers = {"uptime_s": 7200.0, "blocks": 3, "lag_events": 0, "tiers": {"dram": tier}}
    return {**plain, **numbers, **changes}


def drawn(found: dict[str, Any]) -> str:
    console = Console(width=250)
    with console.capture() as capture:
        console.print(pool_tables({"pool": "p", "directory": None, "links": {}, **found}))
    return capture.get()


def test_a_few_nodes_get_a_matrix_of_their_links() -> None:
    links = {"a": {"b": [1.5 * 2**30, 0.0002]}, "b": {"a": [2.0**20, 0.01]}}
    text = drawn({"nodes": [row("a"), row("b", state="draining")], "links": links})
    assert "1.5 GiB/s, 0.20 ms" in text
    assert "1 MiB/s, 10.00 ms" in text
    assert "draining" in text
    assert "2.0 h" in text


def test_many_nodes_get_the_slowest_links() -> None:
    names = [f"n{i}" for i in range(MATRIX_NODES_MAX + 1)]
    links = {a: {b: [1e9 + i, 0.001] for b in names if b != a} for i, a in enumerate(names)}
    links["n3"]["n5"] = [1e3, 0.5]
    text = drawn({"nodes": [row(name) for name in names], "links": links})
    lines = [line for line in text.splitlines() if "KiB/s" in line or "B/s" in line]
    assert "n3" in lines[0]
    assert "n5" in lines[0]


def test_names_from_the_directory_are_only_text() -> None:
    """Any writer of the directory chooses them, so markup in them is not interpreted."""
    evil = "[/] [bold]x"
    links = {evil: {evil: [1e9, 0.1]}}
    text = drawn({"nodes": [row(evil, state="unreachable", error="[red")], "links": links})
    assert text.count(evil) >= 2
    assert "[red" in text


def test_a_down_directory_and_a_sick_tier_are_said() -> None:
    directory = {"kind": "cluster", "address": "r:1", "healthy": False, "down": ["r:1: refused"]}
    tier = {"capacity_bytes": 4096, "used_bytes": 0, "healthy": False, "writable": False}
    found = {"nodes": [row("a", tiers={"nvme": tier})], "directory": directory}
    text = drawn(
        {**found, "replicas": {"blocks": {"1": 9, "2": 0, "3+": 1}, "of": 5, "exact": False}}
    )
    assert "refused" in text
    assert "takes no more" in text
    assert "about (a sample of 5) 9 on one node" in text


# -- a pool with its directory ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def local() -> Iterator[LocalPool]:
    options = LocalPoolOptions(nodes=2, redis=True, dram="2MiB", more="--no-prefault")
    with LocalPool(options) as pool:
        yield pool


@pytest.mark.slow
def test_a_pool_with_a_directory_is_shown_drained_and_undrained(local: LocalPool, run: Run) -> None:
    prefix = fresh_prefix(4)
    with Client.open(local.url_at_home(local.socket(0))) as client:
        client.put(prefix, payloads_of(prefix))
        wait_until(lambda: published(local, prefix) == 4, "the directory knows")
        # The node gets the directory's answer a moment after the directory has the locations.
        wait_until(lambda: overview(run, local)["nodes"][0]["lag_events"] == 0, "it lags no more")
        shown = run("status", local.url, "--json")
        assert shown.returncode == 0, shown.stderr
        found = json.loads(shown.stdout)
        assert found["directory"]["healthy"]
        assert [node["name"] for node in found["nodes"]] == ["node-1", "node-2"]
        assert found["replicas"]["blocks"] == {"1": 4, "2": 0, "3+": 0}

        drained = run("drain", local.url, "node-1", "--json")
        assert drained.returncode == 0, drained.stderr
        outcome = json.loads(drained.stdout)
        assert (outcome["node"], outcome["elsewhere"], outcome["left"]) == ("node-1", 4, 0)
        wait_until(
            lambda: states(run, local)["node-1"] == "draining", "the directory says so", 15.0
        )
        wait_until(lambda: twice(run, local) == 4, "node-2 has them too", 15.0)
        # A node publishes its measurements with its next heartbeat.
        wait_until(lambda: linked(run, local), "the link that the blocks took is shown", 15.0)

        assert "takes new blocks again" in run("drain", local.url, "node-1", "--undo").stdout
        client.remove(prefix)


def published(local: LocalPool, prefix: Prefix) -> int:
    target = parse_url(local.url)
    assert isinstance(target, Pool)
    token = read_token(Path(target.credentials["token_file"]))
    with closing(open_directory(target.directory, token=token)) as directory:
        return sum(bool(nodes) for nodes in directory.locate(prefix.keys))


def overview(run: Run, local: LocalPool) -> dict[str, Any]:
    """What `tiffin status --json` says."""
    found: dict[str, Any] = json.loads(run("status", local.url, "--json").stdout)
    return found


def twice(run: Run, local: LocalPool) -> int:
    """How many blocks two nodes have."""
    return int(overview(run, local)["replicas"]["blocks"]["2"])


def linked(run: Run, local: LocalPool) -> bool:
    """Whether either node has measured its way to the other."""
    links = overview(run, local)["links"]
    return "node-2" in links.get("node-1", {}) or "node-1" in links.get("node-2", {})


def states(run: Run, local: LocalPool) -> dict[str, str]:
    shown = run("status", local.url, "--json", "--no-replicas")
    return {node["name"]: node["state"] for node in json.loads(shown.stdout)["nodes"]}


def test_passwords_and_tokens_are_not_shown(local: LocalPool, run: Run) -> None:
    token = read_token(local.folder / "token").decode()
    password = (local.folder / "redis-password").read_text().strip()
    for arguments in (["status", local.url], ["status", local.url, "--json"]):
        shown = run(*arguments)
        assert token not in shown.stdout + shown.stderr
        assert password not in shown.stdout + shown.stderr


def test_draining_refuses_what_it_can_not_find(local: LocalPool, run: Run) -> None:
    done = run("drain", local.url, "node-3")
    assert done.returncode == 2
    assert "there are: node-1, node-2" in done.stderr
    assert run("drain", f"unix:{local.socket()}", "node-1").returncode == 2


def test_a_directory_that_is_down_is_an_error_in_one_line(run: Run) -> None:
    done = run("status", "redis://127.0.0.1:1")
    assert done.returncode == 2
    assert done.stderr.startswith("DirectoryUnavailable")
    assert len(done.stderr.strip().splitlines()) == 1


def test_nodes_are_found_by_name_or_number() -> None:
    def record(name: str) -> NodeRecord:
        return NodeRecord(name, "h:1", "", "", 0, 0)

    nodes = {7: record("a"), 8: record("b"), 9: record("b"), 10: record("7")}
    assert find_node(nodes, "a") == 7
    assert find_node(nodes, "9") == 9
    assert find_node(nodes, "7") == 10, "a name goes before a number"
    with pytest.raises(InvalidInput, match="8, 9"):
        find_node(nodes, "b")
    with pytest.raises(InvalidInput, match="there are: 7, a, b, b"):
        find_node(nodes, "c")


# -- tokens ----------------------------------------------------------------------------------------


def test_a_token_is_private_random_and_never_overwritten(run: Run, tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    assert run("token", one).returncode == 0
    assert one.stat().st_mode & 0o777 == 0o600
    make_secret_file(two)
    assert read_token(one) != read_token(two)
    assert len(read_token(one)) == 64
    before = one.read_bytes()
    refused = run("token", one)
    assert refused.returncode == 2
    assert "is not overwritten" in refused.stderr
    assert one.read_bytes() == before


@pytest.mark.slow
def test_a_token_is_not_written_through_a_link_or_into_nowhere(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for path in (tmp_path / "link", tmp_path / "no" / "folder"):
        with pytest.raises(InvalidInput):
            make_secret_file(path)
    assert not (tmp_path / "target").exists()
