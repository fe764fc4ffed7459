"""Which files an ingest reads, in which order.

In:   SRC arguments: folders, text files, JSONL, Parquet, Arrow
Out:  ``InputFile``s, in reading order (``pipeline/sources/parts.py`` cuts them)

A folder is read recursively in sorted path order. Names that begin with a dot are left out. The
suffix says how a file is read: .jsonl .ndjson, .parquet .pq, .arrow .ipc .feather; all else is text.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

__all__ = ["InputError", "InputFile", "SourceKind", "check_unchanged", "list_inputs"]


class InputError(ValueError):
    """The input is wrong: nothing that was made from it so far can be finished."""


class SourceKind(StrEnum):
    """How a file is read."""

    TEXT = "text"
    """The whole file is one document."""
    JSONL = "jsonl"
    """One JSON object a line."""
    PARQUET = "parquet"
    """One document a row."""
    ARROW = "arrow"
    """One document a row; IPC file or stream."""


_SUFFIXES = {
    ".jsonl": SourceKind.JSONL,
    ".ndjson": SourceKind.JSONL,
    ".parquet": SourceKind.PARQUET,
    ".pq": SourceKind.PARQUET,
    ".arrow": SourceKind.ARROW,
    ".ipc": SourceKind.ARROW,
    ".feather": SourceKind.ARROW,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One file, as it was when it was listed."""

    index: int
    """Place in the reading order."""
    source: int
    """Which SRC it comes from."""
    path: Path
    name: str
    """Name of SRC and path below it, with forward slashes: the same wherever SRC lies."""
    kind: SourceKind
    bytes: int
    mtime_ns: int


def list_inputs(sources: Sequence[Path], *, glob: str | None = None) -> list[InputFile]:
    """Return all files of ``sources``, in order.

    Args:
        sources: files and folders.
        glob: in folders, only names that match, such as ``*.py`` or ``docs/*.md``.

    Raises:
        InputError: if a source does not exist, or gives no file.
    """
    inputs: list[InputFile] = []
    for number, source in enumerate(sources):
        before = len(inputs)
        for path, name, facts in _files_of(source, glob):
            inputs.append(
                InputFile(
                    index=len(inputs),
                    source=number,
                    path=Path(path),
                    name=name,
                    kind=_kind_of(name),
                    bytes=facts.st_size,
                    mtime_ns=facts.st_mtime_ns,
                )
            )
        if len(inputs) == before:
            wanted = "file" if glob is None else f"file that matches {glob!r}"
            raise InputError(f"{source} has no {wanted} (hidden ones are left out); nothing to ingest")
    return inputs


def check_unchanged(file: InputFile) -> None:
    """Check that ``file`` is as it was listed.

    Raises:
        InputError: if its size or time of change differs.
    """
    try:
        facts = file.path.stat()
    except FileNotFoundError:
        raise InputError(f"{file.path} was there when ingest began, and is gone") from None
    if (facts.st_size, facts.st_mtime_ns) != (file.bytes, file.mtime_ns):
        raise InputError(f"{file.path} changed while it was ingested; ingest again when it is complete")


# Plain strings from here on: pathlib takes longer to list a tree than ingest takes to read it.
def _files_of(source: Path, glob: str | None) -> Iterator[tuple[str, str, os.stat_result]]:
    # Through the real path, so that "." has a name.
    base = os.path.realpath(source)
    if os.path.isfile(base):  # noqa: PTH113
        yield str(source), source.name, os.stat(base)  # noqa: PTH116
    elif os.path.isdir(base):  # noqa: PTH112
        folder_name = os.path.basename(base)  # noqa: PTH119
        found = _walk(base, "", glob)
        # By path components: "a/z" comes before "a-b/c", as in a listing of the folders.
        for relative, facts in sorted(found, key=lambda item: item[0].split("/")):
            yield f"{source}/{relative}", f"{folder_name}/{relative}", facts
    else:
        raise InputError(f"there is no file or folder {source}")


def _walk(base: str, prefix: str, glob: str | None) -> Iterator[tuple[str, os.stat_result]]:
    with os.scandir(f"{base}/{prefix}") as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            relative = prefix + entry.name
            if entry.is_dir(follow_symlinks=False):
                yield from _walk(base, f"{relative}/", glob)
            elif entry.is_file() and (glob is None or _matches(relative, glob)):
                yield relative, entry.stat()


def _matches(relative: str, glob: str) -> bool:
    if "/" in glob:
        return PurePosixPath(relative).match(glob)
    return fnmatchcase(relative.rpartition("/")[2], glob)


def _kind_of(name: str) -> SourceKind:
    return _SUFFIXES.get("." + name.rpartition(".")[2].lower(), SourceKind.TEXT)
