"""The masks that documents have: causal, full, windowed, and prefix trees, as slices.

In:   offsets of the documents of a stream, or the nodes of a tree
Out:  ``MaskSlices`` (``slices.py``)

Shapes: N documents, S slices.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import index
from typing import Any, Protocol

import numpy as np

from ringfeed.sharding.magi.slice_kernels import document_ranges
from ringfeed.sharding.magi.slices import MaskKind, MaskSlices, SliceTuple
from ringfeed.sharding.offsets import as_offsets
from ringfeed.sharding.run_kernels import Int64Array
from ringfeed.sharding.window import read_sides

__all__ = [
    "CausalMask",
    "DocumentMask",
    "FullMask",
    "WindowMask",
    "document_mask",
    "prefix_tree_slices",
    "varlen_slices",
]

NO_WINDOW = (-1, -1)


class DocumentMask(Protocol):
    """What the queries of a document see of its keys."""

    def slices(self, ranges: Int64Array) -> MaskSlices:
        """Return the slices of N documents, document after document.

        Args:
            ranges: int64 [N, 4], first and last end of each document's queries and keys. Documents
                without a query or a key are allowed.
        """
        ...


@dataclass(frozen=True, slots=True)
class CausalMask(DocumentMask):
    """A query sees the keys up to its own; the last query sees every key."""

    def slices(self, ranges: Int64Array) -> MaskSlices:
        return MaskSlices.of_kind(MaskKind.CAUSAL, ranges)


@dataclass(frozen=True, slots=True)
class FullMask(DocumentMask):
    """A query sees every key of its document."""

    def slices(self, ranges: Int64Array) -> MaskSlices:
        return MaskSlices.of_kind(MaskKind.FULL, ranges)


@dataclass(frozen=True, slots=True)
class WindowMask(DocumentMask):
    """A query sees ``left`` keys before its own and ``right`` after it; -1 means all of them.

    A causal sliding window of w keys before the own one is ``WindowMask(w, 0)``.
    """

    left: int
    right: int

    def slices(self, ranges: Int64Array) -> MaskSlices:
        q1, k0, k1 = ranges[:, 1], ranges[:, 2], ranges[:, 3]
        num_keys = k1 - k0
        # Query and key ends are aligned: leading queries beyond the keys see nothing.
        q0 = np.maximum(ranges[:, 0], q1 - num_keys)
        num_queries = q1 - q0
        left, right = self._reach(self.left, num_keys), self._reach(self.right, num_keys)
        first_key = np.maximum(k0, k1 - num_queries - left)
        # Queries from row `leaves` on lose keys at the left; up to row `meets` they gain keys at the right.
        leaves = np.minimum(first_key - (k1 - num_queries - left), num_queries)
        meets = np.maximum(0, num_queries - right)
        low, high = np.minimum(leaves, meets), np.maximum(leaves, meets)
        middle = np.where(leaves > meets, MaskKind.FULL, MaskKind.BI_CAUSAL)

        growing = (q0, q0 + low, first_key, np.minimum(k1, first_key + left + right))
        steady = (q0 + low, q0 + high, first_key, k1)
        shrinking = (q0 + high, q0 + num_queries, np.maximum(first_key, k1 - left - right), k1)
        # [N, 3, 4] read row by row: the three parts of each document in turn.
        parts = np.stack([np.stack(part, axis=1) for part in (growing, steady, shrinking)], axis=1)
        kinds = np.stack(
            [np.full_like(middle, MaskKind.CAUSAL), middle, np.full_like(middle, MaskKind.INV_CAUSAL)], axis=1
        )
        rows = parts.reshape(-1, 4)
        filled = rows[:, 0] < rows[:, 1]
        return MaskSlices(ranges=rows[filled], kinds=kinds.reshape(-1)[filled].astype(np.int8))

    @staticmethod
    def _reach(size: int, num_keys: Int64Array) -> Int64Array:
        """Return how many keys of each document that side of the window can meet."""
        if size == -1:
            return num_keys
        return np.where(size < num_keys - 1, size, num_keys)


def document_mask(*, causal: bool, window: tuple[int, int]) -> DocumentMask:
    """Return the mask that MagiAttention's ``causal`` and ``window_size`` stand for.

    Raises:
        ValueError: if a window is asked for with ``causal``, or a side of it is below -1.
    """
    if window == NO_WINDOW:
        return CausalMask() if causal else FullMask()
    left, right = read_sides(window)
    if causal:
        raise ValueError(
            f"window={window} needs causal=False: a window says itself what lies ahead, "
            f"and ({window[0]}, 0) is causal"
        )
    return WindowMask(left, right)


def varlen_slices(cu_seqlens: Any, *, mask: DocumentMask, cu_seqlens_k: Any = None) -> MaskSlices:
    """Return the slices of documents that lie end to end.

    Args:
        cu_seqlens: offsets of the documents' queries [N + 1], 1-D integers (tensor, array or list).
        mask: what a query sees of its document.
        cu_seqlens_k: offsets of their keys [N + 1], where those are others.

    Raises:
        ValueError: if these are no offsets, or the two disagree on N.
    """
    queries = as_offsets(cu_seqlens, name="cu_seqlens")
    keys = queries if cu_seqlens_k is None else as_offsets(cu_seqlens_k, name="cu_seqlens_k")
    if len(keys) != len(queries):
        raise ValueError(f"cu_seqlens_k has {len(keys)} offsets, but cu_seqlens {len(queries)}")
    return mask.slices(document_ranges(queries, keys))


def prefix_tree_slices(node_lengths: Sequence[int], sample_paths: Sequence[Sequence[int]]) -> MaskSlices:
    """Return the slices of samples that share prefixes, each prefix kept once in the stream.

    Args:
        node_lengths: tokens of each node; the stream is the nodes end to end.
        sample_paths: per sample its nodes from the root to the leaf.

    Returns:
        Per node in order of first mention: one causal slice of its own tokens, then one full slice per
        ancestor, from the root on. Nodes in no sample have none.

    Raises:
        ValueError: if a length is negative, a path names a node that does not exist, or a node would have
            two different prefixes: then its tokens could not be shared.
    """
    if min(node_lengths, default=0) < 0:
        raise ValueError(f"node_lengths must be at least 0, got {min(node_lengths)}")
    spans = list(pairwise(accumulate(map(index, node_lengths), initial=0)))
    prefixes: dict[int, tuple[int, ...]] = {}
    slices: list[SliceTuple] = []
    for sample, path in enumerate(sample_paths):
        for depth, node in enumerate(path):
            prefix = tuple(path[:depth])
            if not 0 <= node < len(spans) or node in prefix:
                raise ValueError(
                    f"sample_paths[{sample}] names node {node}; nodes are 0 to {len(spans) - 1}, "
                    "each at most once in a path"
                )
            if node not in prefixes:
                prefixes[node] = prefix
                slices.append((*spans[node], *spans[node], "causal"))
                slices.extend((*spans[node], *spans[ancestor], "full") for ancestor in prefix)
            elif prefixes[node] != prefix:
                raise ValueError(
                    f"node {node} has prefix {list(prefix)} in sample {sample}, but {list(prefixes[node])} "
                    "before: its tokens cannot be shared; give each its own node"
                )
    return MaskSlices.read(slices)
