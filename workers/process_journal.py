"""Note which processes a Ray here has started, so that the next start can end what a killed one left.

In:   the processes that Ray has started for this one (``/proc``)
Out:  a file with a lock in a folder of this user's; ``sweep`` ends the processes of files that nobody holds

Most of what Ray starts ends with its driver; a few helpers and, at times, its head go on. A process is known
by its number and the moment it began, so another one that has got the number by now is never touched.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import signal
import stat
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ringfeed.pipeline.shm_files import host_mark

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Self

__all__ = ["Process", "ProcessJournal", "default_root", "processes_below", "sweep"]

_LOG = logging.getLogger("ringfeed.service")
_FILE = re.compile(r"service-\d+-[0-9a-f]{16}\.json")
_PARENT, _BEGAN = 1, 19
"""Fields of ``/proc/PID/stat`` behind the name: the parent, and the clock ticks from boot to its start."""
_END_SECONDS = 5.0
_NOTE_SECONDS = 0.5
_YOUNG_SECONDS = 60.0

Process = tuple[int, int]
"""Number of a process, and when it began."""


class ProcessJournal:
    """The processes of one service. ``with`` ends those that are left."""

    def __init__(self, command: re.Pattern[str], *, root: Path | None = None) -> None:
        """End what killed services of this user left, and begin a file.

        Args:
            command: found in the command lines of children that are the service's own: a program may have
                others. All that these children start is the service's, too.
            root: the folder of the files; None is this user's under the folder for temporary files.

        Raises:
            OSError: if there can be no such folder.
        """
        root = root or default_root()
        self._command = command
        _make_private(root)
        sweep(root)
        self._path = root / f"service-{os.getpid()}-{secrets.token_hex(8)}.json"
        self._file = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        self._lock = threading.Lock()
        self._known: set[Process] = set()
        self._is_closed = threading.Event()

    def follow(self, *, seconds: float = _NOTE_SECONDS) -> None:
        """Note new processes again and again, in a thread, until the journal is closed."""
        thread = threading.Thread(target=self._follow, args=(seconds,), name="ringfeed-journal", daemon=True)
        thread.start()

    def note(self) -> None:
        """Note the service's processes that there are now."""
        with self._lock:
            found = set(processes_below(os.getpid(), self._command))
            if self._file < 0 or found <= self._known:
                return
            self._known |= found
            text = json.dumps({"mark": _mark(), "processes": sorted(self._known)}).encode()
            # Longer each time, so nothing of the text before is left.
            os.pwrite(self._file, text, 0)

    def close(self) -> None:
        """End all that is left of what was noted, and remove the file. A second call does nothing."""
        self.note()
        self._is_closed.set()
        with self._lock:
            if self._file < 0:
                return
            _end(self._known)
            self._path.unlink(missing_ok=True)
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _follow(self, seconds: float) -> None:
        while not self._is_closed.wait(seconds):
            self.note()


def default_root() -> Path:
    """Return this user's folder of journals."""
    return Path(tempfile.gettempdir()) / f"ringfeed-{os.geteuid()}"


def sweep(root: Path) -> int:
    """End the processes of services of this user that were killed; return how many processes that were."""
    count = 0
    for path in root.iterdir():
        if not _FILE.fullmatch(path.name):
            continue
        try:
            count += _sweep_one(path)
        except OSError as error:
            # Somebody else was quicker, or it is none of ours.
            _LOG.debug("%s: %s", path, error)
    return count


def processes_below(root: int, command: re.Pattern[str]) -> list[Process]:
    """Return the children of ``root`` with such command lines, what they have started, and so on."""
    children: dict[int, list[Process]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (fields := _stat(int(entry.name))) is not None:
            children.setdefault(int(fields[_PARENT]), []).append((int(entry.name), int(fields[_BEGAN])))
    found = [child for child in children.get(root, []) if command.search(_command_line(child[0]))]
    # Grows while it is gone through.
    for number, _ in found:
        found += children.get(number, [])
    return found


def _sweep_one(path: Path) -> int:
    file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(file)
        if status.st_uid != os.geteuid():
            return 0
        if not status.st_size and time.time() - status.st_mtime < _YOUNG_SECONDS:
            # Between the making of the file and its lock.
            return 0
        left = _left_of(os.pread(file, status.st_size, 0))
        _end(left)
        path.unlink(missing_ok=True)
    finally:
        os.close(file)
    return len(left)


def _left_of(data: bytes) -> list[Process]:
    """Return the processes of a journal that are still there."""
    try:
        noted = json.loads(data or b"{}")
        if noted.get("mark") != _mark():
            return []
        processes = [(int(number), int(began)) for number, began in noted["processes"]]
    except (ValueError, TypeError, KeyError, AttributeError):
        return []
    return [process for process in processes if _lives(process)]


def _end(processes: Iterable[Process]) -> None:
    """Kill what lives of ``processes``, and wait a little until it is gone."""
    left = [process for process in processes if _lives(process)]
    for process in left:
        _kill(process)
    until = time.monotonic() + _END_SECONDS
    while any(map(_lives, left)) and time.monotonic() < until:
        time.sleep(0.02)


def _kill(process: Process) -> None:
    with suppress(OSError):
        # The descriptor stands for one process, whoever gets its number after it.
        handle = os.pidfd_open(process[0])
        try:
            if _lives(process):
                _LOG.info("ending process %d, which a service left", process[0])
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def _lives(process: Process) -> bool:
    fields = _stat(process[0])
    return fields is not None and int(fields[_BEGAN]) == process[1] and fields[0] not in ("Z", "X")


def _stat(number: int) -> list[str] | None:
    """Return the fields of a process behind its name, which may hold anything; None if it is gone."""
    try:
        return Path(f"/proc/{number}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None


def _command_line(number: int) -> str:
    try:
        return Path(f"/proc/{number}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _mark() -> str:
    """Return what is the same for all processes whose numbers mean the same: boot and namespace."""
    return f"{host_mark()} {Path('/proc/self/ns/pid').readlink()}"


def _make_private(root: Path) -> None:
    root.mkdir(mode=0o700, exist_ok=True)
    status = root.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise OSError(f"{root} is not a folder of this user alone; remove it")
