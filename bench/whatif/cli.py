"""`tiffin whatif`: recorded requests, replayed under another policy or pool size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from tiffin.conductor.cost import latency_profiles
from tiffin.conductor.errors import ConductorError
from tiffin.kvstore.errors import InvalidInput

from ..traces.recordings import read_recording
from .calibrating import Memory, calibrated
from .comparison import observed, simulated
from .replay import replay
from .report import Report, in_words, table
from .setup import MEMORY_TOKENS, Changes, changed, differences, in_force

if TYPE_CHECKING:
    from tiffin.conductor.cost.latency_profiles import Profile

    from ..traces.recordings import Recording
    from .comparison import Served
    from .setup import Setup

_console = Console()


def commands(app: typer.Typer) -> None:
    """Add `whatif` to the program."""
    app.command("whatif")(whatif)


def whatif(
    file: Annotated[
        Path,
        typer.Argument(dir_okay=False, metavar="LOG", help="Of `tiffin conductor --record`."),
    ],
    policy: Annotated[str | None, typer.Option(help="Another policy of the conductor.")] = None,
    admission: Annotated[str | None, typer.Option(help="Another mode of admission.")] = None,
    prefill: Annotated[
        int | None, typer.Option(min=1, help="So many instances that prefill.")
    ] = None,
    decode: Annotated[
        int | None, typer.Option(min=1, help="So many instances that decode.")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(help="Other hardware: a latency profile's name, or its file."),
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option(min=0.01, metavar="GBIT/S", help="Another network card of each node."),
    ] = None,
    measured_profile: Annotated[
        str | None,
        typer.Option(
            help="What the recorded hardware really does: a profile's name, or its file.",
            metavar="PROFILE",
            show_default="as recorded",
        ),
    ] = None,
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Slow the profile as half of the requests show, and judge by the other half.",
        ),
    ] = False,
    memory: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="That a node keeps; no log has it.")
    ] = MEMORY_TOKENS,
    model: Annotated[
        str, typer.Option(help="Of several models.", show_default="that of most requests")
    ] = "",
    seed: Annotated[int, typer.Option(min=0, help="The same seed, the same outcome.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not a table.")] = False,
) -> None:
    """Replay recorded requests under another policy or with another pool, beside what was observed.

    `tiffin conductor --record LOG` records what comes, what is decided and what comes of it. Here
    the same requests come again at the same times, at a simulated cluster with the conductor's own
    core. **First** under the settings and with the instances of the log: how far that replay is
    from what was observed is how far the simulator can be believed. **Then** with what is changed,
    beside that replay. Without a change only the first is done.

    If the replay of what was is more than 25% off, a warning says so: the difference between the
    replays may still have the right direction, its size means little. Most often the hardware is
    slower under load than its latency profile says: `--calibrate` learns two factors from every
    second request, one for prefills and one for steps, and judges by the others. Or fit a profile
    to it (docs/conductor/cost.md), and give it with `--measured-profile`. Clients that wait
    for an answer before they ask again would have come at other times; here they come when they
    did.

    **Examples**

    `tiffin whatif requests.jsonl`

    `tiffin whatif requests.jsonl --calibrate --policy least_loaded`

    `tiffin whatif requests.jsonl --prefill 6 --decode 2 --json | jq .whatif.ttft_s`
    """
    try:
        report = _report(
            read_recording(file, model),
            Changes(
                policy,
                admission,
                prefill,
                decode,
                _profile(profile),
                None if bandwidth is None else bandwidth / 8e-9,
            ),
            _Cluster(_profile(measured_profile), calibrate, memory, seed),
        )
    except (InvalidInput, ConductorError, OSError) as error:
        _console.print(f"tiffin whatif: {error}", style="red", highlight=False, markup=False)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(report.plain(), indent=2))
    else:
        _show(report)


@dataclass(frozen=True, slots=True)
class _Cluster:
    """What is said of the recorded cluster beside the recording."""

    profile: Profile | None
    calibrate: bool
    memory_tokens: int
    seed: int

    def setup(self, recording: Recording) -> Setup:
        """What was in force."""
        setup = in_force(recording, self.memory_tokens, self.seed)
        profile = self.profile or setup.profile
        if self.calibrate:
            memory = Memory(self.memory_tokens, recording.block_tokens)
            profile = calibrated(profile, recording.requests, memory, learnt_from)
        return changed(setup, Changes(profile=profile))


def learnt_from(number: int) -> bool:
    """Every second request is learnt from, and does not count when the replay is judged."""
    return number % 2 == 0


def _report(recording: Recording, changes: Changes, cluster: _Cluster) -> Report:
    was = cluster.setup(recording)
    truth, replayed = observed(recording), _replayed(recording, was, "as it was")
    other = _replayed(recording, changed(was, changes), "what if") if changes else None
    warnings = _warnings(recording, was)
    if cluster.calibrate:
        warnings.append(was.profile.source.rpartition("; ")[2])
    judged = (lambda number: not learnt_from(number)) if cluster.calibrate else None
    return Report(recording.name, words(changes), truth, replayed, other, warnings, judged)


def _replayed(recording: Recording, setup: Setup, title: str) -> list[Served]:
    shown = Console(stderr=True)
    with Progress(console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task(title, total=1.0)
        outcome = replay(recording, setup, lambda share: progress.update(task, completed=share))
    return simulated(recording, outcome.jobs)


def words(changes: Changes) -> str:
    """The changes, short."""
    found = [one for one in (changes.policy, changes.admission) if one]
    if changes.prefill or changes.decode:
        found.append(f"{changes.prefill or 'as many'} + {changes.decode or 'as many'}")
    if changes.profile:
        found.append(changes.profile.name)
    if changes.bandwidth_bytes_s:
        found.append(f"{changes.bandwidth_bytes_s * 8e-9:g} Gbit/s")
    return ", ".join(found)


def _profile(name: str | None) -> Profile | None:
    if name is None:
        return None
    path = Path(name)
    return latency_profiles.from_file(path) if path.is_file() else latency_profiles.load(name)


def _warnings(recording: Recording, setup: Setup) -> list[str]:
    found = []
    if recording.others:
        found.append(f"{recording.others:,} requests of other models are left out")
    if recording.changed:
        found.append("instances came or went: replayed with those at the last request")
    if differences(recording.instances):
        found.append("instances of one role differ: replayed as if all were as most are")
    if not any(one.blocks for one in recording.requests):
        found.append("no request came with keys of blocks: nothing is found in any cache")
    if any(one.admission.mode == "baseline" for _, one in setup.settings):
        found.append("the simulator does not reject after a prefill, as admission `baseline` does")
    return found


def _show(report: Report) -> None:
    _console.print(table(report))
    if report.change:
        _console.print(f"what if: {report.change}", highlight=False)
    for line in in_words(report):
        _console.print(line, highlight=False)
    for line in report.warnings:
        _console.print(f"note: {line}", style="yellow", highlight=False, markup=False)
    faults = report.fidelity.faults()
    if faults:
        said = "; ".join(faults)
        _console.print(
            f"warning: the replay of what was is far from it ({said}): sizes of differences mean "
            "little",
            style="bold yellow",
            highlight=False,
            markup=False,
        )
