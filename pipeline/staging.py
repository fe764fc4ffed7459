"""Write a folder so that it is never seen half-written, and a killed writer can go on.

In:   what the folder is made from (a request), then files put into ``StagedFolder.path``
Out:  the finished folder under its own name, by one rename

Work happens in ``<output>.partial``. Its ``.staging`` folder has the writer's lock, the request,
and whatever journal the writer keeps; it goes away once the folder has its final name.
Killed at any moment, the next run finds either the finished folder or a partial one to go on from.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from ringfeed.pipeline.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    CorruptDataError,
    Manifest,
    canonical_json,
    describe_difference,
    partial_folder,
    read_manifest,
    write_manifest,
)

__all__ = ["FolderBusyError", "StagedFolder", "announced", "write_atomically"]

_STAGING = ".staging"
_LOCK = "writer.lock"
_REQUEST = "made_from.json"
_TEMPORARY_SUFFIX = ".tmp"
_REPLACED = "replaced"


class FolderBusyError(ValueError):
    """Another process is writing the folder now; when it ends, however it ends, another one may."""


@contextmanager
def write_atomically(path: Path) -> Iterator[Path]:
    """Yield a temporary name to write to; it becomes ``path``, synced, when the block ends well.

    Missing parent folders are made. After an error or a kill ``path`` is as it was before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}{_TEMPORARY_SUFFIX}")
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    except BaseException:
        # Also on a full disk: give the space back at once.
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def announced(output: Path, *, format: str) -> Manifest | None:
    """Return what the writer of ``output`` announced, None where nobody did, or it is finished."""
    scratch = partial_folder(Path(os.path.realpath(output))) / _STAGING
    if not (scratch / MANIFEST_NAME).is_file():
        return None
    return read_manifest(scratch, format=format)


class StagedFolder:
    """The one writer of ``output``. Use ``open`` as a context manager.

    ``with StagedFolder.open(output, format=..., made_from=...) as staged:``
    """

    path: Path
    """Put finished files here (``write_atomically``)."""
    scratch: Path
    """Files for the writer alone, such as a journal; they are not part of the output."""
    finished: Manifest | None
    """The output's manifest if it was complete already: nothing is left to do."""
    resumed: bool
    """An earlier writer with the same request has been here; what it finished is in ``path``."""

    def __init__(
        self, output: Path, *, format: str, made_from: Mapping[str, Any], replaces: str | None = None
    ) -> None:
        self.output = output
        self.path = output.with_name(output.name + PARTIAL_SUFFIX)
        self.scratch = self.path / _STAGING
        self.finished = None
        self.resumed = False
        self._format = format
        self._request = json.loads(canonical_json(made_from))
        self._replaces = replaces
        self._lock: int | None = None

    @classmethod
    def open(
        cls, output: Path, *, format: str, made_from: Mapping[str, Any], replaces: str | None = None
    ) -> Self:
        """Become the writer of ``output``, or find it finished.

        Args:
            output: the folder to make; its parent is made if needed.
            format: as in ``Manifest.format``.
            made_from: JSON-able; all that decides the output. A rerun must have the same.
            replaces: fingerprint of a finished folder at ``output`` that this one takes the place of.

        Raises:
            ValueError: if the output, finished or partial, is of another request (with the
                difference and the way out), is something else, or has a writer now.
        """
        # Through the real path: "x/", "." and links must all mean one partial folder.
        real = Path(os.path.realpath(output))
        staged = cls(real, format=format, made_from=made_from, replaces=replaces)
        try:
            staged._enter()
        except BaseException:
            staged.close()
            raise
        return staged

    @classmethod
    def recover(cls, output: Path, *, format: str) -> None:
        """Give a folder its name that was whole when its writer was killed while replacing another one."""
        staged = cls(Path(os.path.realpath(output)), format=format, made_from={})
        if staged.output.exists() or not (staged.path / MANIFEST_NAME).exists():
            return
        try:
            if staged._take_lock() and (staged.path / MANIFEST_NAME).exists():
                staged._rename()
        finally:
            staged.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        # A run that failed before it finished anything leaves nothing to trip over.
        if self._lock is not None and not self._has_work():
            self.discard()
        self.close()

    def announce(self, manifest: Manifest) -> None:
        """Say what the folder will be, for those who read what is whole of it already."""
        try:
            if read_manifest(self.scratch, format=self._format) == manifest:
                return
        except ValueError:
            # Not there yet, or damaged when an earlier writer died.
            pass
        write_manifest(self.scratch, manifest)

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, sync, and give the folder its final name.

        The manifest's ``request`` is filled in from what the folder was opened with.
        """
        for folder, _, names in os.walk(self.path):
            for name in names:
                if name.endswith(_TEMPORARY_SUFFIX) and name.startswith("."):
                    Path(folder, name).unlink()
        request = {} if manifest.made_from == self._request else self._request
        write_manifest(
            self.path,
            Manifest(
                format=manifest.format,
                version=manifest.version,
                fingerprint=manifest.fingerprint,
                made_from=manifest.made_from,
                request=request,
                files=manifest.files,
                facts=manifest.facts,
            ),
        )
        _sync(self.path)
        self._rename()

    def discard(self) -> None:
        """Delete the partial folder: its request cannot be finished (a mistake in the input)."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let another writer in. What is finished stays for it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _enter(self) -> None:
        while True:
            if self._find_finished():
                return
            self.scratch.mkdir(parents=True, exist_ok=True)
            if self._take_lock() and not self._is_finished_by_another():
                break
            self.close()
        self._compare_request()
        self._sweep()
        if (self.path / MANIFEST_NAME).exists():
            # Killed between the manifest and the rename: all that is missing is the name.
            self._rename()
            self._find_finished()

    def _find_finished(self) -> bool:
        if not self.output.exists() or (self.output.is_dir() and not any(self.output.iterdir())):
            return False
        if not (self.output / MANIFEST_NAME).exists():
            raise ValueError(f"{self.output} exists and is not ringfeed's; choose another output")
        manifest = read_manifest(self.output, format=self._format)
        if manifest.fingerprint == self._replaces:
            return False
        _refuse_other(manifest.request or manifest.made_from, self._request, what=f"{self.output} exists and")
        self.finished = manifest
        shutil.rmtree(self.output / _STAGING, ignore_errors=True)
        return True

    def _is_finished_by_another(self) -> bool:
        if not (self.output / MANIFEST_NAME).exists():
            return False
        return read_manifest(self.output, format=self._format).fingerprint != self._replaces

    def _take_lock(self) -> bool:
        """Lock the partial folder. False if it got its final name, or was discarded, meanwhile."""
        path = self.scratch / _LOCK
        try:
            # The kernel drops an flock when its process dies, however it dies.
            self._lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.fstat(self._lock).st_ino == path.stat().st_ino
        except FileNotFoundError:
            return False
        except BlockingIOError:
            raise FolderBusyError(
                f"another process is writing {self.output} now (it holds {path}); "
                "wait for it or choose another output"
            ) from None

    def _compare_request(self) -> None:
        path = self.scratch / _REQUEST
        mine = {"format": self._format, "format_version": FORMAT_VERSION, **self._request}
        if path.exists():
            _refuse_other(_read_request(path), mine, what=f"{self.path} was left by an unfinished run and")
            self.resumed = self._has_work()
            return
        if self._has_work():
            raise ValueError(f"{self.path} exists and is not ringfeed's; move it away")
        with write_atomically(path) as temporary:
            temporary.write_text(json.dumps(mine, indent=1))

    def _has_work(self) -> bool:
        own = {_LOCK, MANIFEST_NAME, _REQUEST, f".{_REQUEST}{_TEMPORARY_SUFFIX}"}
        inside = {entry.name for entry in self.path.iterdir()} - {_STAGING}
        return bool(inside or {entry.name for entry in self.scratch.iterdir()} - own)

    def _sweep(self) -> None:
        for path in self.path.rglob(f".*{_TEMPORARY_SUFFIX}"):
            path.unlink()

    def _rename(self) -> None:
        if self._replaces is not None and self.output.exists():
            # Killed between the two renames, ``recover`` finds the new folder whole and gives it its name.
            self.output.replace(self.scratch / _REPLACED)
        self.path.replace(self.output)
        _sync(self.output.parent)
        # Only now: until the rename, the lock keeps others out and the journal lets them go on.
        shutil.rmtree(self.output / _STAGING, ignore_errors=True)
        self.close()


def _refuse_other(theirs: Mapping[str, Any], mine: Mapping[str, Any], *, what: str) -> None:
    difference = describe_difference(theirs, mine, words=("has", "asked for"))
    if difference:
        raise ValueError(
            f"{what} was made from something else ({difference}); delete it or choose another output"
        )


def _read_request(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_bytes()))
    except ValueError as error:
        raise CorruptDataError(
            f"{path} is damaged ({error}); delete {path.parent.parent} and run again"
        ) from None


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
