"""What every layout promises: from slot offsets to one index map per context-parallel rank.

In:   ``cu_seqlens_padded`` of a chunk, [N + 1] slot offsets (``padding.py``)
Out:  one ``IndexMap`` per rank (``index_map.py``)

A layout is arithmetic on lengths: it never sees token values, a device or a process
group, so every rank, worker and test can compute any rank's share.

Shapes: T slots in the chunk, L local tokens, N slots' count, R cp ranks.
"""

import math
from typing import Any, Protocol

from ringfeed.sharding.index_map import IndexMap
from ringfeed.sharding.offsets import as_offsets, as_real_offsets
from ringfeed.sharding.padding import slot_lengths
from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["Layout", "check_ranks", "checked_offsets"]


class Layout(Protocol):
    """Decides which chunk positions each context-parallel rank holds.

    A layout names itself and says how ``index_map`` works; what follows from its multiples
    is here, once.
    """

    @property
    def name(self) -> str:
        """What ``make_layout`` calls this layout."""
        ...

    @property
    def options(self) -> dict[str, Any]:
        """JSON-able arguments with which ``make_layout`` makes the same layout again."""
        return {}

    @property
    def holds_many_packs(self) -> bool:
        """Whether a chunk may be several packs end to end; else it is one pack."""
        return False

    def length_multiple(self, cp_size: int) -> int:
        """Return the multiple that every slot must have."""
        check_ranks(cp_size)
        return 1

    def base_multiple(self, cp_size: int) -> int:
        """Return what this layout alone needs T to be a multiple of."""
        return self.length_multiple(cp_size)

    def slot_lengths(self, lengths: Any, *, cp_size: int) -> Int64Array:
        """Return the slot of each piece, int64 [N]: ``lengths`` [N] padded to the multiple."""
        return slot_lengths(lengths, multiple=self.length_multiple(cp_size))

    def chunk_multiple(self, *, cp_size: int, tp_size: int = 1, unit: int = 1) -> int:
        """Return what T must be a multiple of in this run.

        Args:
            cp_size: context-parallel ranks, R.
            tp_size: tensor-parallel ranks that split a rank's L tokens again.
            unit: what each part after that must be a multiple of, such as 16 for FP8.

        Raises:
            ValueError: if one of them is below 1.
        """
        for field, value in (("tp_size", tp_size), ("unit", unit)):
            if value < 1:
                raise ValueError(f"{field} must be at least 1, got {value}")
        return math.lcm(self.base_multiple(cp_size), cp_size * tp_size * unit)

    def index_map(
        self, cu_seqlens_padded: Any, *, cp_size: int, cp_rank: int, cu_seqlens: Any = None
    ) -> IndexMap:
        """Return the share of ``cp_rank``.

        Args:
            cu_seqlens_padded: slot offsets [N + 1], 1-D integers (tensor, array or list).
            cp_size: context-parallel ranks, R.
            cp_rank: 0 <= cp_rank < R.
            cu_seqlens: real offsets [N + 1]; without them every slot counts as real.

        Raises:
            ValueError: if the offsets are no offsets, a slot breaks ``length_multiple`` (the
                slot is named), T breaks ``base_multiple``, or there is no such rank.
        """
        ...

    def index_maps(self, cu_seqlens_padded: Any, *, cp_size: int, cu_seqlens: Any = None) -> list[IndexMap]:
        """Return the shares of all R ranks: ``index_map`` of each, from one pass."""
        ...


def check_ranks(cp_size: int, cp_rank: int = 0) -> None:
    """Refuse sizes and ranks that do not exist.

    Raises:
        ValueError: if ``cp_size`` is below 1, or ``cp_rank`` outside [0, cp_size).
    """
    if cp_size < 1:
        raise ValueError(f"cp_size must be at least 1, got {cp_size}")
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank={cp_rank} must be at least 0 and below cp_size={cp_size}")


def checked_offsets(
    layout: Layout, cu_seqlens_padded: Any, *, cp_size: int, cp_rank: int = 0, cu_seqlens: Any = None
) -> Int64Array:
    """Return the slot offsets, int64 [N + 1], after the checks that all layouts share.

    Raises:
        ValueError: as ``Layout.index_map``, but for slots that break ``length_multiple``.
    """
    check_ranks(cp_size, cp_rank)
    offsets = as_offsets(cu_seqlens_padded)
    if cu_seqlens is not None:
        as_real_offsets(cu_seqlens, offsets)
    # A layout whose slots have the multiple has it in T as well, and names the slot itself.
    multiple = layout.base_multiple(cp_size)
    num_tokens = int(offsets[-1])
    if layout.length_multiple(cp_size) != multiple and num_tokens % multiple:
        below = num_tokens // multiple * multiple
        raise ValueError(
            f"the chunk has {num_tokens} tokens, but layout {layout.name!r} at cp_size={cp_size} needs a "
            f"multiple of {multiple}; nearest valid: {[n for n in (below, below + multiple) if n > 0]}"
        )
    return offsets
