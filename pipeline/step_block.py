"""Consecutive micro-batches of one rank as one Arrow record batch and a small header, and back.

In:   rows of one rank (``BlockRows``, filled by ``workers/block_builder.py``) and shares of their steps
Out:  ``EncodedBlock``, the unit that every transport carries; ``pipeline/block_reader.py`` reads it

One row per pack in (step, micro-batch, place) order; a pack that a step lacks has no row. Sent are ids and
labels [L], and of each piece its document and length. Everything else (offsets, positions, mask) follows from
these and the layout, and is derived at the rank. Digests cover what arrives, column by column (law L10).

Shapes: K packs in the block, P pieces in it, L local tokens of a pack, S source corpora.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from ringfeed.pipeline.arrow_values import numpy_values
from ringfeed.pipeline.feed_facts import FEED_VERSION
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS, BlockRequest
from ringfeed.pipeline.manifest import CorruptDataError, canonical_json
from ringfeed.pipeline.step_share import StepShare
from ringfeed.pipeline.view_source import NO_OVERLAY

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from ringfeed.pipeline.feed_facts import FeedFacts

__all__ = [
    "TOKEN_COLUMNS",
    "BlockHeader",
    "BlockRows",
    "EncodedBlock",
    "block_schema",
    "column_digests",
    "encode_block",
]

TOKEN_COLUMNS = ("input_ids", "labels")
"""Columns with an entry per token; the rest is small."""
_HEADER_KEY = b"ringfeed.block"
_MAX_HEADER_BYTES = 32 << 20
_DIGEST_BYTES = 16
# No digest: what the column says cannot be read.
_OUT_OF_BOUNDS = "offsets out of bounds"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockRows:
    """The rows of a block as flat arrays: row k owns slices between its two offsets."""

    piece_offsets: npt.NDArray[np.int64]
    """int64 [K + 1], from 0."""
    documents: npt.NDArray[np.int64]
    """int64 [P], pieces in slot order, skipped ones included."""
    starts: npt.NDArray[np.int64]
    """int64 [P], first token of the piece in its document."""
    lengths: npt.NDArray[np.int64]
    """int64 [P], as planned."""
    skipped: npt.NDArray[np.bool_]
    """bool [P], pieces that the skip list leaves out."""
    token_offsets: npt.NDArray[np.int64]
    """int64 [K + 1], from 0."""
    input_ids: npt.NDArray[np.int32]
    """int32 [sum of L]"""
    labels: npt.NDArray[np.int32]
    """int32 [sum of L]"""
    local_supervised: npt.NDArray[np.int64]
    """int64 [K]"""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BlockHeader:
    """What a block says of itself beside its rows."""

    fingerprint: str
    """``FeedFacts.fingerprint`` of who made it."""
    request: BlockRequest
    shares: tuple[StepShare, ...]
    """One per step that the block touches, in order."""
    digests: dict[str, str]
    """xxh3_64 of each column of the rows, 16 hex digits."""

    def to_bytes(self) -> bytes:
        """Return JSON with its own digest before it."""
        body = canonical_json(
            {
                "version": FEED_VERSION,
                "fingerprint": self.fingerprint,
                "request": self.request.to_dict(),
                "steps": [_share_values(share) for share in self.shares],
                "digests": self.digests,
            }
        ).encode()
        return xxhash.xxh3_64_hexdigest(body).encode() + body

    @classmethod
    def from_bytes(cls, data: bytes) -> BlockHeader:
        """Read a header and check its digest.

        Raises:
            CorruptDataError: if a byte of it changed.
            ValueError: if it is of another version of ringfeed.
        """
        if len(data) > _MAX_HEADER_BYTES:
            raise CorruptDataError(
                f"the header of a block has {len(data)} bytes; at most {_MAX_HEADER_BYTES}"
            )
        body = data[_DIGEST_BYTES:]
        if xxhash.xxh3_64_hexdigest(body).encode() != data[:_DIGEST_BYTES]:
            raise CorruptDataError("the header of a block is damaged: its bytes changed")
        values = json.loads(body)
        if values["version"] != FEED_VERSION:
            raise ValueError(
                f"a block has version {values['version']!r}, this ringfeed reads {FEED_VERSION}; use the "
                "same ringfeed on both sides"
            )
        return cls(
            fingerprint=values["fingerprint"],
            request=BlockRequest.from_dict(values["request"]),
            shares=tuple(_read_share(entry) for entry in values["steps"]),
            digests=values["digests"],
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedBlock:
    """A block as transports carry it: they need not look inside, and must not change a byte."""

    header: bytes
    """From ``BlockHeader``; small. Flight sends it as app_metadata."""
    rows: pa.RecordBatch
    """With ``block_schema``; without any column where facts alone were asked for."""

    @property
    def nbytes(self) -> int:
        """Bytes of header and rows in memory."""
        return len(self.header) + int(self.rows.nbytes)

    def to_batch(self) -> pa.RecordBatch:
        """Return one batch that holds all, the header in its schema: for a file, or the object store."""
        return self.rows.replace_schema_metadata({_HEADER_KEY: self.header})

    @classmethod
    def from_batch(cls, batch: pa.RecordBatch) -> EncodedBlock:
        """Return the block in a ``to_batch()``, over the same memory.

        Raises:
            CorruptDataError: if the batch has no header.
        """
        header = (batch.schema.metadata or {}).get(_HEADER_KEY)
        if header is None:
            raise CorruptDataError("a record batch without a header is no block")
        return cls(header=header, rows=batch.replace_schema_metadata(None))


def block_schema(facts: FeedFacts, columns: Sequence[str] = BLOCK_COLUMNS) -> pa.Schema:
    """Return the schema of the rows of all blocks with ``columns`` that a service gives."""
    if not columns:
        return pa.schema([])
    small = facts.num_documents <= np.iinfo(np.int32).max
    schema = [
        ("local_supervised", pa.int64()),
        ("documents", pa.list_(pa.int32() if small else pa.int64())),
        ("lengths", pa.list_(pa.int32())),
    ]
    if facts.spec.positions == "continue":
        schema.append(("starts", pa.list_(pa.int64())))
    if facts.overlay_digest != NO_OVERLAY:
        schema.append(("skipped", pa.list_(pa.uint8())))
    schema += [(name, pa.large_list(pa.int32())) for name in TOKEN_COLUMNS if name in columns]
    if not set(TOKEN_COLUMNS) <= set(columns):
        # The rank cannot make the digest of its chunk from what it gets.
        schema.append(("chunk_digest", pa.uint64()))
    return pa.schema(schema)


def encode_block(
    request: BlockRequest, rows: BlockRows, *, shares: Sequence[StepShare], facts: FeedFacts
) -> EncodedBlock:
    """Return a block with all columns, over the memory of ``rows``.

    Args:
        request: what was asked for, with all columns; ``narrow_block`` leaves some out.
        rows: of the request's cp rank.
        shares: of the steps that the request touches, in order.
        facts: of the service.
    """
    schema = block_schema(facts)
    columns = []
    for field in schema:
        values = getattr(rows, field.name)
        if not pa.types.is_list(field.type) and not pa.types.is_large_list(field.type):
            columns.append(pa.array(values, field.type))
            continue
        is_large = pa.types.is_large_list(field.type)
        offsets = rows.token_offsets if is_large else rows.piece_offsets.astype(np.int32)
        kind: Any = pa.LargeListArray if is_large else pa.ListArray
        columns.append(
            kind.from_arrays(pa.array(offsets), pa.array(values.astype(_numpy(field), copy=False)))
        )
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    header = BlockHeader(
        fingerprint=facts.fingerprint, request=request, shares=tuple(shares), digests=column_digests(batch)
    )
    return EncodedBlock(header=header.to_bytes(), rows=batch)


def column_digests(rows: pa.RecordBatch) -> dict[str, str]:
    """Return the xxh3_64 of what each column says: its values, and for lists their lengths."""
    return {name: _digest(rows.column(name)) for name in rows.schema.names}


def _digest(column: pa.Array) -> str:
    hasher = xxhash.xxh3_64()
    if not hasattr(column, "offsets"):
        hasher.update(numpy_values(column).data)
        return hasher.hexdigest()
    offsets = numpy_values(column.offsets)
    lengths = np.diff(offsets)
    if (lengths < 0).any() or offsets[0] < 0 or offsets[-1] > len(column.values):
        return _OUT_OF_BOUNDS
    hasher.update(lengths.astype("<i8").data)
    values = column.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    hasher.update(numpy_values(values).data)
    return hasher.hexdigest()


def _numpy(field: pa.Field) -> Any:
    return field.type.value_type.to_pandas_dtype()


def _share_values(share: StepShare) -> dict[str, Any]:
    return {
        "step": share.step,
        "chain": share.chain,
        "supervised": share.supervised.tolist(),
        "packs": share.packs.tolist(),
        "slots": share.slots.tolist(),
    }


def _read_share(values: dict[str, Any]) -> StepShare:
    return StepShare(
        step=values["step"],
        chain=values["chain"],
        supervised=np.array(values["supervised"], dtype=np.int64),
        packs=np.array(values["packs"], dtype=np.int64),
        slots=np.array(values["slots"], dtype=np.int64),
    )
