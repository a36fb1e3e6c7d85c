"""The measured device: its choice, its description and its clock.

On a GPU the clock is a pair of events around the queued work, so that the host's own time is not
measured; on a CPU it is the host's. `host_turns` is the host's clock on both, for verbs that wait
for the device themselves.

Nothing here has run on a GPU.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from tiffin.kvstore.extras import need

from ..environment import UNKNOWN
from ..store.rows import interleave
from ..suite import Missing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..store.rows import Side

# A GPU that was idle runs at a low clock for its first milliseconds, and Triton compiles at the
# first call.
_WARM_S = 0.5
# Bytes written before a sample to flush the L2 cache: at least twice the cache, and enough to keep
# the device busy while the host queues a call (1 GiB at 3 TB/s is 0.4 ms): it should not wait.
_FLUSH_BYTES = 256 << 20
_FLUSHES = 4
_SMI_S = 30.0
_SMI_FIELDS = (
    "driver_version",
    "clocks.sm",
    "clocks.mem",
    "clocks.max.sm",
    "power.limit",
    "pcie.link.gen.current",
    "pcie.link.width.current",
)


@dataclass(frozen=True, slots=True)
class Machine:
    """torch, and its device that is measured: `cpu` or `cuda:N`."""

    torch: Any
    device: Any

    @property
    def on_gpu(self) -> bool:
        """Whether it is a GPU."""
        return bool(self.device.type == "cuda")

    @property
    def copy_text(self) -> str:
        """The name of `tensor.copy_` on this device, for tables."""
        if self.on_gpu:
            return "device-to-device copy (tensor.copy_)"
        return f"memcpy (tensor.copy_), {self.torch.get_num_threads()} threads as in torch"

    def need_gpu(self) -> None:
        """Raises Missing if the device is a CPU."""
        if not self.on_gpu:
            raise Missing("needs a GPU: --device cuda:0")

    def bytes_of(self, nbytes: int, seed: int = 0) -> Any:
        """uint8 [nbytes] on the device, every page touched, not compressible."""
        torch = self.torch
        generator = torch.Generator(self.device).manual_seed(seed)
        found = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        return found.random_(0, 256, generator=generator)

    def pinned(self, nbytes: int) -> Any:
        """uint8 [nbytes] of host memory, touched; pinned if the device is a GPU."""
        return self.torch.zeros(nbytes, dtype=self.torch.uint8, pin_memory=self.on_gpu)

    def synchronise(self) -> None:
        """Wait until the device is idle."""
        if self.on_gpu:
            self.torch.cuda.synchronize(self.device)

    def turns(self, sides: Sequence[Side], *, rounds: int) -> list[list[float]]:
        """Seconds of every call, per side, by the device's clock; see `rows.interleave`.

        On a GPU an action queues its work on the current stream, or makes that stream wait for the
        other streams that it used.
        """
        if not self.on_gpu:
            return interleave(sides, rounds=rounds)
        return _events(self, sides, rounds)

    def host_turns(self, sides: Sequence[Side], *, rounds: int) -> list[list[float]]:
        """Seconds of every call by the host's clock: actions that return when all is done."""
        self.synchronise()
        return interleave(sides, rounds=rounds)


def machine(name: str | None) -> Machine:
    """The device called `name`; without a name the first GPU, or else the CPU.

    Raises MissingExtra without torch, ValueError for a device that this machine does not have.
    """
    need("measuring kernels", "torch")
    import torch

    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        name = "cuda:0" if gpus else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device: pass cpu, or cuda:0") from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    if device.type not in ("cpu", "cuda") or (device.type == "cuda" and device.index >= gpus):
        raise ValueError(f"there is no device {name!r} here: {gpus} GPUs, and the CPU")
    if device.type == "cuda":
        torch.cuda.set_device(device)  # all work is queued on its current stream
    return Machine(torch, device)


def _events(where: Machine, sides: Sequence[Side], rounds: int) -> list[list[float]]:
    """Samples between two events of the current stream, each after a flush of the L2 cache."""
    cuda = where.torch.cuda
    l2_bytes = cuda.get_device_properties(where.device).L2_cache_size
    dirt = where.torch.empty(
        max(_FLUSH_BYTES, 2 * l2_bytes), dtype=where.torch.uint8, device=where.device
    )

    def sample(side: Side) -> float:
        begin, end = (cuda.Event(enable_timing=True) for _ in range(2))
        side.prepare()
        for _ in range(_FLUSHES):
            dirt.zero_()
        begin.record()
        side.action()
        end.record()
        end.synchronize()
        taken_s = float(begin.elapsed_time(end)) / 1e3
        side.reset()
        return taken_s

    warm_until_s = time.perf_counter() + _WARM_S
    passes = 0
    while passes < 2 or time.perf_counter() < warm_until_s:
        for side in sides:
            sample(side)
        passes += 1
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for side, taken in zip(sides, seconds, strict=True):
            taken.append(sample(side))
    return seconds


# -- description -----------------------------------------------------------------------------------


def surroundings(where: Machine) -> dict[str, Any]:
    """The device in plain values, with its present clocks; values that can't be read are
    "unknown"."""
    torch = where.torch
    found = {
        "device": str(where.device),
        "torch": str(torch.__version__),
        "triton": _version("triton"),
    }
    if not where.on_gpu:
        return found | {"threads": torch.get_num_threads(), "load_1m": round(os.getloadavg()[0], 2)}
    properties = torch.cuda.get_device_properties(where.device)
    return {
        **found,
        "gpu": str(properties.name),
        "cuda": str(torch.version.cuda or torch.version.hip),
        "memory_bytes": int(properties.total_memory),
        "l2_bytes": int(properties.L2_cache_size),
        "multiprocessors": int(properties.multi_processor_count),
        **_from_smi(str(getattr(properties, "uuid", ""))),
    }


def _from_smi(uuid: str) -> dict[str, str]:
    """Driver, clocks and link, as reported by nvidia-smi."""
    program = shutil.which("nvidia-smi")
    said = ""
    if program is not None:
        gpu = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        query = [f"--id={gpu}", f"--query-gpu={','.join(_SMI_FIELDS)}", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(
                [program, *query], capture_output=True, text=True, check=True, timeout=_SMI_S
            ).stdout
    values = [value.strip() for value in said.strip().split(",")]
    if len(values) != len(_SMI_FIELDS):
        values = [UNKNOWN] * len(_SMI_FIELDS)
    return dict(zip(_SMI_FIELDS, values, strict=True))


def in_words(found: dict[str, Any]) -> str:
    """`surroundings` in one line."""
    if "gpu" not in found:
        return (
            f"{found['device']} with {found['threads']} threads of torch {found['torch']}, "
            f"triton {found['triton']} (no kernel runs on a CPU)"
        )
    return (
        f"{found['gpu']} ({found['device']}), {found['memory_bytes'] / (1 << 30):.0f} GiB, driver "
        f"{found['driver_version']}, CUDA {found['cuda']}, torch {found['torch']}, triton "
        f"{found['triton']}, SM {found['clocks.sm']}, memory {found['clocks.mem']}"
    )


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"
