"""The card and the versions; the driver's calls are found, and its devices are torch's."""

from __future__ import annotations

import json
import mmap
import platform
import resource
import sys
from pathlib import Path
from uuid import UUID

import torch

from tiffin.bench.environment import library_version
from tiffin.messenger.gpu.cuda_driver import load
from tiffin.messenger.gpu.pinning import Pinned, PinningError

NO_GPU = "no GPU"


def say(found: dict[str, object]) -> None:
    print(json.dumps(found), flush=True)


def read_only_pins() -> object:
    """Whether CUDA registers memory that is mapped read-only, as the pool's is for its readers."""
    memory = mmap.mmap(-1, 2 << 20, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
    try:
        with Pinned(memoryview(memory)):
            return True
    except PinningError as error:
        return str(error)


def main() -> None:
    gpu = torch.cuda.is_available()
    found: dict[str, object] = {
        "card": torch.cuda.get_device_name() if gpu else NO_GPU,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: library_version(name) for name in ("triton", "transformers", "numpy")},
    }
    say(found)
    if not gpu:
        there = Path("/dev/nvidiactl").exists()
        sys.exit(f"there is a GPU, but none for torch {torch.__version__}" if there else 0)
    torch.zeros(1).cuda()
    driver = load()
    uuids = driver.device_uuids()
    devices = [torch.cuda.get_device_properties(at) for at in range(torch.cuda.device_count())]
    assert uuids == [bytes(device.uuid.bytes) for device in devices], "other devices than torch's"
    say(
        found
        | {
            "batches": driver.batches,
            "uuids": [str(UUID(bytes=one)) for one in uuids],
            "memory_bytes": devices[0].total_memory,
            "memlock_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
            "read_only_pins": read_only_pins(),
        }
    )


if __name__ == "__main__":
    main()
