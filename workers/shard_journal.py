"""What a shard job has finished, so that a killed one goes on where it was.

In:   folders of steps that workers wrote under ``.staging/attempts``
Out:  the same folders in the output, each noted in ``.staging/finished``

Only the driver, which holds the lock of the output, moves and notes. A folder counts once its note is there:
one that was moved without a note is written again, and comes out the same.
"""

from __future__ import annotations

import json
import shutil
import uuid
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from ringfeed.pipeline.manifest import CorruptDataError, FileEntry, check_size
from ringfeed.pipeline.shard_files import folder_name
from ringfeed.pipeline.staging import write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["FinishedFolder", "ShardJournal"]

_ATTEMPTS = "attempts"
_NOTES = "finished"


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedFolder:
    """A folder of steps that a worker has written."""

    index: int
    attempt: str
    """Name of the folder that it was written in."""
    entries: tuple[FileEntry, ...]


class ShardJournal:
    """The one place that knows which folders are finished."""

    def __init__(self, output: Path, scratch: Path) -> None:
        """Read the notes of earlier runs, and clear away what they left without one.

        Args:
            output: ``StagedFolder.path``.
            scratch: ``StagedFolder.scratch``.
        """
        self._output = output
        self._notes = scratch / _NOTES
        self._attempts = scratch / _ATTEMPTS
        # A worker of a killed driver may still be writing there for a moment; it will find no folder.
        shutil.rmtree(self._attempts, ignore_errors=True)
        self._attempts.mkdir(exist_ok=True)
        self._finished = self._read_notes()

    @property
    def finished(self) -> Mapping[int, tuple[FileEntry, ...]]:
        """Files of each finished folder, by index."""
        return self._finished

    @staticmethod
    def new_attempt(scratch: Path) -> Path:
        """Make a folder that no other worker has."""
        attempt = scratch / _ATTEMPTS / uuid.uuid4().hex
        # Without parents: where they are gone, the job is over.
        attempt.mkdir()
        return attempt

    def adopt(self, folder: FinishedFolder) -> None:
        """Put a worker's folder in place and note it.

        Raises:
            CorruptDataError: if what the worker wrote is not to be seen here: no shared file system.
        """
        attempt = self._attempts / folder.attempt
        name = folder_name(folder.index)
        for entry in folder.entries:
            check_size(attempt, entry)
        target = self._output / name
        shutil.rmtree(target, ignore_errors=True)
        (attempt / name).replace(target)
        with write_atomically(self._notes / f"{name}.json") as path:
            path.write_text(json.dumps([asdict(entry) for entry in folder.entries]))
        with suppress(OSError):
            attempt.rmdir()
        self._finished[folder.index] = folder.entries

    def _read_notes(self) -> dict[int, tuple[FileEntry, ...]]:
        finished = {}
        for path in sorted(self._notes.glob("*.json")):
            entries = tuple(FileEntry(**entry) for entry in json.loads(path.read_bytes()))
            try:
                for entry in entries:
                    check_size(self._output, entry)
            except CorruptDataError:
                path.unlink()
                continue
            finished[int(path.stem.rpartition("-")[2])] = entries
        return finished
