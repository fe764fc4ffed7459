"""Turn BSHD batches, rows that somebody else has packed, into THD chunks.

In:   a batch of numpy arrays or CPU tensors: ``input_ids`` [B, S], ``seq_lens`` [B, K], ...
Out:  ``ThdChunk``s (``pipeline/thd.py``), which any layout cuts (``pipeline/views.py``)

Each row is a pack. Where its sequences lie is told by lengths alone; token values are never looked at.

Shapes: B rows, S tokens in a row, K entries for sequences, N slots of a row, T slots of a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ringfeed.pipeline.thd import ThdChunk
from ringfeed.pipeline.view_kernels import IGNORE
from ringfeed.sharding.bshd_offsets import RowSequences, read_row_sequences
from ringfeed.sharding.padding import SlotOffsets, concat_offsets, footprint, slot_offsets

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from ringfeed.sharding.layouts import Layout
    from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["BSHD_FIELDS", "thd_from_bshd"]

BSHD_FIELDS = ("input_ids", "labels", "position_ids", "seq_lens", "seq_lens_padded", "padding_mask")
"""Entries of a batch that have a meaning of their own."""


def thd_from_bshd(
    batch: Mapping[str, Any],
    *,
    layout: Layout,
    cp_size: int,
    pad_id: int,
    num_chunks: int | None = 1,
    pack_slots: int | None = None,
) -> list[ThdChunk]:
    """Lay the rows of ``batch`` end to end; the batch is left untouched.

    A row keeps its own slots if each is a multiple of what the layout needs, and is laid out again by the
    pad rule otherwise. All rows get the same number of slots: S, or the largest row after laying out
    again, rounded up to what the layout can split. What is left of a row is one tail slot.

    Args:
        batch: ``input_ids`` [B, S]; ``seq_lens`` [B, K], real lengths, entries of 0 and below (such as
            -1000) are absent ones; optional ``seq_lens_padded`` [B, K], where the sequences lie in the
            row (without it they lie end to end); optional ``labels`` [B, S], shifted already (absent
            ones are made per sequence); optional ``position_ids`` [B, S] or [1, S] (absent ones restart per
            sequence). Any other [B, S] array is carried as a column, with 0 in padding; entries of any
            other shape, and a ``padding_mask``, which follows from the lengths, are left out.
        layout: who will hold what.
        cp_size: context-parallel ranks.
        pad_id: token written into padding, whatever the batch has there.
        num_chunks: chunks to make of the B rows, in order; it divides B. None: one of each row.
        pack_slots: slots of every row, laid out anew by the pad rule alone, as the packs of a plan are. None:
            what the rows of this batch need.

    Returns:
        ``num_chunks`` chunks. Document ids count the sequences of the batch from 0.

    Raises:
        ValueError: if lengths are missing or do not fit together (row and field are named), or
            ``num_chunks`` does not divide B, or a row does not fit ``pack_slots``.
    """
    ids = _matrix(batch, "input_ids")
    num_chunks = len(ids) if num_chunks is None else num_chunks
    if num_chunks < 1 or not len(ids) or len(ids) % num_chunks:
        valid = [n for n in range(1, len(ids) + 1) if len(ids) % n == 0]
        raise ValueError(f"num_chunks={num_chunks} does not divide the {len(ids)} rows; use one of {valid}")
    rows = _read_rows(batch, ids)
    packs = _lay_out(rows, layout=layout, cp_size=cp_size, total=pack_slots)
    columns = _columns(batch, ids)
    first_document = np.concatenate([[0], np.cumsum(rows.counts)])
    chunks = []
    for first in range(0, len(ids), len(ids) // num_chunks):
        last = first + len(ids) // num_chunks
        part = {name: column[first:last] for name, column in columns.items()}
        documents = np.arange(first_document[first], first_document[last], dtype=np.int64)
        places = _find_places(rows.of_rows(first, last), packs[first:last])
        chunks.append(_fill(part, places, packs=packs[first:last], documents=documents, pad_id=pad_id))
    return chunks


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Places:
    """Where each of the M real tokens of a chunk comes from and goes to: int64 [M] each."""

    source: Int64Array
    """In the chunk's rows, read one after another."""
    target: Int64Array
    """In the chunk."""
    within: Int64Array
    """In its sequence."""
    is_last: npt.NDArray[np.bool_]
    """Of its sequence."""


def _lay_out(rows: RowSequences, *, layout: Layout, cp_size: int, total: int | None) -> list[SlotOffsets]:
    """Return the slots of every row, all of one length T: ``total``, or what they need."""
    multiple = layout.length_multiple(cp_size)
    by_row = [rows.of_rows(row, row + 1) for row in range(len(rows.counts))]
    if total is not None:
        _check_rows_fit(by_row, multiple=multiple, total=total)
        return [slot_offsets(row.lengths, multiple=multiple, total=total) for row in by_row]
    # A row whose own slots fit is not moved.
    wanted = [row.slots if (row.slots % multiple == 0).all() else row.lengths for row in by_row]
    split = layout.chunk_multiple(cp_size=cp_size)
    largest = max(rows.width, *(footprint(lengths, multiple=multiple) for lengths in wanted))
    total = -(-largest // split) * split
    return [
        slot_offsets(lengths, multiple=multiple, total=total, real_lengths=row.lengths)
        for row, lengths in zip(by_row, wanted, strict=True)
    ]


def _check_rows_fit(by_row: list[RowSequences], *, multiple: int, total: int) -> None:
    needed = [footprint(row.lengths, multiple=multiple) for row in by_row]
    if max(needed) > total:
        row = next(i for i, slots in enumerate(needed) if slots > total)
        raise ValueError(
            f"row {row}: its sequences, each padded to a multiple of {multiple}, take {needed[row]} slots, "
            f"more than the {total} of a row; this batch needs pack_tokens={max(needed)} or more"
        )


def _find_places(rows: RowSequences, packs: list[SlotOffsets]) -> _Places:
    """Return where the real tokens of one chunk's rows go."""
    targets, total = [], 0
    for count, pack in zip(rows.counts, packs, strict=True):
        # Sequences have the first slots of their row; a tail slot has none.
        targets.append(pack.cu_seqlens_padded[:count].astype(np.int64) + total)
        total += int(pack.cu_seqlens_padded[-1])
    sizes = rows.lengths
    ends = np.cumsum(sizes)
    within = np.arange(int(sizes.sum()), dtype=np.int64) - np.repeat(ends - sizes, sizes)
    is_last = np.zeros(len(within), dtype=np.bool_)
    is_last[ends - 1] = True
    row_starts = np.repeat(np.arange(len(packs)) * rows.width, rows.counts)
    return _Places(
        source=np.repeat(row_starts + rows.starts, sizes) + within,
        target=np.repeat(np.concatenate(targets), sizes) + within,
        within=within,
        is_last=is_last,
    )


def _fill(
    columns: Mapping[str, npt.NDArray[Any]],
    places: _Places,
    *,
    packs: list[SlotOffsets],
    documents: Int64Array,
    pad_id: int,
) -> ThdChunk:
    """Copy the real tokens of every column to their slots, and make the columns that are absent."""
    offsets = concat_offsets(packs)
    total = int(offsets.cu_seqlens_padded[-1])
    laid = {}
    for name, column in columns.items():
        fill = {"input_ids": pad_id, "labels": IGNORE}.get(name, 0)
        laid[name] = np.full(total, fill, dtype=column.dtype)
        laid[name][places.target] = column.reshape(-1)[places.source]
    mask = np.ones(total, dtype=np.bool_)
    mask[places.target] = False
    if "position_ids" not in laid:
        laid["position_ids"] = np.zeros(total, dtype=np.int32)
        laid["position_ids"][places.target] = places.within
    if "labels" not in laid:
        laid["labels"] = np.full(total, IGNORE, dtype=np.int32)
        has_next = places.target[~places.is_last]
        laid["labels"][has_next] = laid["input_ids"][has_next + 1]
    return ThdChunk(
        tokens=laid["input_ids"],
        labels=laid["labels"],
        position_ids=laid["position_ids"],
        padding_mask=mask,
        cu_seqlens=offsets.cu_seqlens,
        cu_seqlens_padded=offsets.cu_seqlens_padded,
        documents=documents,
        num_packs=len(packs),
        extras={name: column for name, column in laid.items() if name not in BSHD_FIELDS},
    )


def _read_rows(batch: Mapping[str, Any], ids: npt.NDArray[Any]) -> RowSequences:
    if batch.get("seq_lens") is None:
        raise ValueError(
            "the batch has no seq_lens [B, K]: padding is known from lengths only, never from token values; "
            "add the real length of each sequence"
        )
    return read_row_sequences(
        batch["seq_lens"], batch.get("seq_lens_padded"), num_rows=len(ids), width=ids.shape[1]
    )


def _columns(batch: Mapping[str, Any], ids: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """Return the token-aligned columns, [B, S] each: ids, labels, positions as int32."""
    columns = {"input_ids": _as_int32(ids, "input_ids")}
    for name in ("labels", "position_ids"):
        if batch.get(name) is not None:
            column = _matrix(batch, name)
            if name == "position_ids" and column.shape == (1, ids.shape[1]):
                # Positions of one row are those of every row.
                column = np.broadcast_to(column, ids.shape)
            if column.shape != ids.shape:
                raise ValueError(f"{name} has shape {list(column.shape)}, input_ids {list(ids.shape)}")
            columns[name] = _as_int32(column, name)
    for name, values in batch.items():
        if name not in BSHD_FIELDS and hasattr(values, "shape"):
            column = _numpy(values)
            if column.shape == ids.shape and column.dtype.kind in "iufb":
                columns[name] = column
    return columns


def _matrix(batch: Mapping[str, Any], name: str) -> npt.NDArray[Any]:
    values = batch.get(name)
    if values is None:
        raise ValueError(f"the batch has no {name}; it has {sorted(batch)}")
    matrix = _numpy(values)
    if matrix.ndim != 2 or matrix.dtype.kind not in "iu":
        raise ValueError(f"{name} must be integers [B, S], got {matrix.dtype} {list(matrix.shape)}")
    return matrix


def _as_int32(values: npt.NDArray[Any], name: str) -> npt.NDArray[np.int32]:
    limits = np.iinfo(np.int32)
    if values.size and (int(values.max()) > limits.max or int(values.min()) < limits.min):
        raise ValueError(f"{name} holds {values.max()} or {values.min()}, which does not fit int32")
    return values.astype(np.int32)


def _numpy(values: Any) -> npt.NDArray[Any]:
    # A tensor brings its own way to numpy, so this module need not import torch.
    found: npt.NDArray[Any] = (
        values.detach().cpu().numpy() if hasattr(values, "detach") else np.asarray(values)
    )
    return found
