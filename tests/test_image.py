"""The image in docs/deploy, and Compose: that a build, a start and a shell accept them.

Nothing here needs containers. The scripts that start Redis are run by `sh`, as a container would.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import time
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from deploysupport import (
    COMPOSE,
    DEPLOY,
    FLUSH_S,
    NODE_BYTES,
    ROOT,
    check,
    compose,
    compose_nodes,
    memory_bytes,
    nodes,
    option,
    redis_pod,
    words_of,
)

from tiffin.kvstore.cli.local.local_redis import free_port, need_redis
from tiffin.kvstore.sizes import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


# -- the image -------------------------------------------------------------------------------------


def test_the_image_runs_commands_that_exist() -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.MULTILINE)
    assert json.loads(entry) == ["tiffin"]
    health, default = map(json.loads, re.findall(r"^\s*CMD (\[.*\])$", DOCKERFILE, re.MULTILINE))
    check(default)
    check(health[1:])
    assert option(health, "--socket") == option(default, "--socket") == "/run/tiffin/node.sock"


def test_the_image_is_of_the_user_that_pods_run_as() -> None:
    (user,) = re.findall(r"^ARG UID=(\d+)$", DOCKERFILE, re.MULTILINE)
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["$UID"]
    for pod in nodes():
        assert str(pod.spec["securityContext"]["runAsUser"]) == user


def test_the_images_extras_exist() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    for named in re.findall(r"EXTRAS=([\w,]+)", DOCKERFILE):
        assert set(named.split(",")) <= extras.keys()


def test_a_builder_gets_what_a_wheel_is_made_of_and_nothing_else() -> None:
    """A virtual environment and .git are gigabytes; secrets would stay in the build cache."""
    project, tool = PROJECT["project"], PROJECT["tool"]["setuptools"]
    needed = {"pyproject.toml", project["readme"], *project["license-files"]}
    needed |= set(tool["package-dir"].values())
    rules = [
        line
        for line in (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert rules[0] == "*"
    assert {rule[1:] for rule in rules if rule.startswith("!")} == needed
    assert [rule for rule in rules[1:] if not rule.startswith("!")] == ["**/__pycache__"]


def test_secrets_of_compose_stay_out_of_the_repository() -> None:
    ignored = (DEPLOY / ".gitignore").read_text().split()
    for secret in compose()["secrets"].values():
        assert Path(secret["file"]).parts[0] + "/" in ignored
        assert f"tiffin token {secret['file'].removeprefix('./')}" in COMPOSE.read_text()


# -- Compose ---------------------------------------------------------------------------------------


def test_compose_names_the_image_of_this_release_and_of_its_user() -> None:
    image = f"tiffin:{PROJECT['project']['version']}"
    assert f"-t {image} ." in DOCKERFILE
    assert list(compose_nodes()) == ["node-a", "node-b"]
    for service in compose_nodes().values():
        assert service["image"] == f"{image}-{service['build']['args']['UID']}"
        built = (DEPLOY / service["build"]["context"]).resolve()
        assert built == ROOT
        assert (built / service["build"]["dockerfile"]).exists()


def test_the_image_and_compose_use_one_port() -> None:
    (exposed,) = re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, re.MULTILINE)
    for name, service in compose_nodes().items():
        assert option(service["command"], "--listen") == f"0.0.0.0:{exposed}"
        assert option(service["command"], "--advertise") == f"{name}:{exposed}"
    for pod in nodes():
        assert pod.main["ports"][0]["containerPort"] == int(exposed)


def test_a_service_of_compose_has_memory_for_its_dram_and_the_node() -> None:
    for service in compose_nodes().values():
        dram_bytes = parse_bytes(option(service["command"], "--dram"))
        assert memory_bytes(service["mem_limit"]) >= dram_bytes + NODE_BYTES


def test_compose_gives_time_to_write_back() -> None:
    for service in compose_nodes().values():
        flush_s = float(option(service["command"], "--flush-s") or FLUSH_S)
        assert float(service["stop_grace_period"].removesuffix("s")) > flush_s


def test_files_of_a_node_are_volumes_and_secrets() -> None:
    secrets = {f"/run/secrets/{name}" for name in compose()["secrets"]}
    for service in compose_nodes().values():
        words = service["command"]
        mounted = [volume.partition(":")[2] for volume in service["volumes"]]
        assert str(Path(option(words, "--socket")).parent) in mounted
        assert option(words, "--nvme").partition(":")[0] in mounted
        password_file = option(words, "--directory").partition("password_file=")[2]
        assert {option(words, "--token-file"), password_file} == secrets


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_the_commands_of_compose_can_be_typed_into_bash() -> None:
    """Bash refuses to set some variables, UID among them."""
    text = COMPOSE.read_text()
    (name,) = set(re.findall(r"(?<!\$)\$\{(\w+):-\d+\}", text))
    (line,) = re.findall(r"^# +(\w+=\$\(.*?\)) docker compose up", text, re.MULTILINE)
    assert line.startswith(f"{name}=")
    shown = in_bash(f"{line} printenv {name}")
    assert shown == str(os.getuid())
    assert in_bash("UID=1 printenv UID") != "1"


def in_bash(line: str) -> str:
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True).stdout.strip()


# -- Redis -----------------------------------------------------------------------------------------

PASSWORD = "a-password-of-this-test"


def unescaped(text: str) -> str:
    """Undo Compose's escape of a dollar as two."""
    return text.replace("$$", "$")


@contextlib.contextmanager
def started(script: str, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The server that a container's script starts, and its port, which is a free one here."""
    (folder / "redis-password").write_text(f"{PASSWORD}\n")
    (folder / "redis-server").symlink_to(need_redis())
    port = free_port("127.0.0.1")
    assert script.count('save ""') == 1
    process = subprocess.Popen(
        ["sh", "-c", script.replace('save ""', f'save ""\nbind 127.0.0.1\nport {port}')],
        env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"},
        stdout=subprocess.DEVNULL,
        cwd=folder,
    )
    try:
        yield process, port
    finally:
        process.terminate()
        assert process.wait(20) == 0


def connect(port: int, process: subprocess.Popen[bytes]) -> socket.socket:
    """A connection to a server that is starting."""
    until = time.monotonic() + 20
    while True:
        assert process.poll() is None, "it ended"
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=10)
        except ConnectionRefusedError:
            assert time.monotonic() < until
            time.sleep(0.02)


def redis_service() -> Any:
    return compose()["services"]["redis"]


@pytest.mark.parametrize(
    ("script", "folder"),
    [
        pytest.param(words_of(redis_pod().main)[-1], "/secret/", id="kubernetes"),
        pytest.param(unescaped(redis_service()["command"][-1]), "/run/secrets/", id="compose"),
    ],
)
def test_redis_starts_with_its_password_and_shows_it_to_nobody(
    script: str, folder: str, tmp_path: Path
) -> None:
    assert folder in script
    with started(script.replace(folder, f"{tmp_path}/"), tmp_path) as (process, port):
        asking = connect(port, process)
        with asking, asking.makefile("rwb", buffering=0) as redis:
            for line, answer in (
                ("PING", b"-NOAUTH"),
                (f"AUTH {PASSWORD}", b"+OK"),
                ("PING", b"+PONG"),
            ):
                redis.write(f"{line}\r\n".encode())
                assert redis.readline().startswith(answer)
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert b"redis-server" in shown, "a container's signal has to reach the server itself"
    assert PASSWORD.encode() not in shown


@pytest.mark.skipif(shutil.which("redis-cli") is None, reason="needs redis-cli")
def test_the_health_of_redis_is_that_it_takes_the_password(tmp_path: Path) -> None:
    script = unescaped(redis_service()["command"][-1]).replace("/run/secrets/", f"{tmp_path}/")
    kind, check_text = redis_service()["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    check_text = unescaped(check_text).replace("/run/secrets/", f"{tmp_path}/")
    with started(script, tmp_path) as (process, port):
        connect(port, process).close()
        check_text = check_text.replace("redis-cli", f"redis-cli -p {port}")
        assert subprocess.run(["sh", "-c", check_text]).returncode == 0
        (tmp_path / "redis-password").write_text("another one\n")
        assert subprocess.run(["sh", "-c", check_text]).returncode != 0
