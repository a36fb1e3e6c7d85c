"""A suite: the measurements of one `tiffin bench` command, run one after the other.

Its modules are imported when it runs (`later`), because every `tiffin` command imports the suites
for the names of their measurements, on machines that lack what some of these need. A measurement
that crashes does not stop the others, and one with a missing dependency is left out.
The result is a SuiteReport: JSON for programs, `display.py` for people.
"""

from __future__ import annotations

import json
import subprocess
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from tiffin.conductor.errors import ConductorError
from tiffin.kvstore.errors import MissingExtra, TiffinError
from tiffin.kvstore.extras import missing_extra
from tiffin.messenger.errors import MessengerError

from .environment import LIBRARIES, environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from .store.rows import Row

# Exceptions that end one measurement, after which the suite goes on with the next.
_CRASHES = (
    TiffinError,
    MessengerError,
    ConductorError,
    OSError,
    subprocess.SubprocessError,
    AssertionError,
    ValueError,
    MemoryError,
)

Tell = Callable[[str], None]


class Missing(Exception):
    """A measurement needs a missing program, device or environment; the message says how to get
    it."""


class Setting(Protocol):
    """The argument of a suite's measurements: the sizes of the run, and whatever else they need."""

    @property
    def sizes(self) -> Any:
        """A dataclass of plain values, for the report."""


S = TypeVar("S", bound=Setting)
Measurement = Callable[[S], "list[Row]"]


def later(package: str | None, where: Mapping[str, tuple[str, str]]) -> dict[str, Measurement[S]]:
    """Measurements that are imported when they run: a module of `package` and its function each."""
    return {
        name: _later(f"{package}.{module}", function) for name, (module, function) in where.items()
    }


def _later(module: str, function: str) -> Measurement[S]:
    def measured(setting: S) -> list[Row]:
        measure: Measurement[S] = getattr(import_module(module), function)
        return measure(setting)

    return measured


@dataclass(slots=True)
class SuiteReport:
    """The results of one run.

    `crashed` maps a crashed measurement to its error, `traces` to its traceback. `missing` maps a
    measurement that was left out, or a part of one, to its missing dependency. `surroundings` has
    one entry per row, in a suite that reads its surroundings after each measurement.
    """

    suite: str
    environment: dict[str, Any]
    sizes: dict[str, Any]
    rows: list[Row] = field(default_factory=list)
    crashed: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    traces: dict[str, str] = field(default_factory=dict)
    surroundings: list[dict[str, Any]] = field(default_factory=list)

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        rows = [row.plain() for row in self.rows]
        for row, around in zip(rows, self.surroundings, strict=False):
            row["environment"] = around
        return {
            "environment": self.environment,
            "sizes": self.sizes,
            "rows": rows,
            "crashed": self.crashed,
            "missing": self.missing,
        }

    def write(self, folder: Path) -> Path:
        """Write `bench-SUITE.json` into `folder`, creating it if necessary; returns its path."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"bench-{self.suite}.json"
        path.write_text(json.dumps(self.plain(), indent=2) + "\n", encoding="utf-8")
        return path

    def verdict(self) -> str:
        """In words: how many targets were met."""
        judged = [row.met for row in self.rows if row.met is not None]
        crashed = f", {len(self.crashed)} crashed" if self.crashed else ""
        return f"{sum(judged)} of {len(judged)} targets met{crashed}"


@dataclass(frozen=True, slots=True)
class Suite(Generic[S]):
    """Measurements by name, in the order of the docs; each gives one or more rows.

    `libraries` are those whose versions matter. `surroundings` returns what else the numbers depend
    on, as plain values, such as a GPU and its clocks, which are read again after each measurement;
    `in_words` formats it as a line.
    """

    name: str
    measurements: dict[str, Measurement[S]]
    libraries: tuple[str, ...] = LIBRARIES
    surroundings: Callable[[S], dict[str, Any]] | None = None
    in_words: Callable[[dict[str, Any]], str] | None = None
    left_out: Callable[[S], dict[str, str]] | None = None

    def run(
        self, setting: S, names: Iterable[str], started: Tell = print, out: Path | None = None
    ) -> SuiteReport:
        """Run the named measurements; calls `started(name)` before each, and after each writes the
        report so far into the folder `out`: a run that is cut off keeps what it has measured.

        Raises KeyError for a name that is not one of `measurements`.
        """
        report = SuiteReport(self.name, self._environment(setting), asdict(setting.sizes))
        for name in names:
            started(name)
            try:
                rows = self.measurements[name](setting)
                report.rows += rows
                if self.surroundings is not None:
                    report.surroundings += [self.surroundings(setting)] * len(rows)
            except (Missing, MissingExtra) as lack:
                report.missing[name] = str(lack)
            except ModuleNotFoundError as error:
                extra = missing_extra(error)
                if extra is None:
                    raise
                report.missing[name] = str(extra)
            except _CRASHES as error:
                report.crashed[name] = f"{type(error).__name__}: {error}"
                report.traces[name] = traceback.format_exc()
            if out is not None:
                report.write(out)
        if self.left_out is not None:
            report.missing |= self.left_out(setting)
        return report

    def _environment(self, setting: S) -> dict[str, Any]:
        found = environment(self.libraries)
        if self.surroundings is not None and self.in_words is not None:
            around = self.surroundings(setting)
            found["device"] = {**around, "text": self.in_words(around)}
        return found
