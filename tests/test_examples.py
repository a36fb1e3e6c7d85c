"""Every command of the pages and of `--help` is understood, and runs as it stands.

The servers that a command needs are started for it: a pool, a conductor, an instance. Commands
that can't be run here are named in `ELSEWHERE`, with the reason.
"""

from __future__ import annotations

import json
import re
import shlex
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import typer
from certsupport import make_authority
from examplesupport import DOCS, FENCE, PAGES, Stage, examples, leaves, parse, program

from tiffin.conductor.client import ConductorClient
from tiffin.conductor.records import InstanceSpec, Load, Rejection, Request, Role
from tiffin.kvstore import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from examplesupport import Example

ALL = examples()
TIFFINS = [one for one in ALL if one.command.startswith("tiffin ")]
NODE = "tiffin node --dram 1GiB --nvme /var/tmp/tiffin-tour:1GiB"
VLLM_METRICS = Path(__file__).parent / "conductor/discovery/vllm_0_32_0_metrics.txt"
MODEL, PROFILE = "llama-3-8b", "llama-3.1-8b.h100.tp1.vllm"

# Commands that are not run, by how they begin, and why.
ELSEWHERE = {
    "make ": "what CI runs",
    "docker ": "it takes a docker, and a registry",
    "kubectl ": "it takes a cluster; tests/test_deployment.py checks the manifests",
    "kind ": "it takes a docker",
    "pip ": "it installs; tests/test_wheel.py installs the wheel with each extra",
    "python3 -m venv ": "the same",
    ". .venv/": "the same",
    "tiffin demo": "minutes; tests/bench/test_demo_processes.py",
    "tiffin bench": "it measures; tests/bench runs the same, small",
    "tiffin trace": "it takes the file of a trace; tests/bench/traces has its own",
    "tiffin simulate": "the same; tests/bench/sim",
    "tiffin plan": "the same; tests/bench/planning",
    "tiffin reproduce": "it takes minutes; tests/bench/reproduce runs the parts, small",
    "tiffin whatif": "it takes a recording; tests/bench/whatif makes its own",
    "tiffin profile": "it measures an engine; tests/conductor/discovery/test_profile.py has one",
}


@contextmanager
def on_stage() -> Iterator[Stage]:
    """Its name is short: unix sockets have names of 107 bytes at most."""
    with tempfile.TemporaryDirectory(prefix="tiffin-e-") as folder:
        stage = Stage(Path(folder))
        try:
            yield stage
        finally:
            stage.close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    """For one example."""
    with on_stage() as stage:
        yield stage


@pytest.fixture(scope="module")
def with_node() -> Iterator[Stage]:
    """With a node on this machine, shared by all commands that ask a node."""
    with on_stage() as stage, stage.running(NODE, r"at unix:"):
        yield stage


@pytest.fixture(scope="module")
def with_conductor() -> Iterator[Stage]:
    """With a conductor, shared by all commands that ask a conductor."""
    with on_stage() as stage, _conducting(stage):
        yield stage


# -- what each takes -------------------------------------------------------------------------------


def _node(stage: Stage, command: str) -> None:
    stage.files()
    with stage.running(command, r"serves .* at unix:"):
        pass


def _inspect(stage: Stage, command: str) -> None:
    """The slab of a node that has stopped."""
    folder = command.split()[2]
    with stage.running(f"tiffin node --dram 1GiB --nvme {folder}:1GiB", r"at unix:"):
        pass
    printed = stage.run(command)
    assert "--json" not in command or json.loads(printed)["blocks"] == []


def _status(stage: Stage, command: str) -> None:
    """Its table; with an option that repeats it, until it has printed that."""
    command, _, filtered = command.partition(" | jq .")
    if "--watch" in command:
        with stage.running(command, "tier|node", terminal=True):
            return
    printed = stage.run(command)
    assert not filtered or filtered in json.loads(printed)


def _status_of_a_pool(stage: Stage, command: str) -> None:
    with _pool(stage, "node-1"):
        _status(stage, command)


def _of_what_is_up(stage: Stage, command: str) -> None:
    """With the URL that `tiffin up` prints."""
    _up(stage, "tiffin up --nodes 2 --redis", command.removesuffix(' "redis://..."'))


@contextmanager
def _pool(stage: Stage, name: str) -> Iterator[None]:
    """A node of the pool at redis://10.0.0.1, with its token."""
    stage.files()
    node = (
        "tiffin node --dram 1GiB --listen 10.0.0.5:7700 --directory redis://10.0.0.1 "
        f"--token-file /etc/tiffin/token --name {name}"
    )
    with stage.running(node, r"registered as number|at unix:.*"):
        yield


def _drain(stage: Stage, command: str) -> None:
    with _pool(stage, command.split()[3]):
        stage.run(command)


def _token(stage: Stage, command: str) -> None:
    stage.run(command)
    assert (stage.folder / command.split()[2].lstrip("/")).stat().st_mode & 0o777 == 0o600


def _up(stage: Stage, command: str, then: str = "tiffin status") -> None:
    """What it starts answers a command that gets its URL."""
    stage.files()
    more = "" if "--dram" in command else "--dram 1GiB"
    with stage.running(command, r"stop +Ctrl-C", more=more) as printed:
        (asked,) = re.findall(r"status +tiffin status (.*)", stage.keep(printed))
        stage.run(f"{then} {asked}")


def _conductor(stage: Stage, command: str) -> None:
    stage.files()
    more = "" if "--listen" in command else "--listen 127.0.0.1:7800"
    with stage.running(command, "the conductor answers at", more=more):
        at = f"http://127.0.0.1:{stage.port('7800')}"
        assert httpx.get(f"{at}/livez", trust_env=False).status_code == 200


@contextmanager
def _conducting(stage: Stage, *, options: str = "", scheme: str = "http") -> Iterator[None]:
    """A conductor with an instance, and requests that it has decided."""
    listen = f"tiffin conductor --listen 127.0.0.1:7800 {options}"
    ca = stage.folder / "ca.crt" if scheme == "https" else None
    with stage.running(listen, "the conductor answers at"):
        url = f"{scheme}://127.0.0.1:{stage.port('7800')}"
        with ConductorClient(url, tls_ca=ca) as client:
            _register(client)
            for name, tenant in (("chatcmpl-7f3a", ""), ("chat-1", "acme")):
                placed = client.schedule(Request(name, MODEL, 4096, tenant=tenant))
                assert not isinstance(placed, Rejection)
        yield


def _register(client: ConductorClient) -> None:
    """An instance that is there still once a busy machine has started the command."""
    client.patch({"core": {"heartbeat_timeout_s": 600.0}})
    client.register(InstanceSpec("i1", MODEL, Role.MIXED, PROFILE), Load())


def _asks_conductor(stage: Stage, command: str) -> None:
    """`tiffin conductor status`, `why` and `policy`, of one that is at its own port."""
    with ConductorClient(f"http://127.0.0.1:{stage.port('7800')}") as client:
        _register(client)
    asked = f"{command} --url http://127.0.0.1:7800"
    if "--watch" in command:
        with stage.running(asked, "1 instances", terminal=True):
            return
    printed = stage.run(asked)
    for change in command.split()[3:] if " policy" in command else ():
        name, _, value = change.partition("=")
        found: Any = json.loads(printed)
        for part in name.split("."):
            found = found[part]
        assert str(found) in (value, f"{value}.0")


def _asks_over_https(stage: Stage, command: str) -> None:
    cert, key = make_authority(stage.folder).certificate("conductor")
    stage.environment["SSL_CERT_FILE"] = str(stage.folder / "ca.crt")
    with _conducting(stage, options=f"--tls-cert {cert} --tls-key {key}", scheme="https"):
        stage.run(command)


def _gateway(stage: Stage, command: str) -> None:
    """A gateway in front of a conductor that admits it."""
    stage.files()
    _tokenizer(stage.folder / "models" / "llama-3-8b")
    options = "--token-file /etc/tiffin/conductor-tokens" if "--conductor" in command else ""
    more = (
        "" if "--listen" in command else "--listen 127.0.0.1:7900 --conductor http://127.0.0.1:7800"
    )
    # gateway.md has it in the folder.
    (stage.folder / "gateway.toml").write_bytes(
        (stage.folder / "etc/tiffin/gateway.toml").read_bytes()
    )
    listen = f"tiffin conductor --listen 127.0.0.1:7800 {options}"
    with (
        stage.running(listen, "the conductor answers at"),
        stage.running(command, "the gateway answers at", more=more),
    ):
        at = f"http://127.0.0.1:{stage.port('7900')}"
        assert httpx.get(f"{at}/livez", trust_env=False).status_code == 200
        missing = httpx.get(
            f"{at}/readyz",
            trust_env=False,
            headers={"authorization": "Bearer alice-0123456789abcdef"},
        ).json()["reasons"]
        assert missing == ["no instance is known"], "the conductor has answered"


def _tokenizer(folder: Path) -> None:
    """A tokenizer of two words, in Hugging Face's layout."""
    tokenizers = pytest.importorskip("tokenizers")
    from tokenizers import models

    folder.mkdir(parents=True, exist_ok=True)
    words = {"<unk>": 0, "lunch": 1}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.save(str(folder / "tokenizer.json"))


def _add(stage: Stage, command: str) -> None:
    """What a vLLM answers about itself, as files, to a conductor that then has its instance."""
    stage.file("metrics", VLLM_METRICS.read_text(encoding="utf-8"))
    stage.file("v1/models", json.dumps({"data": [{"id": MODEL}]}))
    engine = f"python -m http.server --bind 127.0.0.1 {stage.port('8000')}"
    with (
        stage.running("tiffin conductor --listen 127.0.0.1:7800", "the conductor answers at"),
        stage.running(engine, "Serving HTTP"),
        ConductorClient(f"http://127.0.0.1:{stage.port('7800')}") as client,
    ):
        stage.run(f"{command} --url http://127.0.0.1:7800")
        (one,) = client.instances()
        assert (one.model, one.status, one.fetches) == (MODEL, "ready", False)
        assert ("kv_events" in one.labels) == ("--kv-events-port" in command)


def _vllm_flags(stage: Stage, command: str) -> None:
    """With a node at the socket that it names, and a model of the name."""
    stage.files()
    stage.file("models/llama-3-8b/config.json", json.dumps({"model_type": "llama"}))
    stage.file("models/llama-3-8b/model.safetensors", "weights")
    socket = "--socket /run/tiffin/node.sock" if "/run/tiffin" in command else ""
    with stage.running(f"tiffin node --dram 1GiB {socket}", r"at unix:"):
        assert "TiffinConnector" in stage.run(command)


def _timeit(stage: Stage, command: str) -> None:
    """Run it once: the time that it measures is not checked."""
    assert "loop" in stage.run(command.replace("-n 100 -r 20", "-n 1 -r 1"))


PLAYS: dict[str, Callable[[Stage, str], None]] = {
    "tiffin node": _node,
    "tiffin inspect": _inspect,
    'tiffin status "redis://10.0.0.1': _status_of_a_pool,
    "tiffin drain": _drain,
    "tiffin token": _token,
    "tiffin up": _up,
    "tiffin conductor": _conductor,
    "tiffin conductor add": _add,
    "tiffin conductor status --url https://": _asks_over_https,
    "tiffin gateway": _gateway,
    'tiffin status "redis://..."': _of_what_is_up,
    'tiffin vllm-flags "redis://..."': _of_what_is_up,
    "python -m timeit": _timeit,
    "tiffin vllm-flags": _vllm_flags,
}


# Commands that only ask a server: they share one.
ASKING = (
    "tiffin status",
    "tiffin conductor status",
    "tiffin conductor why",
    "tiffin conductor policy",
)


# -- all of them -----------------------------------------------------------------------------------


@pytest.mark.parametrize("example", TIFFINS, ids=str)
def test_it_is_understood(example: Example) -> None:
    parse(shlex.split(example.command.partition(" | ")[0]))


def test_options_that_are_named_in_passing_exist() -> None:
    """Options inside prose, such as `tiffin node --socket /path/to/socket`."""
    commands = dict(leaves(program()))
    found = 0
    for page in PAGES:
        prose = FENCE.sub("", page.read_text(encoding="utf-8"))
        for span in re.findall(r"`(tiffin [^`]*--[^`]*)`", prose):
            words = span.split()
            name = next(
                " ".join(words[:end]) for end in (3, 2) if " ".join(words[:end]) in commands
            )
            known = {opt for p in commands[name].params for opt in (*p.opts, *p.secondary_opts)}
            assert {word for word in words if word.startswith("--")} <= known, (page.name, span)
            found += 1
    assert found > 5


def test_every_example_is_run_or_it_is_said_why_not() -> None:
    assert [f"{one.where}: {one}" for one, how in RUN if how is None] == []


def _begins(example: Example, starts: Iterable[str]) -> str | None:
    """The longest of `starts` with which the command begins, or None."""
    fitting = [start for start in starts if example.command.startswith(start)]
    return max(fitting, key=len, default=None)


RUN = [(one, _begins(one, [*PLAYS, *ASKING, *ELSEWHERE])) for one in ALL]


def of(kind: Iterable[str]) -> Any:
    """The examples that this kind of test runs."""
    return pytest.mark.parametrize("example", [one for one, how in RUN if how in kind], ids=str)


@pytest.mark.slow
@of(PLAYS)
def test_it_runs(example: Example, stage: Stage) -> None:
    how = _begins(example, PLAYS)
    assert how is not None
    PLAYS[how](stage, example.command)


@pytest.mark.slow
def test_a_pool_of_several_machines_starts_as_its_guide_says(stage: Stage) -> None:
    """operations.md from its first step to a look at the pool, with nothing but what it names."""
    text = (DOCS / "operations.md").read_text(encoding="utf-8")
    guide = text.partition("## Starting a pool of several machines")[2].partition("\n## ")[0]
    for command in re.findall(r"`(tiffin token [^`]+)`", guide):
        _token(stage, command)
    client_url = stage.here(*re.findall(r"Clients open `([^`]+)`", guide))
    del stage.environment["TIFFIN_REDIS_PASSWORD"]
    stage.files()
    _tokenizer(stage.folder / "models" / "llama-3-8b")
    commands = [line for code in re.findall(r"```sh\n(.*?)```", guide, re.DOTALL)
                for line in code.splitlines()]  # fmt: skip
    assert [one.split()[1] for one in commands] == ["node", "conductor", "gateway"]
    says = (r"registered as number", "the conductor answers at", "the gateway answers at")
    (look,) = re.findall(r'^(tiffin status "redis://.*) --watch', text, re.MULTILINE)
    with ExitStack() as servers:
        for command, ready in zip(commands, says, strict=True):
            servers.enter_context(stage.running(command, ready))
        (node,) = json.loads(stage.run(f"{look} --json"))["nodes"]
        assert node["state"] == "up"
        with Client.open(client_url) as client:
            assert client.statistics()["home"] is not None


@of(["tiffin bench"])
def test_rows_of_benchmarks_are_ones(example: Example) -> None:
    """The other benchmarks are run by their own tests, at a small size."""
    *_, name = example.command.partition(" --")[0].split()
    if name in ("kernels", "hbm"):
        pytest.importorskip("torch")
    with pytest.raises(typer.BadParameter) as refused:
        program().main(["bench", name, "--row", "nosuch"], standalone_mode=False)
    rows = refused.value.message.partition("there are: ")[2].split(", ")
    assert len(rows) >= 3
    assert set(re.findall(r"--row (\S+)", example.command)) <= set(rows)


@pytest.mark.slow
@of(["tiffin status"])
def test_it_asks_a_node(example: Example, with_node: Stage) -> None:
    _status(with_node, example.command)


@pytest.mark.slow
@of([start for start in ASKING if "conductor" in start])
def test_it_asks_a_conductor(example: Example, with_conductor: Stage) -> None:
    _asks_conductor(with_conductor, example.command)
