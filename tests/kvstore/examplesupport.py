"""Examples of the documentation: their places, and a stage on which they run as written.

An example names machines, folders and sizes that a test machine does not have. `Stage.here`
replaces these and nothing else: a server's address becomes a port of this machine, `/etc/tiffin` a
folder with the files that the pages describe, 64 GiB a few MiB.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from directory.ports import free_port
from directory.redisserver import RedisServer
from kvsupport import TIFFIN
from typer.main import get_command

from tiffin.kvstore.cli.local.token_file import make_secret_file
from tiffin.kvstore.format.schema import KVSchema

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
START_S = 60.0


def fences(page: Path, language: str) -> list[str]:
    """The contents of a page's code fences of one language."""
    found = FENCE.findall(page.read_text(encoding="utf-8"))
    return [code for kind, code in found if kind == language]


# -- the program -----------------------------------------------------------------------------------


def entry_points() -> dict[str, str]:
    """The entry points of every package that adds commands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return dict(project["entry-points"]["tiffin.commands"])


def program() -> Any:
    """`tiffin` with the commands of every package, as a click command."""
    app = typer.Typer(name="tiffin")
    app.callback()(lambda: None)
    for where in entry_points().values():
        module, _, name = where.partition(":")
        getattr(import_module(module), name)(app)
    return get_command(app)


def leaves(command: Any, path: tuple[str, ...] = ("tiffin",)) -> Iterator[tuple[str, Any]]:
    """All runnable commands, by name; groups such as `tiffin conductor` may be among them."""
    if command.callback is not None and len(path) > 1:
        yield " ".join(path), command
    for name, inner in getattr(command, "commands", {}).items():
        yield from leaves(inner, (*path, name))


def parse(command: list[str]) -> None:
    """Parse a `tiffin` command without running it. Raises click's UsageError."""
    root = program()
    for _, one in leaves(root):
        one.callback = lambda *_, **__: None
    root.main(command[1:], prog_name="tiffin", standalone_mode=False)


# -- examples --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A command, and the first place where it occurs."""

    where: str
    command: str

    def __str__(self) -> str:
        return self.command


def examples() -> list[Example]:
    """Commands of help texts and pages, each once."""
    found: dict[str, Example] = {}
    for one in (*_help(), *_pages()):
        found.setdefault(one.command, one)
    return list(found.values())


def _help() -> Iterator[Example]:
    for name, command in leaves(program()):
        _, _, shown = (command.help or "").partition("**Examples**")
        for span in re.findall(r"`([^`]+)`", shown):
            yield Example(f"{name} --help", " ".join(span.split()))


def _pages() -> Iterator[Example]:
    for page in PAGES:
        for code in fences(page, "sh"):
            yield from (Example(page.name, one) for one in _lines(code))
        for code in fences(page, ""):
            commands = [one for one in _lines(code) if re.match(r"(tiffin|python|pip) ", one)]
            yield from (Example(page.name, one) for one in commands)


def _lines(code: str) -> Iterator[str]:
    """Whole commands: continued lines are joined, comments and `&` left out."""
    for line in re.sub(r"\\\n\s*", "", code).splitlines():
        plain = re.sub(r"\s+#.*$", "", line).removesuffix("&").strip()
        if plain and not plain.startswith("#"):
            yield from plain.split(" && ")


# -- the stage -------------------------------------------------------------------------------------

_FOLDERS = re.compile(r"(?<![\w.])/(?=etc/tiffin|var/lib/tiffin|var/tmp/|run/tiffin|mnt/|models/)")
_SERVER = re.compile(r"(?:10\.0\.0\.\d+|127\.0\.0\.1):(\d+)")


class Stage:
    """A machine for examples, in a folder: its servers, ports and files. Close it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ports: dict[str, int] = {}
        self._numbers = itertools.count()
        self._stack = ExitStack()
        self._redis: RedisServer | None = None
        self._environment: dict[str, str] = {}
        for name in ("etc/tiffin", "var/lib", "var/tmp", "run/tiffin", "mnt/nvme0", "tmp"):
            (folder / name).mkdir(parents=True)

    def close(self) -> None:
        """End the servers that were started for examples."""
        self._stack.close()

    @property
    def environment(self) -> dict[str, str]:
        """An environment with this checkout's commands; processes write into the folder only."""
        if not self._environment:
            info = self.folder / "installed" / "tiffin-0.1.0.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tiffin\nVersion: 0.1.0\n")
            lines = [f"{name} = {where}" for name, where in entry_points().items()]
            (info / "entry_points.txt").write_text("\n".join(["[tiffin.commands]", *lines]))
            paths = [str(info.parent), *filter(None, sys.path)]
            self._environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(paths),
                "PYTHONDEVMODE": "",
                "XDG_RUNTIME_DIR": str(self.folder),
                "TMPDIR": str(self.folder / "tmp"),
                "HOME": str(self.folder),
                "COLUMNS": "200",
                "TERM": "dumb",
            }
            for name in ("TIFFIN_TOKEN_FILE", "TIFFIN_CONDUCTOR_TOKEN_FILE"):
                self._environment.pop(name, None)
        return self._environment

    @property
    def redis(self) -> RedisServer:
        """The Redis that examples have at 10.0.0.1. Its password is in the file that
        operations.md names; examples that name none have it in the environment."""
        if self._redis is None:
            password = self.file("etc/tiffin/redis-password").read_text().strip()
            server = RedisServer(self.folder, password=password)
            self._redis = self._stack.enter_context(server)
            self.environment["TIFFIN_REDIS_PASSWORD"] = password
        return self._redis

    def port(self, name: str) -> int:
        """A port of this machine for a server of an example."""
        return self._ports.setdefault(name, free_port())

    def here(self, text: str) -> str:
        """An example, or one of its files, with this machine's addresses, folders and sizes."""
        text = text.replace("10.0.0.0/24", "127.0.0.0/24").replace("$TMP", str(self.folder))
        if "redis://10.0.0.1" in text:
            text = re.sub(r"redis://10\.0\.0\.1(:6379)?", f"redis://{self.redis.address}", text)
        text = _FOLDERS.sub(f"{self.folder}/", text)
        text = re.sub(r"(?<!\S)10\.0\.0\.\d+(?!\S|:)", "127.0.0.1", text)
        known = {str(port) for port in self._ports.values()}
        if self._redis is not None:
            known.add(str(self._redis.port))
        text = _SERVER.sub(
            lambda at: at[0] if at[1] in known else f"127.0.0.1:{self.port(at[1])}", text
        )
        return re.sub(r"\b\d+[GT]iB\b", "16MiB", text)

    def keep(self, text: str) -> str:
        """The output of a server of the stage, whose ports `here` must not replace again."""
        self._ports |= {port: int(port) for port in re.findall(r"127\.0\.0\.1:(\d+)", text)}
        return text

    def file(self, name: str, content: str = "") -> Path:
        """A file for an example, readable by its owner only; without `content`, a secret."""
        path = self.folder / name
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            if content:
                path.write_text(self.here(content))
                path.chmod(0o600)
            else:
                make_secret_file(path)
        return path

    def files(self) -> None:
        """All files that the pages name in `/etc/tiffin`, with the content that they show."""
        self.file("etc/tiffin/token")
        router = self.file("etc/tiffin/conductor").read_text().strip()
        self.file("etc/tiffin/conductor-tokens", f"schedule,read {router}\n")
        self.file("etc/tiffin/api-keys", "schedule,read alice-0123456789abcdef\n")
        (conductor,) = fences(DOCS / "conductor" / "service.md", "toml")
        gateway, *_ = fences(DOCS / "conductor" / "gateway.md", "toml")
        self.file("etc/tiffin/conductor.toml", conductor)
        self.file("etc/tiffin/gateway.toml", gateway)
        schema = KVSchema.gqa(
            model="llama-3-8b", layers=32, kv_heads=8, head_dim=128, dtype="bfloat16"
        )
        self.file("etc/tiffin/llama-3-8b.schema.json", schema.canonical_bytes().decode())

    def command(self, example: str) -> list[str]:
        """The command line for an example of `tiffin` or `python`."""
        program, *rest = shlex.split(self.here(example))
        return [*TIFFIN, *rest] if program == "tiffin" else [sys.executable, *rest]

    def run(self, example: str) -> str:
        """Run an example, which must succeed; returns its output."""
        done = subprocess.run(
            self.command(example), env=self.environment, cwd=self.folder, capture_output=True,
            text=True, timeout=START_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{example}\n{done.stdout}{done.stderr}"
        return done.stdout

    @contextmanager
    def serving(self, example: str) -> Iterator[None]:
        """Run an example that does not end by itself and prints nothing."""
        with subprocess.Popen(
            self.command(example), env=self.environment, cwd=self.folder
        ) as process:
            try:
                yield
                assert process.poll() is None, f"{example} has ended"
            finally:
                process.kill()

    @contextmanager
    def running(
        self, example: str, says: str, *, more: str = "", terminal: bool = False
    ) -> Iterator[str]:
        """Run an example that serves; enters when its output matches `says`, with that output. On
        SIGINT it has to exit with 0. `more`: options beyond the example's own. `terminal`: set
        variables that make it treat its output as a terminal."""
        shown = {"FORCE_COLOR": "1", "TERM": "xterm"} if terminal else {}
        log = self.folder / f"log-{next(self._numbers)}"
        with (
            log.open("wb") as out,
            subprocess.Popen(
                [*self.command(example), *shlex.split(self.here(more))],
                env={**self.environment, **shown}, cwd=self.folder, stdout=out, stderr=out,
            ) as process,
        ):  # fmt: skip
            give_up = time.monotonic() + START_S
            try:
                while not re.search(says, log.read_text()):
                    assert process.poll() is None, f"{example}\n{log.read_text()}"
                    assert time.monotonic() < give_up, f"{example}\n{log.read_text()}"
                    time.sleep(0.02)
                yield log.read_text()
                status = _interrupt(process, again_s=10.0 if terminal else START_S)
                assert status == 0, f"{example}\n{log.read_text()}"
                assert "Traceback" not in log.read_text()
            finally:
                process.kill()


def _interrupt(process: subprocess.Popen[bytes], again_s: float) -> int:
    """Send Ctrl-C; returns the exit status. Python loses an interrupt that comes in a finaliser, so
    it is sent again after `again_s`, as a user at a terminal would."""
    give_up = time.monotonic() + START_S
    while True:
        process.send_signal(signal.SIGINT)
        try:
            return process.wait(again_s)
        except subprocess.TimeoutExpired:
            if time.monotonic() >= give_up:
                raise
