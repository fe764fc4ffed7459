"""Blocks in files under ``/dev/shm`` that are written again and again, mapped read-only by one rank.

In:   blocks of a feeder (``workers/flight_exchange.py``), notes that a rank is told
Out:  the same blocks over mapped memory (``pipeline/flight_replies.py``)

    SlotPool.write(block) -> SlotNote  ==>  SlotMaps.open(note) -> block
    SlotPool.free(name)                <==  on_release, once nothing refers to the memory

Fresh files cost more than the copy out of them: a page fault for every 4 KiB, on both sides. So a file is
kept when its rank has let go of the block, and so is the rank's mapping of it. Each time it is written it
gets another generation number, which is in the note and before the block: an old note never gives new bytes.
A pool is for one rank, or for ranks that share: what one still maps when it vanishes is never written again.
"""

from __future__ import annotations

import os
import struct
import weakref
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.shm_files import SHARED_MEMORY, block_path
from ringfeed.pipeline.shm_pages import make_file, map_file
from ringfeed.pipeline.step_block import EncodedBlock

if TYPE_CHECKING:
    import mmap
    from collections.abc import Callable
    from pathlib import Path

    from ringfeed.pipeline.shm_files import BlockFolder

__all__ = ["SlotMaps", "SlotNote", "SlotPool", "file_bytes"]

_HEAD = struct.Struct("<8sQQ")
_MAGIC = b"RFBLOCK1"
_HEAD_BYTES = 64
_END_BYTES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotNote:
    """Where a block lies, until it is let go of."""

    name: str
    """Of the file."""
    generation: int
    """How often the file was written, this time included."""
    size: int
    """Bytes of the block as an Arrow stream, from ``_HEAD_BYTES`` on."""


class _Slot:
    """One file, mapped by its writer."""

    def __init__(self, path: Path, capacity: int) -> None:
        """Make the file; OSError if there is no memory for it."""
        self.path = path
        self.capacity = capacity
        self.generation = 0
        self._memory = make_file(path, capacity)

    def write(self, batch: pa.RecordBatch) -> SlotNote:
        """Write one batch; until it is whole, no note fits."""
        self.generation += 1
        _HEAD.pack_into(self._memory, 0, b"", 0, 0)
        body = np.frombuffer(self._memory, dtype=np.uint8)[_HEAD_BYTES : self.capacity]
        sink = pa.FixedSizeBufferWriter(pa.py_buffer(body))
        with pa.ipc.new_stream(sink, batch.schema) as out:
            out.write_batch(batch)
        note = SlotNote(name=self.path.name, generation=self.generation, size=sink.tell())
        _HEAD.pack_into(self._memory, 0, _MAGIC, note.generation, note.size)
        return note

    def empty(self) -> None:
        """Give the memory back at once, though a rank may still have it mapped: nothing refers to it."""
        # The folder may be gone: its server has stopped.
        with suppress(FileNotFoundError):
            os.truncate(self.path, 0)


class SlotPool:
    """The files of a folder that go to one rank, or to some that share them. Safe from any thread."""

    def __init__(self, folder: BlockFolder) -> None:
        """Make no file yet. All pools of ``folder`` share its budget: one gives up what it does not use."""
        self._folder = folder
        self._free: dict[str, _Slot] = {}
        self._used: dict[str, _Slot] = {}

    def write(self, block: EncodedBlock) -> SlotNote | None:
        """Put a block into a file; None if there is no room: send it another way."""
        batch = block.to_batch()
        size = batch.schema.serialize().size + pa.ipc.get_record_batch_size(batch) + _END_BYTES
        slot = self._take(_HEAD_BYTES + size)
        if slot is None:
            return None
        try:
            return slot.write(batch)
        except BaseException:
            self.drop(slot.path.name)
            raise

    def bytes_of(self, note: SlotNote) -> int:
        """Return what the file of a block takes, which may have held a larger one; 0 if it is gone."""
        with self._folder.lock:
            slot = self._used.get(note.name)
            return 0 if slot is None else slot.capacity

    def trim(self, most: int) -> None:
        """Remove files that nobody uses while all of the folder take more than ``most`` bytes."""
        while self._folder.bytes_held > most:
            with self._folder.lock:
                if not self._give_one():
                    return

    def free(self, name: str) -> None:
        """Say that no rank refers to the block in a file any more."""
        with self._folder.lock:
            slot = self._used.pop(name, None)
            if slot is not None:
                self._free[name] = slot

    def drop(self, name: str) -> None:
        """Remove a file that a rank may still map, for good or until it ends: it is not written again."""
        with self._folder.lock:
            if self._used.pop(name, None) is not None:
                self._folder.remove(name)

    def close(self) -> None:
        """Remove all files; ranks keep what they have mapped."""
        with self._folder.lock:
            for name in [*self._free, *self._used]:
                self._folder.remove(name)
            self._free.clear()
            self._used.clear()
            if self._give_one in self._folder.givers:
                self._folder.givers.remove(self._give_one)

    def _take(self, size: int) -> _Slot | None:
        with self._folder.lock:
            # Of those as large, the one that was written last: most of it is in the processor's cache.
            fitting = [slot for slot in reversed(self._free.values()) if slot.capacity >= size]
            slot = min(fitting, key=lambda one: one.capacity, default=None) or self._make(_rounded(size))
            if slot is not None:
                self._free.pop(slot.path.name, None)
                self._used[slot.path.name] = slot
            return slot

    def _make(self, capacity: int) -> _Slot | None:
        name = self._folder.add(capacity)
        if name is None:
            return None
        if self._give_one not in self._folder.givers:
            self._folder.givers.append(self._give_one)
        try:
            return _Slot(self._folder.path_of(name), capacity)
        except OSError:
            self._folder.remove(name)
            return None

    def _give_one(self) -> bool:
        name = next(iter(self._free), None)
        if name is None:
            return False
        self._free.pop(name).empty()
        self._folder.remove(name)
        return True


class SlotMaps:
    """A rank's mappings of the files of one pool. One thread opens; any may release."""

    def __init__(self, folder: str, *, root: Path = SHARED_MEMORY) -> None:
        """Map nothing yet."""
        self._folder = folder
        self._root = root
        self._maps: dict[str, mmap.mmap] = {}

    def open(self, note: SlotNote, *, on_release: Callable[[], object]) -> EncodedBlock:
        """Return the block of a note. Its arrays cannot be written to: that ends the process.

        Args:
            note: of the feeder.
            on_release: called, from any thread, when nothing refers to the memory any more.

        Raises:
            CorruptDataError: if there is no whole block, or another one by now.
        """
        mapped = self._maps.get(note.name) or self._map(note.name)
        # No text is made before something is wrong: this runs for every block, on caches full of others.
        room = len(mapped) - _HEAD_BYTES
        if room < note.size:
            raise self._damaged(
                note, f"has room for {room} bytes, a block of {note.size} is said to be there"
            )
        found = _HEAD.unpack_from(mapped)
        if found != (_MAGIC, note.generation, note.size):
            raise self._damaged(
                note,
                f"holds generation {found[1]} of {found[2]} bytes, expected {note.generation} of {note.size}",
            )
        memory = np.frombuffer(mapped, dtype=np.uint8, count=note.size, offset=_HEAD_BYTES)
        weakref.finalize(memory, on_release).atexit = False
        try:
            batch = pa.ipc.open_stream(pa.py_buffer(memory)).read_next_batch()
        except (pa.ArrowException, OSError, StopIteration) as error:
            raise self._damaged(note, f"is no block: {error}") from None
        return EncodedBlock.from_batch(batch)

    def _damaged(self, note: SlotNote, what: str) -> CorruptDataError:
        return CorruptDataError(f"{self._root / self._folder / note.name} {what}")

    def _map(self, name: str) -> mmap.mmap:
        path = block_path(self._folder, name, root=self._root)
        if path is None:
            raise CorruptDataError(f"{self._folder}/{name} is no name of a block")
        # Files that went meanwhile are named no more.
        self._maps = {known: mapped for known, mapped in self._maps.items() if (path.parent / known).exists()}
        try:
            self._maps[name] = map_file(path)
        except (OSError, ValueError) as error:
            raise CorruptDataError(f"{path} is no block: {error}") from None
        return self._maps[name]


def file_bytes(size: int) -> int:
    """Return what the file of a block takes that has ``size`` bytes as an Arrow stream."""
    return _rounded(_HEAD_BYTES + size)


def _rounded(size: int) -> int:
    """Return a capacity that blocks of about the same size fit into, at most an eighth more."""
    step = max(_HEAD_BYTES, 1 << max(0, size.bit_length() - 4))
    return -(-size // step) * step
