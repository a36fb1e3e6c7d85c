"""Mappings that a forked child does not inherit, and whose addresses stay inaccessible there.

MADV_DONTFORK alone leaves a hole in the child. The next mapping placed there, such as a thread's
stack, would lie under views that the child has copies of, and be unmapped together with the copy
of the mapping's object. So the child fills the hole with inaccessible memory (PROT_NONE).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref

import numpy as np

# /usr/include/linux/mman.h. Fails instead of replacing an existing mapping; kernels before 4.17
# treat the address as a hint, and may return another one.
_MAP_FIXED_NOREPLACE = 0x100000
_MAP_NORESERVE = 0x4000
_PROT_NONE = 0

_libc = ctypes.CDLL(None)
_map, _unmap = _libc.mmap, _libc.munmap
_map.restype = ctypes.c_void_p
_map.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
    ctypes.c_long,
]
_unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

# Address and size in bytes of each mapping of this process.
_own: weakref.WeakKeyDictionary[mmap.mmap, tuple[int, int]] = weakref.WeakKeyDictionary()
_of_the_parent: list[mmap.mmap] = []


def keep_from_children(mapping: mmap.mmap) -> None:
    """Make every access to this mapping a SIGSEGV in children that are forked from now on."""
    mapping.madvise(mmap.MADV_DONTFORK)
    _own[mapping] = np.frombuffer(mapping, np.uint8).ctypes.data, len(mapping)


def _fill_holes() -> None:
    for mapping, (address, nbytes) in list(_own.items()):
        if not _filled(address, nbytes):
            # Another mapping is there already: keep the object alive, so that it never unmaps it.
            _of_the_parent.append(mapping)
    _own.clear()


def _filled(address: int, nbytes: int) -> bool:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED_NOREPLACE
    found = _map(address, nbytes, _PROT_NONE, flags, -1, 0)
    if found not in (address, ctypes.c_void_p(-1).value):
        _unmap(found, nbytes)
    return bool(found == address)


os.register_at_fork(after_in_child=_fill_holes)
