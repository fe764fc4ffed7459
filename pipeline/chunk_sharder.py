"""Shard and gather any tensor that is aligned with the tokens of one chunk.

In:   the slot offsets of a chunk's packs, a layout (``sharding/layouts.py``)
Out:  ``ChunkSharder``, which a trainer gets as ``Batch.sharder`` (``pipeline/batch.py``)

Layouts apply per pack: the index map of a chunk is its packs' maps end to end. Maps are made when
they are first asked for, since a trainer that uses only the batch never needs them.

Shapes: T slots in the chunk, L local tokens, R cp ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ringfeed.sharding.index_map import IndexMap, merge
from ringfeed.sharding.padding import SlotOffsets, concat_offsets

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch.distributed as dist
    from torch import Tensor

    from ringfeed.sharding.layouts import Layout

__all__ = ["ChunkSharder", "concat_index_maps"]


def concat_index_maps(index_maps: Sequence[IndexMap]) -> IndexMap:
    """Return the map of packs laid end to end, from one rank's map of each pack."""
    sizes = [index_map.num_tokens for index_map in index_maps]
    runs = [index_map.runs.copy() for index_map in index_maps]
    for start, pack_runs in zip(np.cumsum([0, *sizes]), runs, strict=False):
        pack_runs[:, 0] += start
    return IndexMap(np.concatenate(runs), sum(sizes))


class ChunkSharder:
    """Moves token-aligned tensors between a chunk [T] and this rank's share [L]."""

    __slots__ = ("_maps", "_packs", "cp_rank", "cp_size", "layout")

    def __init__(self, *, layout: Layout, cp_size: int, cp_rank: int, packs: Sequence[SlotOffsets]) -> None:
        self.layout = layout
        self.cp_size = cp_size
        self.cp_rank = cp_rank
        self._packs = tuple(packs)
        self._maps: tuple[IndexMap, ...] | None = None

    @property
    def offsets(self) -> SlotOffsets:
        """Slot offsets of the whole chunk, on the host."""
        return concat_offsets(self._packs)

    @property
    def num_tokens(self) -> int:
        """T."""
        return sum(int(pack.cu_seqlens_padded[-1]) for pack in self._packs)

    @property
    def index_maps(self) -> tuple[IndexMap, ...]:
        """The chunk's index map of every cp rank."""
        if self._maps is None:
            by_pack = [
                self.layout.index_maps(
                    pack.cu_seqlens_padded, cp_size=self.cp_size, cu_seqlens=pack.cu_seqlens
                )
                for pack in self._packs
            ]
            self._maps = tuple(concat_index_maps(of_rank) for of_rank in zip(*by_pack, strict=True))
        return self._maps

    @property
    def index_map(self) -> IndexMap:
        """This rank's index map of the chunk."""
        return self.index_maps[self.cp_rank]

    def shard_token_tensor(self, x: Tensor, seq_dim: int = 0, fill: float = 0) -> Tensor:
        """Return this rank's part of ``x``: [..., S, ...] -> [..., L, ...], S <= T.

        Args:
            x: a tensor with one entry per chunk token in ``seq_dim``; not changed. Fewer than T
                entries are followed by ``fill``.
            seq_dim: the tensor dimension of the tokens; negative ones count from the end.
            fill: value of the entries that ``x`` lacks.

        Raises:
            ValueError: if ``x`` has no such dimension, or more than T entries in it.
        """
        _check_dim(x, seq_dim)
        lacking = self.num_tokens - x.shape[seq_dim]
        if lacking < 0:
            raise ValueError(
                f"x has {x.shape[seq_dim]} entries in dim {seq_dim}, the chunk has {self.num_tokens} tokens"
            )
        if lacking:
            import torch

            shape = list(x.shape)
            shape[seq_dim] = lacking
            x = torch.cat([x, x.new_full(shape, fill)], dim=seq_dim)
        return self.index_map.take(x, dim=seq_dim)

    def gather_token_tensor(
        self, x: Tensor, seq_dim: int = 0, *, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Return the chunk's tensor from every rank's part: [..., L, ...] -> [..., T, ...].

        Differentiable: the gradient of a part is the sum over the ranks that used it.

        Args:
            x: this rank's part.
            seq_dim: the tensor dimension of the tokens; negative ones count from the end.
            group: the R cp ranks in cp order; not needed where a rank holds the whole chunk.

        Raises:
            ValueError: if ``x`` does not have L entries, or the group is missing or another one.
        """
        _check_dim(x, seq_dim)
        num_local = len(self.index_map)
        if x.shape[seq_dim] != num_local:
            raise ValueError(
                f"x has {x.shape[seq_dim]} entries in dim {seq_dim}, this rank holds {num_local}"
            )
        if num_local == self.num_tokens:
            return merge([self.index_map], [x], dim=seq_dim)
        if group is None:
            raise ValueError(f"the chunk is cut into {self.cp_size} parts: pass group=, the cp process group")
        if (group.size(), group.rank()) != (self.cp_size, self.cp_rank):
            raise ValueError(
                f"this is cp rank {self.cp_rank} of {self.cp_size}, but rank {group.rank()} of "
                f"{group.size()} in the group"
            )
        from ringfeed.sharding.attention.gather import gather_rows

        longest = max(map(len, self.index_maps))
        rows = gather_rows(x.movedim(seq_dim, 0), part_length=longest, group=group)
        parts = [
            rows[rank * longest : rank * longest + len(index_map)]
            for rank, index_map in enumerate(self.index_maps)
        ]
        return merge(self.index_maps, parts).movedim(0, seq_dim)


def _check_dim(x: Tensor, seq_dim: int) -> None:
    if not -x.ndim <= seq_dim < x.ndim:
        raise ValueError(f"x has {x.ndim} dimensions, so no dim {seq_dim}")
