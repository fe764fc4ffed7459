"""Map a file under ``/dev/shm`` so that copies out of it run at the speed of copies from the heap.

In:   an open file of some megabytes (``pipeline/shm_slots.py``)
Out:  a mapping, in huge pages where the kernel gives them, without page faults to come

Half of the gap to a plain copy is address translation: a file's memory comes in pages of 4 KiB, the heap's
often in huge ones. The kernel makes huge pages of a file on request, and maps them where address and offset
are aligned. Where it does not, all is as right and a little slower.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress

import numpy as np

__all__ = ["make_file", "map_file"]

_HUGE = 2 << 20
_LEAST = 2 * _HUGE
# Not in Python's module yet; numbers of Linux. Unknown ones are refused, which is as good as not asked.
_POPULATE_READ, _COLLAPSE = 22, 25


def make_file(path: str | os.PathLike[str], size: int) -> mmap.mmap:
    """Make a file of ``size`` bytes, with memory for all of them, and map it for writing.

    Raises:
        OSError: if there is no memory, or a file of that name.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # All of it now: memory that is missing later, under a mapping, would end the process.
        os.posix_fallocate(file, 0, size)
        if size >= _LEAST:
            # Room for a mapping that begins earlier; no memory is behind it.
            os.ftruncate(file, size + _HUGE)
        mapped = _map(file, size, mmap.PROT_READ | mmap.PROT_WRITE)
    finally:
        os.close(file)
    if size >= _LEAST:
        with suppress(OSError):
            mapped.madvise(_COLLAPSE, 0, size)
    return mapped


def map_file(path: str | os.PathLike[str]) -> mmap.mmap:
    """Map a file of ``make_file`` for reading; a write to it ends the process.

    Raises:
        OSError: if there is none.
        ValueError: if it is empty.
    """
    file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        size = os.fstat(file).st_size
        size -= _HUGE if size >= _LEAST + _HUGE else 0
        mapped = _map(file, size, mmap.PROT_READ)
    finally:
        os.close(file)
    # All pages at once: one fault for each takes longer than the copy that follows.
    with suppress(OSError):
        mapped.madvise(_POPULATE_READ, 0, size)
    return mapped


def _map(file: int, size: int, prot: int) -> mmap.mmap:
    mapped = mmap.mmap(file, size, prot=prot)
    if size < _LEAST:
        return mapped
    # Addresses are given out downwards: as much longer as it begins after a border, it begins at one.
    beyond = np.frombuffer(mapped, dtype=np.uint8).ctypes.data % _HUGE
    mapped.close()
    return mmap.mmap(file, size + beyond, prot=prot)
