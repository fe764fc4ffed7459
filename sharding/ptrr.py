"""The layout ``ptrr``: blocks of the chunk dealt out by how long their attention takes.

In:   slot offsets [N + 1], and real offsets where some slots hold no document (``padding.py``)
Out:  one ``IndexMap`` per rank (``index_map.py``), each of exactly T / R tokens

The rule, torch's processing-time round robin:

1. The chunk is cut into blocks. A block's time is the number of key blocks in which its queries see
   at least one key, under a mask that is causal inside a slot and sees nothing of other slots.
2. Blocks, longest first and ties in chunk order, are dealt out a round of R at a time: ranks 0 to
   R - 1, in the next round R - 1 to 0, and so on.
3. A rank holds its blocks in chunk order.

Shapes: T slots in the chunk, N slots' count, R ranks, M blocks.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numba import njit

from ringfeed.sharding.index_map import IndexMap
from ringfeed.sharding.layout_contract import Layout, check_ranks, checked_offsets
from ringfeed.sharding.offsets import as_real_offsets
from ringfeed.sharding.run_kernels import Int64Array, merge_adjacent

__all__ = ["PtrrLayout", "block_times", "deal_blocks"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PtrrLayout(Layout):
    """Deal out blocks of ``block`` tokens so that every rank has about the same number of key blocks.

    What torch's FlexAttention computes is whole blocks of its ``BlockMask``, so that is what is
    balanced. Equal to torch's own balancer for the mask of rule 1 above; slots without a real token
    see nothing there.

    Raises:
        ValueError: if ``block`` is no integer of at least 1.
    """

    name: ClassVar[str] = "ptrr"

    block: int = 128
    """Tokens of a block: the BLOCK_SIZE of the trainer's ``BlockMask``, for queries and keys."""

    def __post_init__(self) -> None:
        if not isinstance(self.block, int) or isinstance(self.block, bool) or self.block < 1:
            raise ValueError(f"block must be an integer of at least 1, got {self.block!r}")

    @property
    def options(self) -> dict[str, Any]:
        return {"block": self.block}

    def base_multiple(self, cp_size: int) -> int:
        check_ranks(cp_size)
        return self.block * cp_size

    def index_map(
        self, cu_seqlens_padded: Any, *, cp_size: int, cp_rank: int, cu_seqlens: Any = None
    ) -> IndexMap:
        check_ranks(cp_size, cp_rank)
        return self._index_map(self._deal(cu_seqlens_padded, cp_size, cu_seqlens)[cp_rank], cp_size)

    def index_maps(self, cu_seqlens_padded: Any, *, cp_size: int, cu_seqlens: Any = None) -> list[IndexMap]:
        dealt = self._deal(cu_seqlens_padded, cp_size, cu_seqlens)
        return [self._index_map(blocks, cp_size) for blocks in dealt]

    def _deal(self, cu_seqlens_padded: Any, cp_size: int, cu_seqlens: Any) -> Int64Array:
        offsets = checked_offsets(self, cu_seqlens_padded, cp_size=cp_size)
        real_offsets = offsets if cu_seqlens is None else as_real_offsets(cu_seqlens, offsets)
        return deal_blocks(block_times(offsets, real_offsets, self.block), cp_size)

    def _index_map(self, blocks: Int64Array, cp_size: int) -> IndexMap:
        num_tokens = len(blocks) * cp_size * self.block
        runs = np.empty((len(blocks), 2), dtype=np.int64)
        runs[:, 0] = blocks * self.block
        runs[:, 1] = self.block
        merged, num_local, _ = merge_adjacent(runs, num_tokens)
        merged.flags.writeable = False
        return IndexMap.from_merged(merged, num_tokens, num_local)


@njit(cache=True, nogil=True)
def block_times(offsets: Int64Array, real_offsets: Int64Array, block: int) -> Int64Array:
    """Return the number of key blocks that each block of queries sees, int64 [M].

    Args:
        offsets: slot offsets [N + 1]; T is a multiple of ``block``.
        real_offsets: real offsets [N + 1]; a slot of real length 0 sees nothing.
        block: tokens of a block.
    """
    num_slots = len(offsets) - 1
    times = np.zeros(offsets[-1] // block, dtype=np.int64)
    slot = 0
    for index in range(len(times)):
        start = index * block
        while slot < num_slots and (
            offsets[slot + 1] <= start or real_offsets[slot + 1] == real_offsets[slot]
        ):
            slot += 1
        # The first document in the block reaches back furthest; later ones begin inside it.
        if slot < num_slots and offsets[slot] < start + block:
            times[index] = 1 + max(index - offsets[slot] // block, 0)
    return times


@njit(cache=True, nogil=True)
def deal_blocks(times: Int64Array, num_ranks: int) -> Int64Array:
    """Return the blocks of each rank in rising order, int64 [R, M / R].

    Args:
        times: int64 [M] of at least 0, M a multiple of R.
        num_ranks: R.
    """
    num_blocks = len(times)
    # No time is above M. ``places[t]`` is where the next block of time t stands, longest first.
    places = np.zeros(num_blocks + 1, dtype=np.int64)
    for time in times:
        places[time] += 1
    before = 0
    for time in range(num_blocks, -1, -1):
        before, places[time] = before + places[time], before
    dealt = np.empty((num_ranks, num_blocks // num_ranks), dtype=np.int64)
    held = np.zeros(num_ranks, dtype=np.int64)
    # In chunk order, so that ties and each rank's blocks come in that order without a sort.
    for index in range(num_blocks):
        turn, rank = divmod(places[times[index]], num_ranks)
        places[times[index]] += 1
        if turn % 2:
            rank = num_ranks - 1 - rank
        dealt[rank, held[rank]] = index
        held[rank] += 1
    return dealt
