"""A wrong token, and a wrong name of a pool: nothing is served, and everybody is told why."""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import EXTENT, fresh_prefix, wait_until

from tiffin.conductor.service.feeds import Feeding
from tiffin.kvstore import Client
from tiffin.kvstore.cli import main
from tiffin.kvstore.cli.daemon import DaemonOptions, in_a_pool
from tiffin.kvstore.cli.local.token_file import make_secret_file
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.node.node import Node, NodeOptions

if TYPE_CHECKING:
    from attacks.tokenpool import TokenPool

OTHER = Credentials(b"another-token-of-32-bytes-at-least")
WHY = "none of the 2 nodes registered in this pool has our token"


@pytest.fixture
def wrong(pool: TokenPool, tmp_path: Path) -> str:
    """The pool's URL with the token of another."""
    return pool.url.replace(str(pool.token_file), str(make_secret_file(tmp_path / "other.token")))


def status(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[object, dict[str, Any], str]:
    """The exit code of `tiffin status URL`, its JSON, and what it shows people."""
    monkeypatch.setenv("COLUMNS", "300")
    codes, said = [], []
    for more in (["--json"], []):
        monkeypatch.setattr("sys.argv", ["tiffin", "status", url, *more])
        with pytest.raises(SystemExit) as ended:
            main(installed=False)
        codes.append(ended.value.code)
        said.append(capsys.readouterr().out)
    assert codes[0] == codes[1]
    return codes[0], json.loads(said[0]), said[1]


def test_status_says_that_the_token_is_wrong(
    wrong: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, found, shown = status(wrong, capsys, monkeypatch)
    assert code == 1
    assert found["nodes"] == []
    assert found["reasons"][0].startswith(WHY)
    assert WHY in shown


def test_status_of_a_wrong_pool_names_the_pools_that_there_are(
    pool: TokenPool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert status(pool.url, capsys, monkeypatch)[0] in (0, None)
    url = pool.url.replace(f"pool={pool.name}", "pool=typo")
    code, found, shown = status(url, capsys, monkeypatch)
    assert code == 1
    assert "no node is registered in pool typo; the directory has:" in found["reasons"][0]
    assert pool.name in shown


def test_a_client_misses_and_its_statistics_and_log_say_why(
    pool: TokenPool, wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    prefix = fresh_prefix(1)
    with closing(pool.open()) as client:
        pool.put(client, prefix)
        assert client.statistics()["directory"]["reason"] == ""
    with caplog.at_level(logging.WARNING), closing(Client.open(wrong)) as client:
        for _ in range(3):
            with client.get(prefix) as blocks:
                assert not len(blocks)
        assert client.statistics()["directory"]["reason"].startswith(WHY)
    said = [line for line in caplog.records if "stamp of our token" in line.getMessage()]
    assert len(said) == 1


def test_a_client_and_a_conductor_of_a_wrong_pool_say_so(pool: TokenPool) -> None:
    url = pool.url.replace(f"pool={pool.name}", "pool=typo")
    why = "no node is registered in pool 'typo': is that its name?"
    with closing(Client.open(url)) as client, client.get(fresh_prefix(1)) as blocks:
        assert not len(blocks)
        assert client.statistics()["directory"]["reason"] == why

    async def scenario() -> None:
        feeding = Feeding(lambda update: None, asyncio.get_running_loop())
        assert feeding.notes() == []
        feeding.follow_pool(pool.directory, "typo", pool.credentials)
        async with asyncio.timeout(20):
            while feeding.notes() != [why]:  # noqa: ASYNC110 - a thread's state
                await asyncio.sleep(0.01)
        assert "'typo'" not in feeding.missing()  # a pool may be empty: requests can be placed
        await feeding.close()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("found", "code"),
    [
        ({"directory": {"reason": "none has our token"}}, 0),
        ({"nodes": [], "reasons": ["none has our token"]}, 1),
    ],
)
def test_a_node_that_answers_passes_its_probe(
    found: dict[str, Any], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is wrong with its place in the pool: a restart would not mend that."""
    monkeypatch.setattr("tiffin.kvstore.cli.status._looking", lambda *_: nullcontext((None, None)))
    monkeypatch.setattr("tiffin.kvstore.cli.status.show", lambda *_: found)
    monkeypatch.setattr("sys.argv", ["tiffin", "status", "--json"])
    with pytest.raises(SystemExit) as ended:
        main(installed=False)
    assert (ended.value.code or 0) == code


def test_a_node_with_another_token_says_so(pool: TokenPool) -> None:
    with ExitStack() as stack:
        node = Node(NodeOptions(8 * EXTENT, prefault=False), name="c")
        stack.callback(node.close)
        options = DaemonOptions(
            node.options,
            "c",
            Path("/nowhere/c"),
            listen=("127.0.0.1", 0),
            directory=pool.directory,
            pool=pool.name,
            credentials=OTHER,
        )
        stack.enter_context(in_a_pool(node, options, "127.0.0.1:1"))
        numbers = node.extra_numbers["directory"]
        wait_until(lambda: numbers()["reason"].startswith(WHY), "it says why")
    assert all(one.extra_numbers["directory"]()["reason"] == "" for one in pool.nodes.values())


def test_a_conductor_with_another_token_is_not_ready(pool: TokenPool) -> None:
    async def scenario() -> None:
        feeding = Feeding(lambda update: None, asyncio.get_running_loop())
        feeding.follow_pool(pool.directory, pool.name, OTHER)
        async with asyncio.timeout(20):
            while not feeding.missing().startswith(WHY):  # noqa: ASYNC110 - a thread's state
                await asyncio.sleep(0.01)
        assert "--pool-token-file" in feeding.missing()
        await feeding.close()

    asyncio.run(scenario())
