"""The wheel works in an environment with nothing else: bare, and with each extra."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deploysupport import DEPLOY, option
from examplesupport import ROOT, leaves, program
from kvsupport import wait_until
from plainsupport import run_all

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# Those with torch take gigabytes: `make demo` installs them, and runs.
EXTRAS = ["", "conductor", "redis,authenticate,bench,tracing"]
# One command of each kind, and its exit status: with its extra, and without.
KINDS = {
    "token token-of-a-test": ("", 0, 0),
    "conductor status --url http://127.0.0.1:1": ("conductor", 2, 2),
    "gateway check gateway.toml": ("conductor", 0, 2),
    "status redis://127.0.0.1:1": ("redis", 2, 2),
    "bench store --quick --row allocator": ("", 0, 0),
    "reproduce": ("", 0, 0),
    "trace info no-such-trace.jsonl": ("", 2, 2),
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: it leaves things beside what it is built from."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("kvstore", "messenger", "kernels", "conductor", "bench"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir"]
    subprocess.run([*pip, str(folder), str(folder)], check=True, timeout=300)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module", params=EXTRAS, ids=lambda extra: extra or "bare")
def installed(request: pytest.FixtureRequest, wheel: Path) -> Iterator[tuple[str, Path]]:
    """The extra, and the folder of an environment with it. Its name is short, for sockets."""
    with tempfile.TemporaryDirectory(prefix="tiffin-w-") as name:
        folder, extra = Path(name), request.param
        venv.create(folder / "env", with_pip=True)
        what = f"{wheel}[{extra}]" if extra else str(wheel)
        pip = [str(folder / "env/bin/python"), "-m", "pip", "install"]
        pip += ["--quiet", "--no-compile"]
        subprocess.run([*pip, what], check=True, timeout=600)
        yield extra, folder


def test_every_command_has_help_and_one_of_each_kind_runs(installed: tuple[str, Path]) -> None:
    extra, folder = installed
    helps = [[*name.split()[1:], "--help"] for name, _ in leaves(program())]
    kinds = [words.split() for words in KINDS]
    (folder / "gateway.toml").write_text("")
    environment = {"HOME": str(folder), "COLUMNS": "200", "TERM": "dumb", "PATH": "/usr/bin:/bin"}
    said, _ = run_all(folder / "env/bin/python", [*helps, *kinds], environment, folder)
    for words, one in zip([*helps, *kinds], said, strict=True):
        assert "Traceback" not in one.text, (words, one)
        if "--help" in words:
            assert one.status == 0, (words, one)
            continue
        needs, with_it, without = KINDS[" ".join(words)]
        assert one.status == (with_it if needs in ("", *extra.split(",")) else without), (
            words,
            one,
        )
        assert ("pip install" in one.text) == (needs not in ("", *extra.split(","))), (words, one)
    tiffin = [str(folder / "env/bin/tiffin")]
    version = subprocess.run(
        [*tiffin, "--version"], env=environment, capture_output=True, text=True
    )
    assert version.stdout.startswith("tiffin "), version.stderr


def test_what_the_image_runs_works_in_it(installed: tuple[str, Path]) -> None:
    """The image's default command and its health check, on a socket of the test."""
    _, folder = installed
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    health, default = map(json.loads, re.findall(r"^\s*CMD (\[.*\])$", dockerfile, re.MULTILINE))
    named, socket = option(default, "--socket"), str(folder / "node.sock")
    tiffin = str(folder / "env/bin/tiffin")
    environment = {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder), "PATH": "/usr/bin:/bin"}
    words = [socket if word == named else "16MiB" if word == "1GiB" else word for word in default]
    check = [tiffin, *(socket if word == named else word for word in health[1:])]
    with subprocess.Popen([tiffin, *words], env=environment, cwd=folder) as node:
        try:
            wait_until(Path(socket).exists, "the node listens", 30.0)
            healthy = subprocess.run(check, env=environment, capture_output=True, text=True)
            assert healthy.returncode == 0, healthy.stderr
            assert json.loads(healthy.stdout)
        finally:
            node.terminate()
            assert node.wait(30) == 0
