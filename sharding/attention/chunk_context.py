"""What a rank's attention over gathered keys needs to know of a chunk.

In:   a chunk's offsets and index maps (``sharding/layouts.py``)
Out:  ``AllGatherContext``, made once a chunk and used by every layer (``allgather.py``)

Shapes: T slots in the chunk, L local tokens, N slots' count, R cp ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from ringfeed.sharding.attention.kernels import AttentionKernel
from ringfeed.sharding.index_map import IndexMap, expand_runs
from ringfeed.sharding.offsets import as_offsets, as_real_offsets
from ringfeed.sharding.run_kernels import Int64Array
from ringfeed.sharding.window import CAUSAL, DocumentSpans, Window

__all__ = ["AllGatherContext", "ChunkSlots", "allgather_context"]


_HOST = torch.device("cpu")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ChunkSlots:
    """The slots of a chunk in chunk order, and what is behind the last one: padding."""

    bounds: Int64Array
    """int64 [N + 1], where each slot begins, and where the last one ends."""
    lengths: Int64Array
    """int64 [N + 1], real tokens of each slot, and none behind the last one."""

    def spans(self, tokens: Int64Array) -> DocumentSpans:
        """Return the document of each token (int64 [Q], chunk positions); a pad's begins and ends at 0."""
        ids, is_pad = self._find(tokens)
        starts = self.bounds[ids]
        stops = starts + self.lengths[ids]
        starts[is_pad] = stops[is_pad] = 0
        return DocumentSpans(queries=tokens, starts=starts, stops=stops)

    def describe(self, tokens: Int64Array) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Return each token's slot, -1 for padding, and its offset there, 0 for padding: int32 [Q] each."""
        ids, is_pad = self._find(tokens)
        offsets = tokens - self.bounds[ids]
        ids[is_pad], offsets[is_pad] = -1, 0
        return ids.astype(np.int32), offsets.astype(np.int32)

    def _find(self, tokens: Int64Array) -> tuple[Int64Array, NDArray[np.bool_]]:
        """Return each token's slot, int64 [Q], and whether it is padding, bool [Q]."""
        # A token is in the last slot that begins at it or before: that one is not empty.
        ids = np.searchsorted(self.bounds, tokens, side="right") - 1
        return ids, tokens >= (self.bounds + self.lengths)[ids]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class AllGatherContext:
    """What one rank's attention needs to know of a chunk. Made once, used by every layer."""

    num_tokens: int
    """T."""
    slots: ChunkSlots
    """Where the chunk's documents lie, on the host."""
    spans: DocumentSpans
    """The document of each local token as a range of chunk positions, on the host."""
    key_order: Tensor | None
    """int64 [T], the gathered row of each chunk token; None if they are in chunk order."""
    num_parts: int
    """R; 1 where the rank holds the whole chunk and nothing is gathered."""
    part_length: int
    """Rows of the longest part."""
    cp_rank: int
    window: Window
    """What a query sees of its document."""
    kernel: AttentionKernel | None = None
    """What attends; None: ``kernel_for`` chooses by the tensors' device."""
    device: torch.device = _HOST
    """Where the context's tensors are."""
    _described: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    """Document ids and positions of tokens, made when somebody asks: attention reads ``spans`` alone."""
    _masks: dict[tuple[AttentionKernel, Window], Any] = field(default_factory=dict, repr=False)
    """Masks by kernel and window, shared with the contexts of others: the next layer finds its own here."""

    @property
    def num_local(self) -> int:
        """L."""
        return len(self.spans.queries)

    @property
    def local_document_ids(self) -> Tensor:
        """int32 [L], slot of the chunk that each local token is in, -1 for padding; made once."""
        return self._describe("local")[0]

    @property
    def local_positions(self) -> Tensor:
        """int32 [L], offset of each local token in its slot, 0 for padding; made once."""
        return self._describe("local")[1]

    @property
    def global_document_ids(self) -> Tensor:
        """int32 [T], as ``local_document_ids``, for the chunk in chunk order; made once."""
        return self._describe("global")[0]

    @property
    def global_positions(self) -> Tensor:
        """int32 [T], as ``local_positions``, for the chunk in chunk order; made once."""
        return self._describe("global")[1]

    def _describe(self, part: Literal["local", "global"]) -> tuple[Tensor, Tensor]:
        if part not in self._described:
            tokens = self.spans.queries if part == "local" else np.arange(self.num_tokens)
            ids, positions = (torch.from_numpy(values) for values in self.slots.describe(tokens))
            self._described[part] = (ids.to(self.device), positions.to(self.device))
        return self._described[part]

    def to(self, device: torch.device | str) -> "AllGatherContext":
        """Return the same context with its tensors on ``device``."""
        order = None if self.key_order is None else self.key_order.to(device)
        return replace(self, device=torch.device(device), key_order=order, _described={}, _masks={})

    def with_window(self, window: Window | tuple[int, int]) -> "AllGatherContext":
        """Return the context of a layer that sees ``window`` of the same chunk. Cheap: call it in the layer.

        Args:
            window: tokens before and after its own that a query sees, of its document; -1: all of them.
                (-1, 0) is causal, (-1, -1) the whole document, (w, 0) a causal sliding window, of w tokens
                and the query's own.

        Raises:
            ValueError: if ``window`` is not two integers of at least -1.
        """
        return replace(self, window=Window.read(window))

    def with_kernel(self, kernel: AttentionKernel | None) -> "AllGatherContext":
        """Return the context of a layer that attends with ``kernel``: ``SdpaBlocks()``, ``FlexBlocks()``."""
        return replace(self, kernel=kernel)

    def key_ranges(self) -> tuple[Int64Array, Int64Array]:
        """Return each local token's keys, int64 [L] each: first chunk position and end, on the host."""
        return self.spans.key_ranges(self.window)

    def mask(self, kernel: AttentionKernel) -> Any:
        """Return the mask of this window as ``kernel`` wants it: made once."""
        key = (kernel, self.window)
        if key not in self._masks:
            self._masks[key] = kernel.mask(self)
        return self._masks[key]


def allgather_context(
    cu_seqlens: ArrayLike | Tensor,
    cu_seqlens_padded: ArrayLike | Tensor,
    index_maps: Sequence[IndexMap],
    cp_rank: int,
    *,
    window: Window | tuple[int, int] = CAUSAL,
) -> AllGatherContext:
    """Describe a chunk to ``allgather_attention``. Arithmetic on lengths, on the CPU.

    Args:
        cu_seqlens: real offsets, int [N + 1].
        cu_seqlens_padded: slot offsets, int [N + 1].
        index_maps: one per cp rank. They tile the chunk, or each holds all of it.
        cp_rank: which of them is this rank's.
        window: what a query sees of its document (``AllGatherContext.with_window``).

    Raises:
        ValueError: if offsets and index maps do not belong together, the maps do not tile, or ``window``
            is none.
    """
    slots = as_offsets(cu_seqlens_padded, name="cu_seqlens_padded")
    lengths = np.diff(as_real_offsets(cu_seqlens, slots))
    if not 0 <= cp_rank < len(index_maps):
        raise ValueError(f"cp_rank={cp_rank} is not in 0 to {len(index_maps) - 1}")
    num_tokens = index_maps[cp_rank].num_tokens
    if any(index_map.num_tokens != num_tokens for index_map in index_maps):
        raise ValueError(f"index maps cover different chunks: {[m.num_tokens for m in index_maps]} tokens")
    if slots[-1] > num_tokens:
        raise ValueError(
            f"cu_seqlens_padded ends at {slots[-1]}, but the index maps cover {num_tokens} tokens"
        )
    # Magi's maps may cover more than the slots: one more slot, of padding.
    described = ChunkSlots(bounds=slots, lengths=np.append(lengths, 0))
    local = expand_runs(index_maps[cp_rank].runs)
    # A rank that holds every token (cp 1, layout identity) has the keys already.
    parts = [local] if len(local) == num_tokens else [expand_runs(m.runs) for m in index_maps]
    part_length = max(len(part) for part in parts)
    return AllGatherContext(
        num_tokens=num_tokens,
        slots=described,
        spans=described.spans(local),
        key_order=_key_order(parts, num_tokens, part_length),
        num_parts=len(parts),
        part_length=part_length,
        cp_rank=cp_rank,
        window=Window.read(window),
    )


def _key_order(parts: Sequence[NDArray[np.int64]], num_tokens: int, part_length: int) -> Tensor | None:
    """Return int64 [T]: the row of each chunk token in the gathered parts; None if row i is token i."""
    held = np.concatenate(parts)
    holders = np.bincount(held, minlength=num_tokens)
    if (holders != 1).any():
        token = int(np.argmax(holders != 1))
        raise ValueError(
            f"index maps do not tile the {num_tokens}-token chunk: "
            f"token {token} is held {holders[token]} times"
        )
    rows = [part_length * rank + np.arange(len(part)) for rank, part in enumerate(parts)]
    order = np.empty(num_tokens, dtype=np.int64)
    order[held] = np.concatenate(rows)
    if len(parts) * part_length == num_tokens and (order == np.arange(num_tokens)).all():
        return None
    return torch.from_numpy(order)
