"""What goes over Flight between a rank and a feeder: questions as bounded JSON, messages by their first byte.

In:   requests and blocks (``pipeline/feed_request.py``, ``pipeline/step_block.py``)
Out:  bytes of ``GetFlightInfo`` commands and of ``DoExchange`` app_metadata, and back

    rank                                       feeder (``workers/flight_server.py``)
    GetFlightInfo(DirectoryQuestion)      ->   app_metadata: facts; one endpoint per feeder
    DoAction(COMPARE, DigestReport)       ->   nothing, or the report that this one contradicts
    DoExchange(Hello)                     ->
      ASK number, request                 ->   BLOCK | FACTS | FILE | DROPPED | ERROR, in the order asked
      DROP number                         ->   DROPPED, unless the block went out already
      RELEASE number                      ->   the file of that block may be written again
                                          <-   LEAVE: the feeder stops; ask elsewhere

A request is a credit: a feeder sends what was asked for and nothing else, so the rank's byte budget bounds
what is under way. gRPC's own flow control lets a server run hundreds of megabytes ahead.
"""

from __future__ import annotations

import re
import struct
from dataclasses import asdict, dataclass, fields
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.feed_request import BLOCK_COLUMNS, read_object
from ringfeed.pipeline.manifest import canonical_json
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.shm_slots import SlotNote

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "COMPARE",
    "MAX_MESSAGE_BYTES",
    "REFUSED",
    "Ask",
    "DirectoryQuestion",
    "Feeder",
    "Hello",
    "Reply",
    "Trouble",
    "pack_message",
    "split_message",
]

WIRE_VERSION = 1
MAX_MESSAGE_BYTES = 4096
"""Of anything that a rank sends; a longer message ends the stream."""
COMPARE = "compare"
"""Action of a directory: a ``DigestReport`` in, that of another rank out if they differ, else nothing."""
REFUSED = b"ringfeed-refused"
"""Extra information of a Flight error that asking elsewhere would not mend."""
_HEAD = struct.Struct("<BQ")
_MAX_REPLY_JSON = 1 << 16
_TEXT = re.compile(r"[\x21-\x7e]{1,512}")


class Ask(IntEnum):
    """First byte of what a rank sends."""

    ASK = 1
    DROP = 2
    RELEASE = 3


class Reply(IntEnum):
    """First byte of what a feeder sends."""

    BLOCK = 1
    """The header of a block follows; its rows are the batch of this message."""
    FACTS = 2
    """The header of a block without columns follows; no batch."""
    FILE = 3
    """JSON of a ``SlotNote``: which file under ``/dev/shm`` holds the block until it is released."""
    DROPPED = 4
    ERROR = 5
    """JSON with ``trouble`` and ``text``."""
    LEAVE = 6


class Trouble(StrEnum):
    """Why there is no block."""

    REFUSED = "refused"
    """The request does not fit what is served: ValueError."""
    DAMAGED = "damaged"
    """The data behind it is damaged: CorruptDataError."""
    UNAVAILABLE = "unavailable"
    """Now, or from this feeder: ask elsewhere."""


def pack_message(kind: IntEnum, number: int, body: bytes = b"") -> bytes:
    """Return a message about the request with this number."""
    return _HEAD.pack(kind, number) + body


def split_message(data: bytes | memoryview) -> tuple[int, int, memoryview]:
    """Return first byte, number and body.

    Raises:
        ValueError: if it is too short to be a message.
    """
    view = memoryview(data)
    if len(view) < _HEAD.size:
        raise ValueError(f"a message has {len(view)} bytes; at least {_HEAD.size}")
    kind, number = _HEAD.unpack_from(view)
    return kind, number, view[_HEAD.size :]


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryQuestion:
    """What a rank asks a directory: who can give me this?"""

    place: RankPlace
    columns: tuple[str, ...]
    fingerprint: str | None
    """Of the run that the rank follows; None before it knows. Another one is refused."""

    def to_json(self) -> bytes:
        """Return the question as a Flight command; ``from_json`` is the way back."""
        place = {field.name: getattr(self.place, field.name) for field in fields(RankPlace)}
        values = {"place": place, "columns": list(self.columns), "fingerprint": self.fingerprint}
        return canonical_json({"version": WIRE_VERSION, **values}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> DirectoryQuestion:
        """Read a question from a peer that nobody vouches for.

        Raises:
            ValueError: if it is too long, no JSON, of another version, or has wrong fields.
        """
        what = "a question to the directory"
        values = _read(data, {"place", "columns", "fingerprint"}, what)
        place, names = values["place"], {field.name for field in fields(RankPlace)}
        if not isinstance(place, dict) or set(place) != names:
            raise ValueError(f"{what} has place={place!r}; it has {', '.join(sorted(names))}")
        if any(type(value) is not int or not 0 <= value < 1 << 31 for value in place.values()):
            raise ValueError(f"{what} has place={place!r}; sizes and ranks are small integers")
        return cls(
            place=RankPlace(**place),
            columns=_columns(values["columns"], what),
            fingerprint=_optional_text(values["fingerprint"], f"{what} has fingerprint"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hello:
    """The first thing that a rank says on a stream."""

    fingerprint: str
    """Of the run that the rank follows."""
    columns: tuple[str, ...]
    """Of all blocks that it will ask for; a request with none asks for facts of steps."""
    proof: str | None = None
    """What the feeder's file under ``/dev/shm`` says: this rank can read it."""

    def to_json(self) -> bytes:
        """Return the hello as a Flight command; ``from_json`` is the way back."""
        values = {"fingerprint": self.fingerprint, "columns": list(self.columns), "proof": self.proof}
        return canonical_json({"version": WIRE_VERSION, **values}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Hello:
        """Read a hello from a peer that nobody vouches for; errors as ``DirectoryQuestion.from_json``."""
        what = "a hello"
        values = _read(data, {"fingerprint", "columns", "proof"}, what)
        fingerprint = _optional_text(values["fingerprint"], f"{what} has fingerprint")
        if fingerprint is None:
            raise ValueError(f"{what} has no fingerprint; ask the directory for the facts first")
        return cls(
            fingerprint=fingerprint,
            columns=_columns(values["columns"], what),
            proof=_optional_text(values["proof"], f"{what} has proof"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Feeder:
    """One server of blocks, as a directory names it."""

    url: str | None
    """None: the directory itself is it."""
    host: str | None = None
    """Stands for the machine (``shm_files.host_mark``); ranks of the same one take it first."""
    folder: str | None = None
    """Its folder under ``/dev/shm``, if it has one."""

    def to_json(self) -> bytes:
        """Return what goes into an endpoint's app_metadata; ``from_json`` is the way back."""
        return canonical_json({"version": WIRE_VERSION, "host": self.host, "folder": self.folder}).encode()

    @classmethod
    def from_json(cls, data: bytes, *, url: str | None) -> Feeder:
        """Read what a directory says; errors as ``DirectoryQuestion.from_json``."""
        values = _read(data, {"host", "folder"}, "a feeder")
        return cls(
            url=url,
            host=_optional_text(values["host"], "a feeder has host"),
            folder=_optional_text(values["folder"], "a feeder has folder"),
        )


def error_body(trouble: Trouble, text: str) -> bytes:
    """Return the body of ``Reply.ERROR``."""
    return canonical_json({"version": WIRE_VERSION, "trouble": trouble, "text": text[:4000]}).encode()


def read_error(body: bytes) -> tuple[Trouble, str]:
    """Read the body of ``Reply.ERROR``; ValueError if it is none."""
    values = _read(body, {"trouble", "text"}, "an error", most=_MAX_REPLY_JSON)
    return Trouble(values["trouble"]), str(values["text"])


def file_body(note: SlotNote) -> bytes:
    """Return the body of ``Reply.FILE``."""
    return canonical_json({"version": WIRE_VERSION, **asdict(note)}).encode()


def read_file_body(body: bytes) -> SlotNote:
    """Read the body of ``Reply.FILE``; ValueError if it is none."""
    what = "a file of a block"
    values = _read(body, {"name", "generation", "size"}, what)
    name = _optional_text(values["name"], f"{what} has name")
    if name is None:
        raise ValueError(f"{what} has no name")
    for count in ("generation", "size"):
        if type(values[count]) is not int or values[count] < 1:
            raise ValueError(f"{what} has {count}={values[count]!r}; it is at least 1")
    return SlotNote(name=name, generation=values["generation"], size=values["size"])


def _read(data: bytes, names: set[str], what: str, *, most: int = MAX_MESSAGE_BYTES) -> dict[str, Any]:
    values = read_object(data, most=most, what=what)
    if values.get("version") != WIRE_VERSION:
        raise ValueError(
            f"{what} has version {values.get('version')!r}, this ringfeed speaks {WIRE_VERSION}; use the "
            "same ringfeed on both sides"
        )
    if values.keys() - {"version"} != names:
        raise ValueError(f"{what} has fields {sorted(values)}, expected {sorted(names)}")
    return values


def _columns(names: Any, what: str) -> tuple[str, ...]:
    known: Sequence[str] = BLOCK_COLUMNS
    if not isinstance(names, list) or tuple(names) != tuple(name for name in known if name in names):
        raise ValueError(f"{what} has columns={names!r}; they are some of {list(known)}, in that order")
    return tuple(names)


def _optional_text(value: Any, what: str) -> str | None:
    if value is None or (isinstance(value, str) and _TEXT.fullmatch(value)):
        return value
    raise ValueError(f"{what}={value!r}; it is a short text of visible characters")
