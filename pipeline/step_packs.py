"""The packs of plan steps as flat arrays, and the same rows as an Arrow table.

In:   arrays made by the planner (``planner/``), or rows of a plan block (``pipeline/plan_blocks.py``)
Out:  ``StepPacks``, one step (``pipeline/ranks.py`` deals its packs out, ``pipeline/thd.py`` lays them out)

A pack is a slice of the piece arrays: pack k owns pieces ``offsets[k]`` to ``offsets[k + 1]``. Nothing here
is per pack in Python: a step of thousands of pieces is a handful of arrays.

Shapes: K packs, P pieces, S sources (corpora in command order).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from ringfeed.sharding.padding import slot_lengths

__all__ = ["SCHEMA", "PackRows", "Pieces", "StepPacks", "packs_before"]

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("pack", pa.int64()),
        ("slate", pa.int32()),
        ("cost", pa.int64()),
        ("supervised", pa.int64()),
        ("supervised_by_source", pa.list_(pa.int64())),
        ("tokens", pa.int64()),
        ("tokens_by_source", pa.list_(pa.int64())),
        ("documents", pa.list_(pa.int64())),
        ("starts", pa.list_(pa.int64())),
        ("lengths", pa.list_(pa.int64())),
        ("epochs", pa.list_(pa.int32())),
    ]
)
"""One row per pack. The supervised counts are null where masks are unknown (``plan --lengths``); tokens are
real ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Slices of documents, in slot order."""

    documents: Int64
    """int64 [P], global document ids over the corpora in command order."""
    starts: Int64
    """int64 [P], first token of the piece in its document."""
    lengths: Int64
    """int64 [P], real tokens, at least 1."""
    epochs: Int32
    """int32 [P], the epoch that drew the document."""

    def __len__(self) -> int:
        return len(self.documents)

    def slice(self, first: int, last: int) -> "Pieces":
        """Return pieces ``first`` to ``last`` (not included) without copying."""
        part = slice(first, last)
        return Pieces(self.documents[part], self.starts[part], self.lengths[part], self.epochs[part])

    def take(self, indices: Int64) -> "Pieces":
        """Return copies of the pieces at ``indices``, int64 [Q], in that order."""
        return Pieces(
            self.documents[indices], self.starts[indices], self.lengths[indices], self.epochs[indices]
        )

    @classmethod
    def concat(cls, parts: Sequence["Pieces"]) -> "Pieces":
        """Return all pieces of ``parts`` one after another; none for no parts."""
        if not parts:
            empty = np.empty(0, np.int64)
            return cls(empty, empty, empty, np.empty(0, np.int32))
        return cls(
            np.concatenate([part.documents for part in parts]),
            np.concatenate([part.starts for part in parts]),
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.epochs for part in parts]),
        )


@dataclass(frozen=True, slots=True, eq=False)
class StepPacks:
    """One step of a plan: its packs in pack order."""

    step: int
    slates: Int32
    """int32 [K], slate of each pack, within the step."""
    costs: Int64
    """int64 [K]"""
    supervised: Int64 | None
    """int64 [K, S], labels other than -100 per source; None where masks are unknown."""
    offsets: Int64
    """int64 [K + 1], pack k owns pieces offsets[k] to offsets[k + 1]."""
    pieces: Pieces
    chain: str
    """Chain hash h_step, hex (DESIGN, State)."""
    tokens: Int64 | None = None
    """int64 [K, S], real tokens per source; None where they were not counted (rows made from shards)."""

    @property
    def num_packs(self) -> int:
        return len(self.slates)

    def pack(self, k: int) -> Pieces:
        """Return the pieces of pack ``k``, in slot order."""
        return self.pieces.slice(int(self.offsets[k]), int(self.offsets[k + 1]))

    def footprints(self, *, multiple: int) -> Int64:
        """Return the tokens that each pack's slots take at ``multiple``: int64 [K]."""
        ends = np.concatenate([[0], np.cumsum(slot_lengths(self.pieces.lengths, multiple=multiple))])
        return np.diff(ends[self.offsets])

    def to_table(self) -> pa.Table:
        """Return one row per pack, as ``SCHEMA`` says. The chain value is no column and is left out."""
        return PackRows(
            np.full(self.num_packs, self.step, np.int64),
            np.arange(self.num_packs, dtype=np.int64),
            self.slates,
            self.costs,
            self.supervised,
            self.offsets,
            self.pieces,
            self.tokens,
        ).to_table()

    @classmethod
    def from_table(cls, table: pa.Table, *, chain: str) -> "StepPacks":
        """Return the step whose rows are ``table``.

        Raises:
            ValueError: if the rows belong to no step, or to several.
        """
        rows = PackRows.from_table(table)
        steps = np.unique(rows.steps)
        if len(steps) != 1:
            raise ValueError(f"the table holds rows of steps {steps.tolist()[:5]}, need exactly one step")
        return rows.step_packs(0, len(rows.steps), chain=chain)


@dataclass(frozen=True, slots=True, eq=False)
class PackRows:
    """Packs of one or more steps, in (step, pack) order: what a plan block holds."""

    steps: Int64
    """int64 [K]"""
    packs: Int64
    """int64 [K], order in the step."""
    slates: Int32
    costs: Int64
    supervised: Int64 | None
    """int64 [K, S] or None, as in ``StepPacks``."""
    offsets: Int64
    """int64 [K + 1], from 0."""
    pieces: Pieces
    tokens: Int64 | None = None
    """int64 [K, S] or None, as in ``StepPacks``."""

    def step_packs(self, first: int, last: int, *, chain: str) -> StepPacks:
        """Return rows ``first`` to ``last``, which are one whole step, as views of these arrays."""
        rows = self.slice(first, last)
        return StepPacks(
            int(rows.steps[0]),
            rows.slates,
            rows.costs,
            rows.supervised,
            rows.offsets,
            rows.pieces,
            chain,
            rows.tokens,
        )

    def slice(self, first: int, last: int) -> "PackRows":
        """Return rows ``first`` to ``last`` (not included) as views of these arrays."""
        offsets = self.offsets[first : last + 1]
        return PackRows(
            self.steps[first:last],
            self.packs[first:last],
            self.slates[first:last],
            self.costs[first:last],
            None if self.supervised is None else self.supervised[first:last],
            offsets - offsets[0],
            self.pieces.slice(int(offsets[0]), int(offsets[-1])),
            None if self.tokens is None else self.tokens[first:last],
        )

    @classmethod
    def concat(cls, parts: Sequence["PackRows"]) -> "PackRows":
        """Return the rows of one or more ``parts`` in order; counts are known for all or for none."""
        supervised = [part.supervised for part in parts if part.supervised is not None]
        tokens = [part.tokens for part in parts if part.tokens is not None]
        bases = np.cumsum([0, *(part.offsets[-1] for part in parts)])
        return cls(
            np.concatenate([part.steps for part in parts]),
            np.concatenate([part.packs for part in parts]),
            np.concatenate([part.slates for part in parts]),
            np.concatenate([part.costs for part in parts]),
            np.concatenate(supervised) if supervised else None,
            np.concatenate(
                [[0], *(part.offsets[1:] + base for part, base in zip(parts, bases[:-1], strict=True))]
            ),
            Pieces.concat([part.pieces for part in parts]),
            np.concatenate(tokens) if tokens else None,
        )

    def to_table(self) -> pa.Table:
        """Return one row per pack, as ``SCHEMA`` says, over the same memory."""
        lists = self.offsets.astype(np.int32)
        pieces = self.pieces
        columns = [
            self.steps,
            self.packs,
            self.slates,
            self.costs,
            *_count_columns(self.supervised, len(self.steps)),
            *_count_columns(self.tokens, len(self.steps)),
            *(
                pa.ListArray.from_arrays(lists, pa.array(values))
                for values in (pieces.documents, pieces.starts, pieces.lengths, pieces.epochs)
            ),
        ]
        arrays = [pa.array(c) if isinstance(c, np.ndarray) else c for c in columns]
        return pa.Table.from_arrays(arrays, schema=SCHEMA)

    @classmethod
    def from_table(cls, table: pa.Table) -> "PackRows":
        """Return the rows of ``table`` as arrays (read-only where Arrow owns the memory)."""
        if table.num_rows == 0:
            table = SCHEMA.empty_table()
        batch = pa.RecordBatch.from_arrays(
            [_one_array(column) for column in table.columns], table.column_names
        )
        documents = batch.column("documents")
        offsets: Int64 = documents.offsets.to_numpy().astype(np.int64)
        return cls(
            batch.column("step").to_numpy(),
            batch.column("pack").to_numpy(),
            batch.column("slate").to_numpy(),
            batch.column("cost").to_numpy(),
            _counts(batch, "supervised"),
            offsets - offsets[0],
            Pieces(
                documents.flatten().to_numpy(),
                batch.column("starts").flatten().to_numpy(),
                batch.column("lengths").flatten().to_numpy(),
                batch.column("epochs").flatten().to_numpy(),
            ),
            _counts(batch, "tokens"),
        )


def packs_before(steps: Int64) -> Int64:
    """Return the packs before each of S steps, and all of them: int64 [K], rising -> int64 [S + 1]."""
    return np.append(np.flatnonzero(np.diff(steps, prepend=-1)), len(steps))


def _one_array(column: pa.ChunkedArray) -> pa.Array:
    # Without the copy that combine_chunks makes of a single chunk.
    return (
        column.chunk(0)
        if column.num_chunks == 1
        else pa.concat_arrays(column.chunks or [pa.nulls(0, column.type)])
    )


def _count_columns(counts: Int64 | None, num_packs: int) -> tuple[pa.Array, pa.Array]:
    """Return counts per pack, and per pack and source, as Arrow arrays; all null for None."""
    if counts is None:
        return pa.nulls(num_packs, pa.int64()), pa.nulls(num_packs, pa.list_(pa.int64()))
    num_sources = counts.shape[1]
    lists = np.arange(0, (num_packs + 1) * num_sources, num_sources, dtype=np.int32)
    by_source = pa.ListArray.from_arrays(lists, pa.array(np.ascontiguousarray(counts).reshape(-1)))
    return pa.array(counts.sum(axis=1)), by_source


def _counts(batch: pa.RecordBatch, name: str) -> Int64 | None:
    """Return int64 [K, S] from the columns that ``_count_columns`` made, None for nulls."""
    if not batch.num_rows or batch.column(name).null_count:
        return None
    counts: Int64 = batch.column(f"{name}_by_source").flatten().to_numpy().reshape(batch.num_rows, -1)
    return counts
