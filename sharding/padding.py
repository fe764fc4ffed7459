"""The one pad rule: how long each piece's slot is, and where the slots of a pack lie.

In:   piece lengths of one pack, and the multiple a layout asks for (``layouts.py``)
Out:  ``SlotOffsets``, stored with the data, from which everything later tells padding

A piece of n tokens takes a slot of ceil(n / multiple) * multiple. What is left of the
pack is one tail slot without a real token. Nothing else in ringfeed computes a slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ringfeed.sharding.offsets import as_integers
from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["SlotOffsets", "concat_offsets", "cumulate", "footprint", "slot_lengths", "slot_offsets"]

_LARGEST_OFFSET = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SlotOffsets:
    """Where the slots of a pack, or of a chunk of packs, begin and end."""

    cu_seqlens: npt.NDArray[np.int32]
    """int32 [N + 1], offsets by real length."""
    cu_seqlens_padded: npt.NDArray[np.int32]
    """int32 [N + 1], offsets by slot length; the last one is T."""


def slot_lengths(lengths: Any, *, multiple: int) -> Int64Array:
    """Return the slot of each piece: int64 [N], ``lengths`` rounded up to ``multiple``.

    Args:
        lengths: N >= 0 piece lengths, 1-D integers (tensor, array or list), 0 allowed.
        multiple: what every slot must be a multiple of, at least 1.

    Raises:
        ValueError: if a length is negative, or ``multiple`` is below 1.
    """
    if multiple < 1:
        raise ValueError(f"multiple must be at least 1, got {multiple}")
    counts = as_integers(lengths, name="lengths")
    if (counts < 0).any():
        piece = int((counts < 0).argmax())
        raise ValueError(f"piece {piece} has length {counts[piece]}; lengths must be at least 0")
    return -(-counts // multiple) * multiple


def footprint(lengths: Any, *, multiple: int) -> int:
    """Return how many tokens of a pack the slots of ``lengths`` take together."""
    return int(slot_lengths(lengths, multiple=multiple).sum())


def slot_offsets(lengths: Any, *, multiple: int, total: int, real_lengths: Any = None) -> SlotOffsets:
    """Lay the slots of one pack end to end and close it with its tail slot.

    Args:
        lengths: N >= 0 piece lengths that the slots are made for.
        multiple: what every slot but the tail is a multiple of.
        total: T, the tokens of the pack, at least 1.
        real_lengths: real tokens in each slot, where they differ from ``lengths``: a
            skipped piece keeps its slot and has none.

    Returns:
        One slot per piece, then exactly one tail slot of real length 0 if T exceeds the
        footprint. A pack without pieces is ``cu_seqlens [0, 0]``, padded ``[0, T]``.

    Raises:
        ValueError: if the slots do not fit into T, T does not fit into int32, or the real
            lengths are more than the slots hold.
    """
    slots = slot_lengths(lengths, multiple=multiple)
    real = as_integers(lengths if real_lengths is None else real_lengths, name="real_lengths")
    _check_fit(slots, real, multiple=multiple, total=total)
    tail = total - int(slots.sum())
    if tail:
        slots, real = np.append(slots, tail), np.append(real, 0)
    return SlotOffsets(cu_seqlens=cumulate(real), cu_seqlens_padded=cumulate(slots))


def concat_offsets(packs: Sequence[SlotOffsets]) -> SlotOffsets:
    """Lay the packs of one chunk end to end: P packs of N_p slots -> one of sum(N_p).

    Raises:
        ValueError: if there is no pack, or the chunk does not fit into int32.
    """
    if not packs:
        raise ValueError("a chunk needs at least one pack, got none")
    real = np.concatenate([np.diff(pack.cu_seqlens) for pack in packs])
    slots = np.concatenate([np.diff(pack.cu_seqlens_padded) for pack in packs])
    _check_total(int(slots.sum(dtype=np.int64)))
    return SlotOffsets(cu_seqlens=cumulate(real), cu_seqlens_padded=cumulate(slots))


def cumulate(lengths: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int32]:
    """Return the offsets of ``lengths`` laid end to end: [N] -> int32 [N + 1].

    Raises:
        ValueError: if they do not fit into int32.
    """
    if int(lengths.sum(dtype=np.int64)) > _LARGEST_OFFSET:
        raise ValueError(f"{lengths.sum(dtype=np.int64)} tokens do not fit: offsets are int32")
    # int32: the attention kernels refuse int64 offsets.
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _check_fit(slots: Int64Array, real: Int64Array, *, multiple: int, total: int) -> None:
    _check_total(total)
    needed = int(slots.sum())
    if needed > total:
        raise ValueError(
            f"{len(slots)} pieces padded to a multiple of {multiple} take {needed} tokens, "
            f"{needed - total} more than the pack's {total}"
        )
    if len(real) != len(slots):
        raise ValueError(f"real_lengths has {len(real)} entries for {len(slots)} pieces")
    wrong = (real < 0) | (real > slots)
    if wrong.any():
        piece = int(wrong.argmax())
        raise ValueError(f"piece {piece} has {real[piece]} real tokens, but its slot holds {slots[piece]}")


def _check_total(total: int) -> None:
    if not 1 <= total <= _LARGEST_OFFSET:
        raise ValueError(f"total={total} must be between 1 and {_LARGEST_OFFSET}: offsets are int32")
