"""What ``verify`` finds, and the checks that every kind of folder shares.

In:   a manifest and its folder
Out:  ``Finding``s, one per fault, each naming a file
"""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.manifest import (
    MANIFEST_NAME,
    PARTIAL_SUFFIX,
    CorruptDataError,
    FileEntry,
    Manifest,
    check_file,
    partial_folder,
    read_manifest,
)
from ringfeed.pipeline.token_files import DAMAGE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

    from ringfeed.pipeline.executor import Executor
    from ringfeed.pipeline.progress import Progress

__all__ = ["Finding", "VerifyReport", "check_all_files", "folder_format", "named", "open_manifest", "shorten"]

_SHOWN = 10
_NONSENSE = (*DAMAGE, IndexError, ArithmeticError, MemoryError)
"""What reading may raise, and using what was read, where the bytes say what nobody wrote."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fault."""

    file: str
    """The file to look at, replace or make again."""
    problem: str


@dataclass(frozen=True, kw_only=True, slots=True)
class VerifyReport:
    """All that was found out about a folder."""

    path: Path
    kind: str
    """``corpus``, ``plan`` or ``shards``."""
    findings: tuple[Finding, ...]
    """Faults; none is good news."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """How much was checked."""
    unchecked: tuple[str, ...] = ()
    """What could not be checked, and why; no fault of the folder."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "ok": not self.findings,
            "findings": [{"file": entry.file, "problem": entry.problem} for entry in self.findings],
            "checked": dict(self.counts),
            "unchecked": list(self.unchecked),
        }


def folder_format(path: Path) -> str:
    """Return the format of the folder at ``path``, finished or half-written.

    Raises:
        ValueError: if there is nothing that ringfeed made.
        CorruptDataError: if its manifest cannot be read at all.
    """
    for place in (path, partial_folder(path)) if not path.name.endswith(PARTIAL_SUFFIX) else (path,):
        for name in (MANIFEST_NAME, ".staging/made_from.json"):
            if (place / name).is_file():
                return _format_in(place / name)
    raise ValueError(f"{path} is no corpus, plan or shards folder: it has no {MANIFEST_NAME}")


def open_manifest(path: Path) -> Manifest:
    """Read the manifest of a finished folder of any format; errors as ``manifest.read_manifest``."""
    return read_manifest(path, format=folder_format(path))


def check_all_files(
    folder: Path, entries: Iterable[FileEntry], *, executor: Executor, progress: Progress
) -> list[Finding]:
    """Hash every file of ``entries`` and return those that are not what they were."""
    entries = list(entries)
    progress.begin(f"checking {folder.name}", total=sum(entry.bytes for entry in entries), unit="bytes")
    findings = []
    for entry, problem in zip(entries, executor.map(partial(_file_problem, folder), entries), strict=True):
        progress.advance(entry.bytes)
        if problem is not None:
            findings.append(Finding(file=str(folder / entry.path), problem=problem))
    progress.end()
    return findings


def shorten(findings: list[Finding], *, what: str) -> list[Finding]:
    """Return the first few findings, and one that counts the rest."""
    if len(findings) <= _SHOWN:
        return findings
    rest = len(findings) - _SHOWN
    return [*findings[:_SHOWN], Finding(file=findings[_SHOWN].file, problem=f"and {rest} more {what}")]


@contextmanager
def named(file: Path, findings: list[Finding]) -> Iterator[None]:
    """Add a finding for what the bytes of ``file`` raise: their hash is right, since it was made of them."""
    try:
        yield
    except CorruptDataError as error:
        findings.append(Finding(file=str(file), problem=str(error)))
    except _NONSENSE as error:
        findings.append(
            Finding(file=str(file), problem=f"{file} cannot be read: {error or type(error).__name__}")
        )


def _file_problem(folder: Path, entry: FileEntry) -> str | None:
    try:
        check_file(folder, entry)
    except CorruptDataError as error:
        return str(error)
    except OSError as error:
        return f"{folder / entry.path} cannot be read: {error.strerror}"
    return None


def _format_in(file: Path) -> str:
    try:
        return str(json.loads(file.read_bytes())["format"])
    except (ValueError, KeyError, TypeError):
        raise CorruptDataError(f"{file} is damaged: it does not say what the folder is") from None
