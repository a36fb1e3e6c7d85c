"""`tiffin vllm-flags`: what it prints, a shell reads back and the connector takes as it is."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from kvsupport import EXTENT, PoolOptions

from tiffin.kvstore.cli import main
from tiffin.kvstore.cli.local.token_file import make_secret_file
from tiffin.kvstore.connectors.vllm.settings import Settings, read
from tiffin.kvstore.credentials import Credentials
from tiffin.kvstore.node.node import Node, NodeOptions
from tiffin.kvstore.node.server.tcp_server import RemoteService

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvsupport import Daemon

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
}


@dataclass
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str

    def flags(self) -> dict[str, Any]:
        """The flags as a shell and then vLLM read them."""
        words = shlex.split(self.stdout.replace("\\\n", ""), comments=True)
        pairs = words[: len(words) - len(words) % 2]  # the last may be a flag without a value
        return {
            name: json.loads(value) for name, value in zip(pairs[::2], pairs[1::2], strict=True)
        }

    def settings(self) -> Settings:
        """Its settings, as the connector reads them."""
        return read(self.flags()["--kv-transfer-config"]["kv_connector_extra_config"])


Run = "Callable[..., Done]"


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Done]:
    """The command in this process."""
    monkeypatch.setenv("COLUMNS", "300")

    def vllm_flags(*arguments: object) -> Done:
        monkeypatch.setattr("sys.argv", ["tiffin", "vllm-flags", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main(installed=False)
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, *capsys.readouterr())

    return vllm_flags


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """A model's folder: its configuration, and a file as weights."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    return tmp_path


# -- what is printed -------------------------------------------------------------------------------


def test_the_connector_takes_what_is_printed(run: Run, tmp_path: Path) -> None:
    """Every option, with characters that a shell takes for its own."""
    secret = tmp_path / "it's $secret"
    make_secret_file(secret)
    done = run(
        "tiffin://10.0.0.5:7700?token_file=/etc/tiffin/token",
        *("--namespace", 'it\'s "acme" $HOME `x` \\', "--secret-file", secret, "--verify", "off"),
        *("--loading", "synchronous", "--page-tokens", 128, "--no-check"),
    )
    assert done.returncode == 0
    settings = done.settings()
    assert settings.url == "tiffin://10.0.0.5:7700?token_file=/etc/tiffin/token"
    assert settings.namespace == 'it\'s "acme" $HOME `x` \\'
    assert (settings.verify, settings.loading) == ("off", "synchronous")
    assert settings.secret() == secret.read_bytes().strip()
    assert done.flags()["--block-size"] == 128


def test_what_is_not_asked_for_keeps_its_default(run: Run) -> None:
    done = run("unix:/run/tiffin/node.sock", "--no-check")
    assert done.settings() == Settings(url="unix:/run/tiffin/node.sock")
    assert list(done.flags()) == ["--kv-transfer-config"]
    config = done.flags()["--kv-transfer-config"]
    assert config["kv_load_failure_policy"] == "recompute", "vLLM's default fails requests"


@pytest.mark.parametrize(
    ("role", "of_vllm"),
    [("both", "kv_both"), ("producer", "kv_producer"), ("consumer", "kv_consumer")],
)
def test_roles(run: Run, role: str, of_vllm: str) -> None:
    config = run("--role", role, "--no-check").flags()["--kv-transfer-config"]
    assert config["kv_role"] == of_vllm


def test_a_shell_hands_the_words_on(run: Run) -> None:
    """As the help shows it: several lines, and comments after them."""
    done = run(
        "--namespace", "it's", "--events", "h:1", "--instance", "i", "--gateway", "--no-check"
    )
    shown = subprocess.run(
        ["sh", "-c", 'eval "printf \'%s\\n\' $1"', "sh", done.stdout],
        capture_output=True, text=True, timeout=30, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert shown.pop() == "--enable-prompt-tokens-details"
    assert shown[0::2] == ["--kv-transfer-config", "--kv-events-config"]
    assert done.settings().engine == "i"
    assert [json.loads(text) for text in shown[1::2]] == list(done.flags().values())


def test_json_has_the_same(run: Run) -> None:
    options = ("--events", "10.0.0.21:5557", "--page-tokens", 64, "--gateway", "--no-check")
    printed = json.loads(run(*options, "--json").stdout)
    flags = run(*options).flags()
    assert printed["kv_transfer_config"] == flags["--kv-transfer-config"]
    assert printed["kv_events_config"] == flags["--kv-events-config"]
    assert printed["block_size"] == flags["--block-size"] == 64
    assert printed["enable_prompt_tokens_details"] is True
    assert printed["gateway"] == {"": {"keys": "conductor", "handoff": "pool"}}


def test_an_engine_elsewhere_finds_the_socket(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A relative path, and the default, which depends on the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert run("unix:a%20b.sock", "--no-check").settings().url == f"unix:{tmp_path}/a%20b.sock"
    assert run("--no-check").settings().url == f"unix:{tmp_path}/tiffin/node.sock"


# -- events and the gateway ------------------------------------------------------------------------


def test_vllm_listens_where_the_conductor_connects(run: Run) -> None:
    done = run("--events", "[fd00::1]:5557", "--instance", "vllm-0", "--no-check", "--json")
    printed = json.loads(done.stdout)
    assert printed["kv_events_config"] == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "topic": "vllm-0",
    }
    assert printed["labels"] == {
        "kv_events": "tcp://[fd00::1]:5557",
        "kv_events_replay": "tcp://[fd00::1]:5558",
        "kv_events_topic": "vllm-0",
    }


def test_the_conductor_takes_the_labels(run: Run) -> None:
    records = pytest.importorskip("tiffin.conductor.records")
    feeds = pytest.importorskip("tiffin.conductor.service.feeds")
    allowed = pytest.importorskip("tiffin.conductor.state.allowed_hosts")
    printed = run("--events", "10.0.0.21:5557", "--instance", "i", "--no-check", "--json").stdout
    labels = json.loads(printed)["labels"]
    assert set(labels) == {allowed.EVENTS_LABEL, allowed.REPLAY_LABEL, feeds.TOPIC_LABEL}
    spec = records.InstanceSpec("i", "m", records.Role.MIXED, "p", labels=labels)
    assert dict(spec.labels) == labels


def test_the_gateway_takes_its_lines(run: Run, llama: Path) -> None:
    config = pytest.importorskip("tiffin.conductor.gateway.config")
    for options, name in (("--model", llama), str(llama)), ((), "of another name"):
        shown = run(*options, "--gateway", "--no-check").stdout
        lines = [line[4:] for line in shown.splitlines() if line.startswith("#   ")]
        file = llama / "gateway.toml"
        file.write_text("\n".join(lines))
        model = config.read_config(file).model(name)
        assert (model.keys, model.handoff) == ("conductor", "pool")


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("redis://:hunter2@10.0.0.1",), "password_file=PATH"),
        (("redis://10.0.0.1?password=hunter2",), "password_file=PATH"),
        (("tiffin://10.0.0.5:7700?token=hunter2",), "token_file=PATH"),
        (("embedded:?dram=1GiB",), "tiffin node"),
        (("http://10.0.0.1",), "not a Tiffin URL"),
        (("--role", "prefill"), "both, producer, consumer"),
        (("--page-tokens", "48"), "do not fill a block"),
        (("--page-tokens", "0"), "do not fill a block"),
        (("--verify", "never"), "verify"),
        (("--loading", "never"), "loading"),
        (("--secret-file", "/none"), "secret_file"),
        (("--instance", "i"), "--events"),
        (("--events", "5557"), "HOST:PORT"),
        (("--events", "h:65535"), "port"),
        (("--events", "h:1", "--instance", "a\nb"), "printed"),
        (("--model", "/none"), "/none/config.json"),
    ],
)
def test_what_the_connector_would_refuse(run: Run, arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments, "--no-check")
    assert done.returncode == 2
    assert says in done.stderr
    assert done.stdout == ""
    assert "hunter2" not in done.stderr


def test_a_model_without_weights(run: Run, llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    done = run("--model", llama, "--no-check")
    assert done.returncode == 2
    assert "model_fingerprint" in done.stderr


def test_a_model_that_the_connector_refuses(run: Run, llama: Path) -> None:
    (llama / "config.json").write_text(json.dumps({**LLAMA, "kv_lora_rank": 512}))
    done = run("--model", llama, "--no-check")
    assert done.returncode == 2
    assert "kv_lora_rank" in done.stderr


# -- the pool --------------------------------------------------------------------------------------


def test_a_node_tells_what_it_has_free(
    run: Run, llama: Path, shared_daemon: Callable[[PoolOptions], Daemon]
) -> None:
    daemon = shared_daemon(PoolOptions())
    done = run(daemon.url, "--model", llama)
    assert done.returncode == 0
    assert done.settings().url == daemon.url
    assert "of DRAM free, of 128 KiB, which hold 0 tokens of this model" in done.stderr


def test_the_nodes_of_a_pool_tell_what_they_have_free(run: Run) -> None:
    with (
        closing(Node(NodeOptions(8 * EXTENT, prefault=False), name="rack2-node7")) as node,
        closing(RemoteService(node, ("127.0.0.1", 0), Credentials())) as service,
    ):
        host, port = service.address
        done = run(f"tiffin://{host}:{port}")
    assert done.returncode == 0
    assert "rack2-node7: 64 KiB of DRAM free, of 64 KiB" in done.stderr


@pytest.mark.parametrize("url", ["unix:/none/node.sock", "tiffin://127.0.0.1:1"])
def test_a_pool_that_does_not_answer(run: Run, url: str) -> None:
    done = run(url)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "the pool does not answer" in done.stderr
    assert run(url, "--no-check").returncode == 0


def test_neither_torch_nor_vllm_is_imported() -> None:
    code = (
        "import sys\n"
        "import tiffin.kvstore.cli.vllm_flags, tiffin.kvstore.connectors.vllm.model.compatibility\n"
        "assert not {'torch', 'vllm', 'transformers'} & set(sys.modules)"
    )
    paths = os.pathsep.join(filter(None, sys.path))
    subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": paths},
        timeout=60,
        check=True,
    )
