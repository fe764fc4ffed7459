"""Shard and gather any tensor that is aligned with the tokens of one chunk.

In:   the slot offsets of a chunk's packs, a layout (``sharding/layouts.py``)
Out:  ``ChunkSharder``, which a trainer gets as ``Batch.sharder`` (``pipeline/batch.py``)

Layouts apply per pack: the index map of a chunk is its packs' maps end to end. Maps are made when
they are first asked for, since a trainer that uses only the batch never needs them.

Shapes: T slots in the chunk, S entries of a caller's tensor, L local tokens, R cp ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ringfeed.sharding.index_map import IndexMap, expand_runs, merge
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

    def shard_token_tensor(
        self, x: Tensor, seq_dim: int = 0, fill: float = 0, *, coordinates: str = "slots"
    ) -> Tensor:
        """Return this rank's part of ``x``: [..., S, ...] -> [..., L, ...].

        Differentiable: the gradient of ``x`` has this rank's tokens, and zero for those of other ranks. Added
        over the cp ranks it is that of one process.

        Args:
            x: a tensor with one entry per token in ``seq_dim``, in chunk order; not changed. Fewer than
                the chunk has are followed by ``fill``.
            seq_dim: the tensor dimension of the tokens; negative ones count from the end.
            fill: value of the entries that ``x`` lacks, padding of ``real`` coordinates included.
            coordinates: what an entry of ``x`` is. ``slots``: a token of the chunk, padding too, S <= T.
                ``real``: a real token, pieces end to end without padding, S <= ``cu_seqlens[-1]``.

        Raises:
            ValueError: if ``x`` has no such dimension, or more entries in it than there are tokens, or
                there are no such coordinates.
        """
        _check_dim(x, seq_dim)
        known = self._entries(coordinates)
        num_entries = self.num_tokens if known is None else len(known)
        lacking = num_entries - x.shape[seq_dim]
        if lacking < 0:
            kind = "tokens" if known is None else "real tokens"
            raise ValueError(
                f"x has {x.shape[seq_dim]} entries in dim {seq_dim}, the chunk has {num_entries} {kind}"
            )
        if known is not None:
            positions = known.positions[: x.shape[seq_dim]].to(x.device)
            chunk = x.new_full(_resized(x, seq_dim, self.num_tokens), fill)
            x = chunk.index_copy(seq_dim, positions, x)
        elif lacking:
            import torch

            x = torch.cat([x, x.new_full(_resized(x, seq_dim, lacking), fill)], dim=seq_dim)
        return self.index_map.take(x, dim=seq_dim)

    def gather_token_tensor(
        self,
        x: Tensor,
        seq_dim: int = 0,
        *,
        group: dist.ProcessGroup | None = None,
        coordinates: str = "slots",
        num_entries: int | None = None,
    ) -> Tensor:
        """Return the chunk's tensor from every rank's part: [..., L, ...] -> [..., S, ...].

        Differentiable: the gradient of a part is the sum over the ranks that used it. So a loss of which
        each rank computes its own share is right as it is. One that every rank computes alike, on the
        gathered tensor, gives R times the gradient of one process, summed over cp: right where
        gradients are averaged over the cp ranks (DDP, FSDP), to be divided by R where they are added.
        Layout ``identity`` gathers nothing, and what every rank computes alike comes to the same.

        Args:
            x: this rank's part.
            seq_dim: the tensor dimension of the tokens; negative ones count from the end.
            group: the R cp ranks in cp order; not needed where a rank holds the whole chunk.
            coordinates: as for ``shard_token_tensor``: with ``real``, padding is left out.
            num_entries: S, to trim to: what ``shard_token_tensor`` was given. None: all there are.

        Raises:
            ValueError: if ``x`` does not have L entries, the group is missing or another one, there are
                no such coordinates, or fewer entries than asked for.
        """
        _check_dim(x, seq_dim)
        known = self._entries(coordinates)
        available = self.num_tokens if known is None else len(known)
        if num_entries is not None and not 0 <= num_entries <= available:
            raise ValueError(f"num_entries={num_entries} is not in 0 to {available}, what the chunk has")
        chunk = self._gather_chunk(x, seq_dim, group)
        if known is not None:
            chunk = known.take(chunk, dim=seq_dim)
        return chunk if num_entries is None else chunk.narrow(seq_dim, 0, num_entries)

    def shift_token_tensor(
        self, x: Tensor, by: int, seq_dim: int = 0, *, fill: float, group: dist.ProcessGroup | None = None
    ) -> Tensor:
        """Give each local token the entry of the token ``by`` places later in its piece, on whatever rank.

        For multi-token prediction of depth k: ``shift(labels, k, fill=-100)``, and ``input_ids`` with
        the pad id (``sharding/mtp.py`` has the rules at a piece's end).

        Args:
            x: this rank's part, [..., L, ...].
            by: at least 0.
            seq_dim: the tensor dimension of the tokens.
            fill: for tokens with no such later one in their piece, and for padding.
            group: as for ``gather_token_tensor``.

        Raises:
            ValueError: as ``gather_token_tensor``, or if ``by`` is negative.
        """
        from ringfeed.sharding.mtp import shift_within_pieces

        chunk = self.gather_token_tensor(x, seq_dim, group=group)
        offsets = self.offsets
        shifted = shift_within_pieces(
            chunk, offsets.cu_seqlens, offsets.cu_seqlens_padded, by=by, fill=fill, dim=seq_dim
        )
        return self.shard_token_tensor(shifted, seq_dim)

    def supervised_by_depth(self, labels: Tensor, num_depths: int) -> Tensor:
        """Count this rank's part of the supervised labels at depths 0 to ``num_depths`` - 1: int64 tensor.

        Added over the cp ranks (of layout ``identity``, any one of them) it is the count of the chunk.
        ``ringfeed.pipeline.mtp_counts`` adds up a step. Nothing waits for the device.

        Args:
            labels: this rank's labels [L], of depth 0.
            num_depths: at least 1.

        Raises:
            ValueError: if ``labels`` does not have L entries, or ``num_depths`` is below 1.
        """
        from ringfeed.sharding.mtp import supervised_by_depth

        offsets = self.offsets
        return supervised_by_depth(
            labels,
            offsets.cu_seqlens,
            offsets.cu_seqlens_padded,
            num_depths=num_depths,
            positions=expand_runs(self.index_map.runs),
        )

    def _gather_chunk(self, x: Tensor, seq_dim: int, group: dist.ProcessGroup | None) -> Tensor:
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

    def _entries(self, coordinates: str) -> IndexMap | None:
        """Return which chunk tokens the caller's entries are; None for all of them."""
        if coordinates == "slots":
            return None
        if coordinates != "real":
            raise ValueError(f"coordinates={coordinates!r} must be one of slots, real")
        offsets = self.offsets
        lengths = np.diff(offsets.cu_seqlens)
        runs = np.stack([offsets.cu_seqlens_padded[:-1], lengths], axis=1).astype(np.int64)
        return IndexMap(runs[lengths > 0], self.num_tokens)


def _resized(x: Tensor, dim: int, size: int) -> list[int]:
    shape = list(x.shape)
    shape[dim] = size
    return shape


def _check_dim(x: Tensor, seq_dim: int) -> None:
    if not -x.ndim <= seq_dim < x.ndim:
        raise ValueError(f"x has {x.ndim} dimensions, so no dim {seq_dim}")
