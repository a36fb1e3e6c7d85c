"""One answer to a scrape for all workers: the sum of their metrics.

Each worker answers at a unix socket with its own metrics, in Prometheus' text format, and ends the
connection. Whichever worker is scraped asks the others.

Prometheus takes a counter that falls for a restart, and counts what is left once more. So what a
worker tells is written to a file first: the counters in it stand for a worker that is gone or does
not answer in time, and the worker that is started in its place goes on from them. What a worker
that is killed has counted since it was asked last is lost.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

_ANSWER_S = 1.0
# Metrics that are the same fact in each worker, with what all of them together say.
_NOT_SUMS: dict[str, Callable[[float, float], float]] = {
    "tiffin_gateway_conductor_up": min,
    "tiffin_gateway_instances": max,
}


class WorkerMetrics:
    """The metrics of worker `own` of `workers`, whose text is `text()`; sockets and files are in
    `folder`."""

    def __init__(self, folder: Path, own: int, workers: int, text: Callable[[], bytes]) -> None:
        self._folder, self._own, self._text = folder, own, text
        self._before = ""  # the counters of the workers that were here before
        self._others = [number for number in range(workers) if number != own]

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[None]:
        """Answer the other workers meanwhile. Raises OSError."""
        path = socket_of(self._folder, self._own)
        path.unlink(missing_ok=True)  # of the one that was here before
        self._before = self._last_told(self._own)
        server = await asyncio.start_unix_server(self._answer, path)
        async with server:
            yield

    async def of_all(self) -> bytes:
        """The sum over all workers."""
        texts = await asyncio.gather(*(self._ask(number) for number in self._others))
        return merged([self._told(), *texts]).encode()

    def _told(self) -> str:
        """This worker's metrics, once they are in its file."""
        text = merged([self._text().decode(), self._before])
        path = _file_of(self._folder, self._own)
        new = path.with_suffix(".new")
        with contextlib.suppress(OSError):  # a full disk hides no metrics
            new.write_text(text)
            new.replace(path)
        return text

    def _last_told(self, number: int) -> str:
        """The counters that a worker told last; "" if it never was asked."""
        try:
            return counters(_file_of(self._folder, number).read_text())
        except FileNotFoundError:
            return ""

    async def _ask(self, number: int) -> str:
        try:
            async with asyncio.timeout(_ANSWER_S):
                path = socket_of(self._folder, number)
                reader, writer = await asyncio.open_unix_connection(path)
                try:
                    return (await reader.read()).decode()
                finally:
                    writer.close()
        except (OSError, TimeoutError):
            return self._last_told(number)

    async def _answer(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            writer.write(self._told().encode())
            await writer.drain()
        writer.close()


def socket_of(folder: Path, worker: int) -> Path:
    """Where a worker answers with its metrics. It is there once the worker serves."""
    return folder / f"worker-{worker}.sock"


def _file_of(folder: Path, worker: int) -> Path:
    return folder / f"worker-{worker}.txt"


def counters(text: str) -> str:
    """Of a text, the metrics that only rise."""
    kept, lines = False, list[str]()
    for line in text.splitlines():
        if line.startswith("# "):
            kept = line.startswith("# TYPE ") and line.endswith((" counter", " histogram"))
        if kept:
            lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def merged(texts: Sequence[str]) -> str:
    """One text for several: series of the same name and labels are added up."""
    families: dict[str, tuple[dict[str, None], dict[str, float]]] = {}
    for text in texts:
        comments: dict[str, None] = {}
        series: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("# "):
                comments, series = families.setdefault(line.split(" ", 3)[2], ({}, {}))
                comments[line] = None
                continue
            name, _, value = line.rpartition(" ")
            add = _NOT_SUMS.get(name, float.__add__)
            series[name] = add(series[name], float(value)) if name in series else float(value)
    return "".join(f"{line}\n" for line in _lines(families))


def _lines(families: dict[str, tuple[dict[str, None], dict[str, float]]]) -> Iterator[str]:
    for comments, series in families.values():
        yield from comments
        yield from (f"{name} {value}" for name, value in series.items())
