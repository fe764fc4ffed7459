"""The layouts, and ``make_layout`` which finds one by name.

In:   a name and its options; ``cu_seqlens_padded`` of a chunk (``padding.py``)
Out:  one ``IndexMap`` per context-parallel rank (``index_map.py``)

The contract they all keep is in ``layout_contract.py``.
"""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any, ClassVar, cast

import numpy as np

from ringfeed.sharding.index_map import IndexMap
from ringfeed.sharding.layout_contract import Layout, check_ranks, checked_offsets
from ringfeed.sharding.magi.layout import MagiLayout
from ringfeed.sharding.ptrr import PtrrLayout
from ringfeed.sharding.run_kernels import Int64Array, dual_chunk_runs
from ringfeed.sharding.whole_document import WholeDocumentLayout

__all__ = [
    "LAYOUT_NAMES",
    "ContiguousLayout",
    "HeadTailLayout",
    "IdentityLayout",
    "Layout",
    "MagiLayout",
    "PtrrLayout",
    "TeLayout",
    "WholeDocumentLayout",
    "make_layout",
    "read_layout",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class TeLayout(Layout):
    """Cut each slot into 2R pieces; rank r holds pieces r and 2R - 1 - r of every slot.

    A late piece attends to more keys than an early one, so pairing from both ends gives
    every rank the same causal work. This is the order that TransformerEngine's
    ``thd_get_partitioned_indices`` defines and its THD attention expects.
    """

    name: ClassVar[str] = "te"
    holds_many_packs: ClassVar[bool] = True

    def length_multiple(self, cp_size: int) -> int:
        check_ranks(cp_size)
        return 2 * cp_size if cp_size > 1 else 1

    def index_map(
        self, cu_seqlens_padded: Any, *, cp_size: int, cp_rank: int, cu_seqlens: Any = None
    ) -> IndexMap:
        offsets = checked_offsets(
            self, cu_seqlens_padded, cp_size=cp_size, cp_rank=cp_rank, cu_seqlens=cu_seqlens
        )
        return _dual_chunk_maps(offsets, cp_size, first_rank=cp_rank, num_ranks=1)[0]

    def index_maps(self, cu_seqlens_padded: Any, *, cp_size: int, cu_seqlens: Any = None) -> list[IndexMap]:
        offsets = checked_offsets(self, cu_seqlens_padded, cp_size=cp_size, cu_seqlens=cu_seqlens)
        return _dual_chunk_maps(offsets, cp_size, first_rank=0, num_ranks=cp_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadTailLayout(Layout):
    """Cut the whole chunk into 2R pieces; rank r holds pieces r and 2R - 1 - r.

    Torch's load-balanced order: equal causal work for one document as long as the chunk,
    whatever the slots are.
    """

    name: ClassVar[str] = "head_tail"

    def base_multiple(self, cp_size: int) -> int:
        check_ranks(cp_size)
        return 2 * cp_size

    def index_map(
        self, cu_seqlens_padded: Any, *, cp_size: int, cp_rank: int, cu_seqlens: Any = None
    ) -> IndexMap:
        offsets = checked_offsets(
            self, cu_seqlens_padded, cp_size=cp_size, cp_rank=cp_rank, cu_seqlens=cu_seqlens
        )
        return _dual_chunk_maps(offsets[[0, -1]], cp_size, first_rank=cp_rank, num_ranks=1)[0]

    def index_maps(self, cu_seqlens_padded: Any, *, cp_size: int, cu_seqlens: Any = None) -> list[IndexMap]:
        offsets = checked_offsets(self, cu_seqlens_padded, cp_size=cp_size, cu_seqlens=cu_seqlens)
        return _dual_chunk_maps(offsets[[0, -1]], cp_size, first_rank=0, num_ranks=cp_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class ContiguousLayout(Layout):
    """Rank r holds the r-th of R equal runs of the chunk. Cheap; unbalanced if causal."""

    name: ClassVar[str] = "contiguous"

    def base_multiple(self, cp_size: int) -> int:
        check_ranks(cp_size)
        return cp_size

    def index_map(
        self, cu_seqlens_padded: Any, *, cp_size: int, cp_rank: int, cu_seqlens: Any = None
    ) -> IndexMap:
        offsets = checked_offsets(
            self, cu_seqlens_padded, cp_size=cp_size, cp_rank=cp_rank, cu_seqlens=cu_seqlens
        )
        return _equal_runs(int(offsets[-1]), cp_size)[cp_rank]

    def index_maps(self, cu_seqlens_padded: Any, *, cp_size: int, cu_seqlens: Any = None) -> list[IndexMap]:
        offsets = checked_offsets(self, cu_seqlens_padded, cp_size=cp_size, cu_seqlens=cu_seqlens)
        return _equal_runs(int(offsets[-1]), cp_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class IdentityLayout(Layout):
    """Every rank holds everything: no context parallelism, or replicas under it."""

    name: ClassVar[str] = "identity"
    holds_many_packs: ClassVar[bool] = True

    def index_map(
        self, cu_seqlens_padded: Any, *, cp_size: int, cp_rank: int, cu_seqlens: Any = None
    ) -> IndexMap:
        offsets = checked_offsets(
            self, cu_seqlens_padded, cp_size=cp_size, cp_rank=cp_rank, cu_seqlens=cu_seqlens
        )
        return _equal_runs(int(offsets[-1]), 1)[0]

    def index_maps(self, cu_seqlens_padded: Any, *, cp_size: int, cu_seqlens: Any = None) -> list[IndexMap]:
        everything = self.index_map(cu_seqlens_padded, cp_size=cp_size, cp_rank=0, cu_seqlens=cu_seqlens)
        return [everything] * cp_size


_LAYOUTS: dict[str, type[Layout]] = {
    layout.name: layout
    for layout in (
        TeLayout,
        HeadTailLayout,
        ContiguousLayout,
        WholeDocumentLayout,
        MagiLayout,
        PtrrLayout,
        IdentityLayout,
    )
}

LAYOUT_NAMES: tuple[str, ...] = tuple(_LAYOUTS)
"""What ``make_layout`` knows."""


def make_layout(name: str, **options: Any) -> Layout:
    """Return the layout called ``name``, set up with its own ``options``.

    Args:
        name: one of ``LAYOUT_NAMES``: ``te``, ``head_tail``, ``contiguous``, ``whole_document``, ``magi``,
            ``ptrr``, ``identity``.
        **options: fields of that layout's class.

    Raises:
        ValueError: if there is no such layout or option, or an option's value is wrong.
    """
    if not isinstance(name, str) or name not in _LAYOUTS:
        raise ValueError(f"unknown layout {name!r}; known: {', '.join(sorted(_LAYOUTS))}")
    layout: Any = _LAYOUTS[name]
    known = [option.name for option in fields(layout) if option.init]
    for option in options:
        if option not in known:
            raise ValueError(
                f"layout {name!r} has no option {option!r}; it has: {', '.join(known) or 'none'}"
            )
    made: Layout = layout(**options)
    return made


def read_layout(value: Layout | str) -> Layout:
    """Return the layout that ``value`` is, or that it names, with default options.

    Raises:
        ValueError: if it is neither.
    """
    if hasattr(value, "index_maps"):
        return cast("Layout", value)
    return make_layout(value)


def _dual_chunk_maps(offsets: Int64Array, cp_size: int, *, first_rank: int, num_ranks: int) -> list[IndexMap]:
    """Return the shares of ``num_ranks`` ranks when every slot is cut into 2R pieces."""
    num_tokens = int(offsets[-1])
    if cp_size == 1:
        return _equal_runs(num_tokens, 1)
    runs, ends, slot = dual_chunk_runs(offsets, cp_size, first_rank, num_ranks)
    if slot >= 0:
        raise ValueError(
            f"slot {slot} has {offsets[slot + 1] - offsets[slot]} tokens, not a multiple of "
            f"{2 * cp_size} (2 * cp_size={cp_size}); pad every document with layout.slot_lengths"
        )
    runs.flags.writeable = False
    num_local = num_tokens // cp_size
    return [
        IndexMap.from_merged(runs[first:end], num_tokens, num_local) for first, end in pairwise(ends.tolist())
    ]


def _equal_runs(num_tokens: int, num_runs: int) -> list[IndexMap]:
    """Return ``num_runs`` maps, each one run of T / ``num_runs`` tokens."""
    width = num_tokens // num_runs
    runs = np.full((num_runs, 2), width, dtype=np.int64)
    runs[:, 0] *= np.arange(num_runs)
    runs.flags.writeable = False
    # An empty chunk has no run at all, rather than an empty one.
    num_rows = min(width, 1)
    return [
        IndexMap.from_merged(runs[index : index + num_rows], num_tokens, width) for index in range(num_runs)
    ]
