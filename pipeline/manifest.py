"""What a corpus, plan or shards folder is: its files, their checksums, what it was made from.

In:   facts and files of a finished folder (``pipeline/staging.py`` publishes it)
Out:  ``manifest.json``, written last, so that a folder with one is complete

Each flipped byte is found: files by their xxh3_64, the manifest by its own checksum.
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import xxhash

__all__ = [
    "FORMAT_VERSION",
    "CorruptDataError",
    "FileEntry",
    "Manifest",
    "canonical_json",
    "check_file",
    "check_size",
    "check_sizes_at_open",
    "describe_difference",
    "file_entry",
    "fingerprint",
    "partial_folder",
    "read_manifest",
    "was_replaced",
    "write_manifest",
]

FORMAT_VERSION = 1
"""Version of all three formats that this ringfeed writes; it reads this one and older ones."""
MANIFEST_NAME = "manifest.json"
PARTIAL_SUFFIX = ".partial"

# What a user calls each format, and the command that makes it.
_FORMATS = {
    "ringfeed-corpus": ("corpus", "ringfeed ingest"),
    "ringfeed-plan": ("plan", "ringfeed plan"),
    "ringfeed-shards": ("shards folder", "ringfeed shard"),
}
_HASH_BLOCK = 1 << 22
_SIZES_AT_OPEN = 1024
_MAX_DIFFERENCES = 8
_MAX_VALUE_WIDTH = 60


class CorruptDataError(ValueError):
    """Data on disk is not what was written: truncated, flipped, or gone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """One file of a folder, as it was when it was written."""

    path: str
    """Relative to the folder, with forward slashes."""
    rows: int
    bytes: int
    xxh3_64: str
    """Of the whole file, 16 hex digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What ``manifest.json`` says."""

    format: str
    """``ringfeed-corpus``, ``ringfeed-plan`` or ``ringfeed-shards``."""
    version: int = FORMAT_VERSION
    fingerprint: str
    """``fingerprint(made_from)``, 32 hex digits."""
    made_from: dict[str, Any]
    """JSON-able: all that shaped the data, and nothing that depends on the machine."""
    request: dict[str, Any] = field(default_factory=dict)
    """JSON-able: what a rerun is compared with (``StagedFolder``); empty means ``made_from``."""
    files: tuple[FileEntry, ...]
    facts: dict[str, Any]
    """JSON-able: what a reader wants to know without opening a file."""


def canonical_json(value: object) -> str:
    """Return the one JSON text of ``value``: sorted keys, no spaces, ASCII, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(made_from: Mapping[str, Any]) -> str:
    """Return xxh3_128 over the canonical JSON of ``made_from`` as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(canonical_json(made_from).encode())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write ``folder/manifest.json`` so that it is there whole, or not at all."""
    body = asdict(manifest)
    body["checksum"] = _checksum(body)
    target = folder / MANIFEST_NAME
    temporary = target.with_name(f".{MANIFEST_NAME}.tmp")
    with temporary.open("w", encoding="ascii") as stream:
        stream.write(json.dumps(body, indent=1, allow_nan=False) + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    temporary.replace(target)


def partial_folder(folder: Path) -> Path:
    """Return where ``folder`` is made before it is whole; ``.`` counts by its real name."""
    named = folder if folder.name else folder.absolute()
    return named.parent / (named.name + PARTIAL_SUFFIX)


def read_manifest(folder: Path, *, format: str) -> Manifest:
    """Return the manifest of a finished folder.

    Raises:
        ValueError: if there is no such folder, it is half-written, holds another format, or was
            written by a newer ringfeed.
        CorruptDataError: if the manifest itself is damaged.
    """
    folder = Path(folder)
    path = folder / MANIFEST_NAME
    if folder.name.endswith(PARTIAL_SUFFIX):
        raise ValueError(f"{folder} is half-written; {_finish_hint(format)}")
    if not path.is_file():
        raise ValueError(_why_absent(folder, format))
    body = _parse(path)
    found = str(body.get("format"))
    if found != format:
        raise ValueError(f"{folder} is a {_noun(found)}, not a {_noun(format)}")
    if body.get("version", 0) > FORMAT_VERSION:
        raise ValueError(
            f"{folder} has format version {body['version']}, this ringfeed reads up to "
            f"{FORMAT_VERSION}; upgrade ringfeed"
        )
    _check_manifest(path, body)
    body["files"] = tuple(FileEntry(**entry) for entry in body["files"])
    return Manifest(**body)


def was_replaced(folder: Path, manifest: Manifest) -> bool:
    """Return whether ``folder`` holds something else by now than when ``manifest`` was read from it."""
    try:
        return read_manifest(folder, format=manifest.format).fingerprint != manifest.fingerprint
    except ValueError:
        return False


def file_entry(folder: Path, relpath: str, rows: int) -> FileEntry:
    """Return the entry of a file that has just been written."""
    path = folder / relpath
    return FileEntry(path=relpath, rows=rows, bytes=path.stat().st_size, xxh3_64=_hash_file(path))


def check_size(folder: Path, entry: FileEntry) -> None:
    """Check that the file is there and as long as it was.

    Raises:
        CorruptDataError: if not; names the file.
    """
    path = folder / entry.path
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise CorruptDataError(f"{path} is missing; {_restore_hint(folder)}") from None
    if size != entry.bytes:
        raise CorruptDataError(
            f"{path} has {size} bytes, its manifest says {entry.bytes}; {_restore_hint(folder)}"
        )


def check_sizes_at_open(folder: Path, manifest: Manifest) -> None:
    """Check the sizes of files before work starts, at most 1,024 of them.

    A large folder has a million, and thousands of ranks that asked for all would stop its file system: a
    reader checks each file's size again where it opens the file.

    Raises:
        CorruptDataError: if a file is missing or truncated; names it.
    """
    for entry in manifest.files[:_SIZES_AT_OPEN]:
        check_size(folder, entry)


def check_file(folder: Path, entry: FileEntry) -> None:
    """Read the file and check its size and hash.

    Raises:
        CorruptDataError: if a byte of it changed; names the file.
    """
    check_size(folder, entry)
    path = folder / entry.path
    found = _hash_file(path)
    if found != entry.xxh3_64:
        raise CorruptDataError(
            f"{path} has xxh3_64 {found}, its manifest says {entry.xxh3_64}: a byte of it "
            f"changed; {_restore_hint(folder)}"
        )


def describe_difference(
    expected: Mapping[str, Any],
    found: Mapping[str, Any],
    *,
    words: tuple[str, str] = ("expected", "found"),
) -> str:
    """Return one line that names each field that differs, or an empty string.

    Example: ``tokenizer.kind: expected 'bytes', found 'hf'; seed: expected 1, found nothing``.
    """
    left, right = dict(_flatten(expected, "")), dict(_flatten(found, ""))
    nothing = object()
    lines = []
    for key in [*left, *(key for key in right if key not in left)]:
        old, new = left.get(key, nothing), right.get(key, nothing)
        if type(old) is type(new) and old == new:
            continue
        shown = ["nothing" if value is nothing else _short(value) for value in (old, new)]
        lines.append(f"{key}: {words[0]} {shown[0]}, {words[1]} {shown[1]}")
    if len(lines) > _MAX_DIFFERENCES:
        more = len(lines) - _MAX_DIFFERENCES
        lines = [*lines[:_MAX_DIFFERENCES], f"and {more} more"]
    return "; ".join(lines)


def _flatten(value: object, prefix: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, Mapping) and (value or not prefix):
        for key in sorted(value):
            yield from _flatten(value[key], f"{prefix}.{key}" if prefix else str(key))
    elif isinstance(value, list | tuple) and value:
        for i, item in enumerate(value):
            yield from _flatten(item, f"{prefix}[{i}]")
    else:
        yield prefix, value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_VALUE_WIDTH else text[: _MAX_VALUE_WIDTH - 3] + "..."


def _hash_file(path: Path) -> str:
    digest = xxhash.xxh3_64()
    block = bytearray(_HASH_BLOCK)
    with path.open("rb", buffering=0) as stream:
        while size := stream.readinto(block):
            digest.update(memoryview(block)[:size])
    return digest.hexdigest()


def _checksum(body: Mapping[str, Any]) -> str:
    return xxhash.xxh3_64_hexdigest(canonical_json(body).encode())


def _parse(path: Path) -> dict[str, Any]:
    try:
        body = json.loads(path.read_bytes())
    except ValueError as error:
        raise CorruptDataError(f"{path} is damaged: {error}") from None
    if not isinstance(body, dict):
        raise CorruptDataError(f"{path} is damaged: no JSON object")
    return body


def _check_manifest(path: Path, body: dict[str, Any]) -> None:
    stored = body.pop("checksum", None)
    if stored != _checksum(body) or body["fingerprint"] != fingerprint(body["made_from"]):
        raise CorruptDataError(f"{path} is damaged: its checksum is wrong")


def _noun(name: str) -> str:
    return _FORMATS.get(name, (f"folder of format {name!r}", ""))[0]


def _finish_hint(name: str) -> str:
    command = _FORMATS.get(name, ("", "the command that makes it"))[1]
    return f"run the same `{command}` again to finish it"


def _restore_hint(folder: Path) -> str:
    return f"restore it from a copy or make {folder} again"


def _why_absent(folder: Path, name: str) -> str:
    partial = partial_folder(folder)
    if partial.is_dir() and not folder.exists():
        return f"{folder} is half-written ({partial} exists); {_finish_hint(name)}"
    if not folder.exists():
        return f"there is no {_noun(name)} at {folder}"
    return f"{folder} is no {_noun(name)}: it has no {MANIFEST_NAME}"
