"""A feeder's folder under ``/dev/shm``: who owns it, who may read it, and what is left when an owner dies.

In:   a budget in bytes (``workers/flight_server.py``), the name of a folder that a rank is told
Out:  ``BlockFolder``, whose files ``pipeline/shm_slots.py`` fills; a proof that a rank can read it

A feeder has a folder of its own, and holds a lock in it as long as it lives. The kernel drops the lock of a
process that is killed: whoever starts next removes folders that nobody holds, and no others. A rank keeps
what it has mapped, whatever becomes of the file.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SHARED_MEMORY", "BlockFolder", "block_path", "host_mark", "read_proof", "sweep"]

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
        self.lock = threading.Lock()
        """Held while it is settled which file is used for what."""
        self.givers: list[Callable[[], bool]] = []
        """Each removes a file that nobody uses, and returns whether it had one. Called with ``lock`` held."""
        self._sizes: dict[str, int] = {}
        self._next = 0

    @property
    def bytes_held(self) -> int:
        """Bytes of the files that are there, whether a rank uses them now or not."""
        with self.lock:
            return sum(self._sizes.values())

    def path_of(self, name: str) -> Path:
        """Return where a file lies."""
        return self._path / name

    def add(self, size: int) -> str | None:
        """Return the name of a file to make, a new one each time; None if there is no room. Hold ``lock``."""
        while sum(self._sizes.values()) + size > self._budget:
            if size > self._budget or not any(give() for give in self.givers):
                return None
        name, self._next = f"block-{self._next}.arrow", self._next + 1
        self._sizes[name] = size
        return name

    def remove(self, name: str) -> None:
        """Remove a file; ranks keep what they have mapped. Hold ``lock``."""
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


def block_path(folder: str, name: str, *, root: Path = SHARED_MEMORY) -> Path | None:
    """Return where a feeder's file lies; None if these are no names of a folder and a file."""
    return root / folder / name if _FOLDER.fullmatch(folder) and _FILE.fullmatch(name) else None
