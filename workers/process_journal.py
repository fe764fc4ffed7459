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
    from collections.abc import Callable, Iterable
    from types import TracebackType
    from typing import Self

__all__ = ["Process", "ProcessJournal", "default_root", "processes_below", "seconds_to_next_note", "sweep"]

_LOG = logging.getLogger("ringfeed.service")
_FILE = re.compile(r"service-\d+-[0-9a-f]{16}\.json")
_BEGAN = 19
"""Field of ``/proc/PID/stat`` behind the name: the clock ticks from boot to its start."""
_END_SECONDS = 5.0
_START_SECONDS = 60.0
_NOTE_SECONDS = 10.0
_START_NOTE_SECONDS = 0.5
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
        self._length = 0
        self._is_closed = threading.Event()

    def follow(self, *, seconds_to_next: Callable[[float], float] | None = None) -> None:
        """Note new processes again and again, in a thread, until the journal is closed.

        Args:
            seconds_to_next: how long to wait at an age in seconds; None is ``seconds_to_next_note``.
        """
        choice = (seconds_to_next or seconds_to_next_note,)
        threading.Thread(target=self._follow, args=choice, name="ringfeed-journal", daemon=True).start()

    def note(self) -> None:
        """Note the service's processes that there are now; those that are gone are forgotten.

        Raises:
            OSError: if the file cannot be written; the next call tries again.
        """
        with self._lock:
            if self._file < 0:
                return
            known = {process for process in self._known if _lives(process)}
            known.update(processes_below(os.getpid(), self._command))
            if known == self._known:
                return
            text = json.dumps({"mark": _mark(), "processes": sorted(known)}).encode()
            # One write, over all of the text before: a process that is killed leaves no half of two.
            os.pwrite(self._file, text.ljust(self._length), 0)
            self._known, self._length = known, max(self._length, len(text))

    def close(self) -> None:
        """End all that is left of what was noted, and remove the file. A second call does nothing."""
        self._is_closed.set()
        try:
            self.note()
        except OSError as error:
            _LOG.warning("%s: %s", self._path, error)
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

    def _follow(self, seconds_to_next: Callable[[float], float]) -> None:
        began = time.monotonic()
        while not self._is_closed.wait(seconds_to_next(time.monotonic() - began)):
            try:
                self.note()
            except OSError as error:
                _LOG.warning("%s: %s; it is tried again", self._path, error)


def seconds_to_next_note(age: float) -> float:
    """Return how long a journal of this age waits: while Ray starts, its processes are new and many."""
    return _START_NOTE_SECONDS if age < _START_SECONDS else _NOTE_SECONDS


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
    found = [child for child in _children(root) if command.search(_command_line(child[0]))]
    # Grows while it is gone through.
    for number, _ in found:
        found += _children(number)
    return found


def _children(number: int) -> list[Process]:
    """Return the children of a process, whichever of its threads has started them; none if it is gone."""
    found: list[Process] = []
    for path in Path(f"/proc/{number}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, path.read_text().split()):
                if (fields := _stat(child)) is not None:
                    found.append((child, int(fields[_BEGAN])))
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
