"""Loops that move tokens: runs scattered to all ranks, and one rank's runs gathered from documents.

In:   addresses of arrays that the caller has checked and keeps alive, runs, offsets
Out:  the arrays behind the target addresses, filled

Callers: ``views.py`` (all ranks of a chunk that is in memory), ``thd.py`` and ``plan_source.py``
(straight from the corpora). Nothing here checks a bound: the callers do, once per call and not per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.numpy_support import carray

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["IGNORE", "address", "fill_positions", "fill_tokens", "first_slot", "order_segments", "scatter"]

IGNORE = -100
"""Label of a token that is not trained on."""

# Templates: numba takes the pointer's type from them.
_UINT16 = np.zeros(1, dtype=np.uint16)
_INT32 = np.zeros(1, dtype=np.int32)


def address(array: npt.NDArray[Any]) -> int:
    """Return where ``array`` lies. The caller keeps it alive and knows it to be contiguous."""
    # Half the time of array.ctypes.data, which cut_all would pay dozens of times.
    start: int = array.__array_interface__["data"][0]
    return start


def _emit_copy(typingctx: Any, target: Any, source: Any, size: Any) -> Any:  # noqa: ARG001
    """memcpy(target, source, size): addresses and bytes, int64."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        target_pointer = builder.inttoptr(args[0], cgutils.voidptr_t)
        source_pointer = builder.inttoptr(args[1], cgutils.voidptr_t)
        one = context.get_constant(types.int64, 1)
        cgutils.raw_memcpy(  # type: ignore[no-untyped-call]
            builder, target_pointer, source_pointer, args[2], one, align=1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), codegen


def _emit_pointer(typingctx: Any, start: Any, template: Any) -> Any:  # noqa: ARG001
    """Return an address as a pointer to elements of ``template``'s type."""
    pointer = types.CPointer(template.dtype)  # type: ignore[no-untyped-call]

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.inttoptr(args[0], context.get_value_type(pointer))

    return pointer(types.int64, template), codegen


# Any: mypy would count the typing context, which only the compiler passes.
_copy_bytes: Any = intrinsic(_emit_copy)
_pointer: Any = intrinsic(_emit_pointer)


@njit(nogil=True, cache=True)
def order_segments(
    runs: npt.NDArray[np.int64], bounds: npt.NDArray[np.int64], segments: npt.NDArray[np.int64]
) -> None:
    """Put the runs of all ranks into the order of the chunk, so that it is walked once.

    Where no rank has a run at the position reached (a layout that replicates, or whose local order
    is not chunk order), the rest stays rank by rank: as right, only slower.

    Args:
        runs: [K, 2] start and length; rank after rank.
        bounds: [R + 1], rank r has runs ``bounds[r]`` to ``bounds[r + 1]``.
        segments: [K, 4], filled with start, length, rank, place in that rank's local tokens.
    """
    num_ranks = len(bounds) - 1
    upcoming = bounds[:-1].copy()
    local = np.zeros(num_ranks, np.int64)
    count, position, rank, misses = 0, 0, 0, 0
    while misses < num_ranks:
        run = upcoming[rank]
        if run < bounds[rank + 1] and runs[run, 0] == position:
            length = runs[run, 1]
            segments[count, 0], segments[count, 1] = position, length
            segments[count, 2], segments[count, 3] = rank, local[rank]
            upcoming[rank] += 1
            local[rank] += length
            position += length
            count += 1
            misses = 0
        else:
            misses += 1
            rank = rank + 1 if rank + 1 < num_ranks else 0
    for rank in range(num_ranks):
        for run in range(upcoming[rank], bounds[rank + 1]):
            segments[count, 0], segments[count, 1] = runs[run, 0], runs[run, 1]
            segments[count, 2], segments[count, 3] = rank, local[rank]
            local[rank] += runs[run, 1]
            count += 1


@njit(nogil=True, cache=True)
def scatter(
    sources: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
    itemsizes: npt.NDArray[np.int64],
    segments: npt.NDArray[np.int64],
) -> None:
    """Copy every segment of every column to the rank that holds it.

    Args:
        sources: [C] addresses of the columns.
        targets: [C, R] addresses of each rank's part of each column.
        itemsizes: [C] bytes of one token in each column.
        segments: [K, 4] as from ``order_segments``.
    """
    for column in range(len(sources)):
        width = itemsizes[column]
        for i in range(len(segments)):
            _copy_bytes(
                targets[column, segments[i, 2]] + segments[i, 3] * width,
                sources[column] + segments[i, 0] * width,
                segments[i, 1] * width,
            )


@njit(nogil=True, cache=True)
def first_slot(cu_padded: npt.NDArray[np.int32], start: int, slot: int) -> int:
    """Return the slot that holds chunk position ``start``; ``slot`` is where the last run ended."""
    if cu_padded[slot] > start:
        slot = 0
    if slot + 8 < len(cu_padded) and cu_padded[slot + 8] <= start:
        slot = int(np.searchsorted(cu_padded, start, side="right")) - 1
    while cu_padded[slot + 1] <= start:
        slot += 1
    return slot


@njit(nogil=True, cache=True)
def _widen(source: Any, ids: Any, labels: Any, num_labels: int) -> None:
    """Copy ``ids`` from ``source`` and, one token on, the first ``num_labels`` labels."""
    for i in range(len(ids)):
        ids[i] = source[i]
    for i in range(num_labels):
        labels[i] = source[i + 1]
    labels[num_labels:] = IGNORE


@njit(nogil=True, cache=True)
def fill_tokens(
    runs: npt.NDArray[np.int64],
    cu_padded: npt.NDArray[np.int32],
    pieces: npt.NDArray[np.int64],
    pad_id: int,
    ids: npt.NDArray[np.int32],
    labels: npt.NDArray[np.int32],
) -> int:
    """Fill one rank's ids and labels from the documents' own memory; only its runs are read.

    Args:
        runs: [K, 2] start and length in the pack, in local order.
        cu_padded: [N + 1] slot offsets.
        pieces: [N, 4] per slot: real tokens, address of the first one, bytes of a token (2: uint16,
            4: int32), labels (real tokens, or one less where the last has no next token to predict).
        pad_id: token of padding.
        ids: [L], filled.
        labels: [L], filled; ``IGNORE`` where there is nothing to predict.

    Returns:
        How many labels are not ``IGNORE``.
    """
    local, slot, supervised = 0, 0, 0
    for run in range(len(runs)):
        position, end = runs[run, 0], runs[run, 0] + runs[run, 1]
        while position < end:
            slot = first_slot(cu_padded, position, slot)
            offset = position - cu_padded[slot]
            width = min(end, np.int64(cu_padded[slot + 1])) - position
            real = min(max(pieces[slot, 0] - offset, 0), width)
            num_labels = min(max(pieces[slot, 3] - offset, 0), real)
            if real > 0:
                source = pieces[slot, 1] + offset * pieces[slot, 2]
                part, targets = ids[local : local + real], labels[local : local + real]
                # Labels reach one token past the ids, never past what the document has.
                if pieces[slot, 2] == 2:
                    _widen(carray(_pointer(source, _UINT16), real + 1), part, targets, num_labels)
                else:
                    _widen(carray(_pointer(source, _INT32), real + 1), part, targets, num_labels)
            ids[local + real : local + width] = pad_id
            labels[local + real : local + width] = IGNORE
            supervised += num_labels
            local += width
            position += width
    return supervised


@njit(nogil=True, cache=True)
def fill_positions(
    runs: npt.NDArray[np.int64],
    cu_padded: npt.NDArray[np.int32],
    real_lengths: npt.NDArray[np.int64],
    first_positions: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int32],
    mask: npt.NDArray[np.bool_],
) -> None:
    """Fill one rank's position ids and padding mask from offsets alone.

    Args:
        runs: [K, 2] start and length in the pack, in local order.
        cu_padded: [N + 1] slot offsets.
        real_lengths: [N] real tokens of each slot.
        first_positions: [N] position of each slot's first token.
        positions: [L], filled; 0 at padding.
        mask: [L], filled; True at padding.
    """
    local, slot = 0, 0
    for run in range(len(runs)):
        position, end = runs[run, 0], runs[run, 0] + runs[run, 1]
        while position < end:
            slot = first_slot(cu_padded, position, slot)
            offset = position - cu_padded[slot]
            width = min(end, np.int64(cu_padded[slot + 1])) - position
            real = min(max(real_lengths[slot] - offset, 0), width)
            first = first_positions[slot] + offset
            for i in range(real):
                positions[local + i] = first + i
            positions[local + real : local + width] = 0
            mask[local : local + real] = False
            mask[local + real : local + width] = True
            local += width
            position += width
