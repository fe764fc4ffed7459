"""The layout ``magi``: each pack dealt out as MagiAttention deals it out, so that its kernels run on it.

In:   slot offsets [N + 1], and real offsets where some slots hold no document (``sharding/padding.py``)
Out:  one ``IndexMap`` per rank (``sharding/index_map.py``), or the whole ``MagiPartition``

Shapes: T slots in the chunk, T' with MagiAttention's padding, R ranks.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from ringfeed.sharding.index_map import IndexMap
from ringfeed.sharding.layout_contract import Layout, check_ranks
from ringfeed.sharding.magi.chunking import ChunkRule
from ringfeed.sharding.magi.masks import NO_WINDOW, DocumentMask, document_mask
from ringfeed.sharding.magi.partition import MagiPartition, partition_stream
from ringfeed.sharding.magi.slice_kernels import document_ranges
from ringfeed.sharding.magi.slices import MaskKind, MaskSlices, SliceTuple
from ringfeed.sharding.magi.solver import Solver
from ringfeed.sharding.magi.solvers import make_solver, solver_names
from ringfeed.sharding.offsets import as_offsets, as_real_offsets
from ringfeed.sharding.run_kernels import Int64Array
from ringfeed.sharding.window import read_sides

__all__ = ["MagiLayout"]

_NO_TOKENS = IndexMap(np.empty((0, 2), dtype=np.int64), 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class MagiLayout(Layout):
    """Cut the pack into equal chunks and give every rank as much attention work as the others.

    An index map covers the padded stream: ``num_tokens`` is T', and ``take`` wants that many rows. Packs
    whose T is a multiple of ``chunk_multiple`` are not padded: T' is T.

    Raises:
        ValueError: if an option, or a pair of options, makes no sense.
    """

    name: ClassVar[str] = "magi"

    chunk_size: int | None = None
    """Most tokens of a chunk; short packs get shorter ones. None: as the number of chunks wants it."""
    algorithm: str = "min_heap"
    """min_heap, sequential_select, topp_heap, batch_topp_heap, sorted_sequential_select or
    backtracing_pruning."""
    min_chunks_per_rank: int = 8
    """MagiAttention's MAGI_ATTENTION_MIN_CHUNKS_PER_RANK; the trainer's must be the same."""
    uneven: bool = False
    """Pad nothing; ranks then hold different numbers of tokens."""
    causal: bool = True
    """Whether a query sees its document up to itself, or all of it."""
    window: tuple[int, int] = NO_WINDOW
    """Keys before and after its own that a query sees, -1: all of them. Needs ``causal=False``."""
    top_p: float | None = None
    """Of topp_heap and batch_topp_heap: part of the ranks looked at. None: 0."""
    num_of_select_chunk: int | None = None
    """Of batch_topp_heap: chunks placed together. None: 1."""
    allocation_ratio: float | None = None
    """Of sorted_sequential_select: part of a slice that a rank gets at a time. None: 1."""
    _rule: ChunkRule = field(init=False, repr=False, compare=False)
    _mask: DocumentMask = field(init=False, repr=False, compare=False)
    _solver: Solver = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "window", read_sides(self.window))
        for name in ("uneven", "causal"):
            if getattr(self, name) not in (True, False):
                raise ValueError(f"{name} must be True or False, got {getattr(self, name)!r}")
        # Each of these checks its own options. They are kept: dealing a pack out takes about as long as
        # making them.
        object.__setattr__(self, "_rule", self._make_rule())
        object.__setattr__(self, "_mask", document_mask(causal=self.causal, window=self.window))
        object.__setattr__(self, "_solver", self._make_solver())
        if self.uneven and not self.solver.takes_uneven:
            raise ValueError(
                f"uneven=True needs an algorithm that takes unequal numbers of chunks, "
                f"{' or '.join(solver_names(uneven=True))}; algorithm={self.algorithm!r} does not"
            )

    @property
    def rule(self) -> ChunkRule:
        """How long chunks are."""
        return self._rule

    @property
    def mask(self) -> DocumentMask:
        """What a query sees of its document."""
        return self._mask

    @property
    def solver(self) -> Solver:
        """Who gets which chunk."""
        return self._solver

    def _make_rule(self) -> ChunkRule:
        return ChunkRule(
            chunk_size=self.chunk_size, min_chunks_per_rank=self.min_chunks_per_rank, uneven=self.uneven
        )

    def _make_solver(self) -> Solver:
        options = {
            "top_p": self.top_p,
            "num_of_select_chunk": self.num_of_select_chunk,
            "allocation_ratio": self.allocation_ratio,
        }
        return make_solver(
            self.algorithm, {name: value for name, value in options.items() if value is not None}
        )

    @property
    def options(self) -> dict[str, Any]:
        return {
            "chunk_size": self.chunk_size,
            "algorithm": self.algorithm,
            "min_chunks_per_rank": self.min_chunks_per_rank,
            "uneven": self.uneven,
            "causal": self.causal,
            "window": list(self.window),
            "top_p": self.top_p,
            "num_of_select_chunk": self.num_of_select_chunk,
            "allocation_ratio": self.allocation_ratio,
        }

    def base_multiple(self, cp_size: int) -> int:
        check_ranks(cp_size)
        return self.rule.pad_free_multiple(cp_size)

    def chunk_multiple(self, *, cp_size: int, tp_size: int = 1, unit: int = 1) -> int:
        """Return what T must be a multiple of, so that MagiAttention pads nothing.

        Raises:
            ValueError: if a size is below 1, or ranks of different lengths are to be split again.
        """
        multiple = Layout.chunk_multiple(self, cp_size=cp_size, tp_size=tp_size, unit=unit)
        if self.uneven and tp_size * unit > 1:
            raise ValueError(
                f"uneven=True gives ranks different numbers of tokens, which tp_size={tp_size} and "
                f"unit={unit} cannot split; use uneven=False"
            )
        return multiple

    def slices(self, cu_seqlens_padded: Any, *, cu_seqlens: Any = None) -> MaskSlices:
        """Return the mask of a chunk, for ``partition_slices`` and for MagiAttention's own keys.

        A slice covers its slot, pads included. Slots without a real token see nothing and come last; in a
        chunk that has no other, they count as real, because MagiAttention refuses a mask without a pair.

        Args:
            cu_seqlens_padded: slot offsets [N + 1], 1-D integers (tensor, array or list).
            cu_seqlens: real offsets [N + 1]; without them every slot counts as real.

        Raises:
            ValueError: if these are no offsets, or do not fit each other.
        """
        return self._slices(as_offsets(cu_seqlens_padded), cu_seqlens)

    def _slices(self, offsets: Int64Array, cu_seqlens: Any) -> MaskSlices:
        slots = document_ranges(offsets, offsets)
        if cu_seqlens is None:
            return self.mask.slices(slots)
        is_real = np.diff(as_real_offsets(cu_seqlens, offsets)) > 0
        if is_real.all() or not is_real.any():
            return self.mask.slices(slots)
        empty = slots[~is_real]
        empty[:, 2:] = 0
        return self.mask.slices(slots[is_real]).joined(MaskSlices.of_kind(MaskKind.FULL, empty))

    def partition(self, cu_seqlens: Any, *, cp_size: int) -> MagiPartition:
        """Return how documents end to end are dealt out, under this layout's mask.

        Args:
            cu_seqlens: offsets of the documents [N + 1], 1-D integers (tensor, array or list).
            cp_size: context-parallel ranks, R.

        Raises:
            ValueError: as ``partition_slices``, or if these are no offsets.
        """
        offsets = as_offsets(cu_seqlens, name="cu_seqlens")
        return self.partition_slices(self._slices(offsets, None), int(offsets[-1]), cp_size=cp_size)

    def partition_slices(
        self, slices: MaskSlices | Iterable[SliceTuple], total: int, *, cp_size: int
    ) -> MagiPartition:
        """Return how a stream of ``total`` tokens is dealt out under a mask of the caller's.

        Args:
            slices: (q0, q1, k0, k1, "full" | "causal" | "inv_causal" | "bi_causal") each, half-open.
            total: T; tokens in no slice see nothing.
            cp_size: context-parallel ranks, R.

        Raises:
            ValueError: if a slice is none or does not lie in the stream, no query has a key, or there are
                too few tokens for so many ranks.
        """
        read = MaskSlices.read(slices)
        return partition_stream(read, total, cp_size=cp_size, rule=self.rule, solver=self.solver)

    def index_map(
        self, cu_seqlens_padded: Any, *, cp_size: int, cp_rank: int, cu_seqlens: Any = None
    ) -> IndexMap:
        check_ranks(cp_size, cp_rank)
        # Who gets a chunk depends on everyone's work, so all are dealt out also for one share.
        dealt = self._deal_out(cu_seqlens_padded, cp_size, cu_seqlens)
        return _NO_TOKENS if dealt is None else dealt.index_map(cp_rank)

    def index_maps(self, cu_seqlens_padded: Any, *, cp_size: int, cu_seqlens: Any = None) -> list[IndexMap]:
        check_ranks(cp_size)
        dealt = self._deal_out(cu_seqlens_padded, cp_size, cu_seqlens)
        return [_NO_TOKENS] * cp_size if dealt is None else dealt.index_maps

    def _deal_out(self, cu_seqlens_padded: Any, cp_size: int, cu_seqlens: Any) -> MagiPartition | None:
        """Return the partition of a chunk; None for one without tokens."""
        offsets = as_offsets(cu_seqlens_padded)
        num_tokens = int(offsets[-1])
        if num_tokens == 0:
            return None
        return self.partition_slices(self._slices(offsets, cu_seqlens), num_tokens, cp_size=cp_size)
