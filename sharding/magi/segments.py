"""Which keys every chunk sees, cut where any range of keys ends, so that a few segments stand for all keys.

In:   the pieces into which chunks cut a mask (``areas.py``)
Out:  ``KeySegments``, for the solvers that look at keys (``heap_solvers.py``)

Shapes: N chunks, P pieces, G segments.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from ringfeed.sharding.run_kernels import Int64Array

__all__ = ["KeySegments", "key_segments"]


class KeySegments(NamedTuple):
    """The keys that chunks see; a NamedTuple because numba takes it apart for free."""

    firsts: Int64Array
    """int64 [N + 1], where each chunk's rows of ``spans`` begin, and where the last one's end."""
    spans: Int64Array
    """int64 [P, 2], first and last end of each key range, in segments."""
    widths: Int64Array
    """int64 [G], keys in each segment."""


def key_segments(pieces: Int64Array, *, num_chunks: int) -> KeySegments:
    """Return the segments that the key ranges of ``pieces`` make.

    Args:
        pieces: int64 [P, 4], chunk, slice, first and last end of the keys (``areas.chunk_pieces``).
        num_chunks: N.
    """
    firsts, in_order = _chunk_firsts(pieces, num_chunks)
    if not in_order:
        pieces = pieces[np.argsort(pieces[:, 0], kind="stable")]
    edges, spans, merged = _merge_edges(pieces)
    if not merged:
        # Prefix trees: a node's keys lie before those of the node ahead of it.
        edges, places = np.unique(pieces[:, 2:], return_inverse=True)
        spans = places.reshape(-1, 2).astype(np.int64)
    return KeySegments(firsts=firsts, spans=spans, widths=np.diff(edges))


@njit(cache=True, nogil=True)
def _chunk_firsts(pieces: Int64Array, num_chunks: int) -> tuple[Int64Array, bool]:
    """Return where each chunk's pieces begin once they stand by chunk [N + 1], and whether they do now."""
    firsts = np.zeros(num_chunks + 1, dtype=np.int64)
    in_order = True
    for row in range(len(pieces)):
        firsts[pieces[row, 0] + 1] += 1
        in_order &= row == 0 or pieces[row, 0] >= pieces[row - 1, 0]
    for chunk in range(num_chunks):
        firsts[chunk + 1] += firsts[chunk]
    return firsts, in_order


@njit(cache=True, nogil=True)
def _merge_edges(pieces: Int64Array) -> tuple[Int64Array, Int64Array, bool]:
    """Return the different ends of key ranges, rising, and where each piece's two stand among them [P, 2].

    In one pass over first ends and last ends, if both rise; the last value is False if they do not. They do
    for documents, windows included, whose own order is that of their keys.
    """
    num_pieces = len(pieces)
    edges = np.empty(2 * num_pieces, dtype=np.int64)
    spans = np.empty((num_pieces, 2), dtype=np.int64)
    nexts = np.zeros(2, dtype=np.int64)
    last = -1
    for _ in range(2 * num_pieces):
        # A range begins before it ends, so first ends never fall behind the last ends.
        side = 0 if nexts[0] < num_pieces and pieces[nexts[0], 2] <= pieces[nexts[1], 3] else 1
        edge = pieces[nexts[side], 2 + side]
        if last >= 0 and edge < edges[last]:
            return edges[:0], spans[:0], False
        if last < 0 or edge > edges[last]:
            last += 1
            edges[last] = edge
        spans[nexts[side], side] = last
        nexts[side] += 1
    return edges[: last + 1], spans, True
