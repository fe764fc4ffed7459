"""Blocks as read-only mapped Arrow IPC files under ``/dev/shm``, for processes of one user.

In:   blocks of a feeder (``workers/flight_exchange.py``), names that a rank is told
Out:  the same blocks over mapped memory (``pipeline/flight_replies.py``)

A feeder has a folder of its own, holds a lock in it as long as it lives, and removes a file when its rank has
let go of the block or gone. A rank keeps what it has mapped, whatever becomes of the file. The kernel drops
the lock of a process that is killed: whoever starts next removes folders that nobody holds, and no others.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import shutil
import threading
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import xxhash

from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.step_block import EncodedBlock

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SHARED_MEMORY", "BlockFolder", "host_mark", "open_block", "read_proof", "sweep"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - folders in it are this user's alone
_FOLDER = re.compile(r"ringfeed-\d+-[0-9a-f]{16}")
_FILE = re.compile(r"block-\d+\.arrow")
_PROOF = re.compile(r"[0-9a-f]{64}")
_OWNER, _PROOF_FILE = "owner", "proof"
# Between the making of a folder and the lock in it.
_YOUNG_SECONDS = 60.0


def host_mark() -> str | None:
    """Return what is the same for all processes of this machine since it was booted; None if not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return None
    return xxhash.xxh3_64_hexdigest(boot)


class BlockFolder:
    """One feeder's files. Safe from any thread."""

    def __init__(self, *, budget: int, root: Path = SHARED_MEMORY) -> None:
        """Remove what killed feeders of this user left, and make a folder.

        Args:
            budget: bytes of all files at once.
            root: where folders lie.

        Raises:
            OSError: if there is no such memory here.
        """
        sweep(root)
        self.name = f"ringfeed-{os.geteuid()}-{secrets.token_hex(8)}"
        self.proof = secrets.token_hex(32)
        """What a rank reads to show that it shares this memory."""
        self._path = root / self.name
        self._path.mkdir(mode=0o700)
        self._owner = os.open(self._path / _OWNER, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (self._path / _PROOF_FILE).write_text(self.proof)
        self._budget = budget
        self._lock = threading.Lock()
        self._sizes: dict[str, int] = {}
        self._next = 0

    @property
    def bytes_held(self) -> int:
        """Bytes of the files that are there."""
        with self._lock:
            return sum(self._sizes.values())

    def write(self, block: EncodedBlock) -> str | None:
        """Return the name of a new file with ``block``; None if there is no room: send it another way."""
        size = block.nbytes
        with self._lock:
            if sum(self._sizes.values()) + size > self._budget:
                return None
            name, self._next = f"block-{self._next}.arrow", self._next + 1
            self._sizes[name] = size
        batch = block.to_batch()
        try:
            with pa.OSFile(str(self._path / name), "wb") as file, pa.ipc.new_file(file, batch.schema) as out:
                out.write_batch(batch)
        except OSError:
            self.remove(name)
            return None
        return name

    def remove(self, name: str) -> None:
        """Remove a file; ranks keep what they have mapped."""
        with self._lock:
            self._sizes.pop(name, None)
        (self._path / name).unlink(missing_ok=True)

    def close(self) -> None:
        """Remove the folder. A second call does nothing."""
        if self._owner >= 0:
            shutil.rmtree(self._path, ignore_errors=True)
            os.close(self._owner)
            self._owner = -1


def sweep(root: Path = SHARED_MEMORY) -> int:
    """Remove folders of this user's feeders that are dead; return how many."""
    count = 0
    for path in root.iterdir():
        try:
            if not _FOLDER.fullmatch(path.name) or path.lstat().st_uid != os.geteuid() or path.is_symlink():
                continue
            if _is_dead(path):
                shutil.rmtree(path, ignore_errors=True)
                count += 1
        except OSError:
            # Somebody else was quicker.
            continue
    return count


def _is_dead(path: Path) -> bool:
    if time.time() - path.stat().st_mtime < _YOUNG_SECONDS and not (path / _PROOF_FILE).exists():
        return False
    try:
        owner = os.open(path / _OWNER, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(owner)
    return True


def read_proof(folder: str, *, root: Path = SHARED_MEMORY) -> str | None:
    """Return what shows that this process can read a feeder's folder; None if it cannot."""
    if not _FOLDER.fullmatch(folder):
        return None
    try:
        file = os.open(root / folder / _PROOF_FILE, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if os.fstat(file).st_uid != os.geteuid():
                return None
            proof = os.read(file, 65).decode("ascii", "replace")
        finally:
            os.close(file)
    except OSError:
        return None
    return proof if _PROOF.fullmatch(proof) else None


def open_block(
    folder: str, name: str, *, on_release: Callable[[], object], root: Path = SHARED_MEMORY
) -> EncodedBlock:
    """Map a block. Its arrays cannot be written to: that ends the process.

    Args:
        folder: of the feeder.
        name: of the file in it.
        on_release: called, from any thread, when nothing refers to the memory any more.
        root: where folders lie.

    Raises:
        CorruptDataError: if there is no whole block of that name.
    """
    if not _FOLDER.fullmatch(folder) or not _FILE.fullmatch(name):
        raise CorruptDataError(f"{folder}/{name} is no name of a block")
    try:
        file = os.open(root / folder / name, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            # All pages at once: one fault for each takes longer than the copy that follows.
            mapped = mmap.mmap(file, 0, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
        finally:
            os.close(file)
        memory = np.frombuffer(mapped, dtype=np.uint8)
        weakref.finalize(memory, on_release).atexit = False
        batch = pa.ipc.open_file(pa.py_buffer(memory)).get_batch(0)
    except (OSError, ValueError) as error:
        raise CorruptDataError(f"{root / folder / name} is no block: {error}") from None
    return EncodedBlock.from_batch(batch)
