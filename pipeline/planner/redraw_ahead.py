"""Supervised pieces from the look-ahead, for steps that have fewer packs with any than there are steps.

In:   the packs of some steps and the pieces carried on (``packing.py``), supervised tokens of each
Out:  the same with single pieces exchanged, for ``redraw.py``

Balanced work hands out a part of the window's steps at a time; what trains may be in the rest.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.planner.packing import Packing
from ringfeed.pipeline.planner.stream import StreamPieces

__all__ = ["bring_in"]

Int64 = NDArray[np.int64]


def bring_in(
    packing: Packing, *, wanted: int, packed: Int64, carried: Int64, pack_tokens: int
) -> tuple[Packing, Int64]:
    """Exchange pieces until ``wanted`` packs have a supervised token, as far as there are any that fit.

    The first carried pieces with one come in, each for the piece of nearly its slots in a pack without one.

    Args:
        packing: of whole steps of fixed packs.
        wanted: packs that should have a supervised token.
        packed: int64 [P], supervised tokens of the pieces in packs.
        carried: int64 [C], of those carried on.
        pack_tokens: slots of a pack.

    Returns:
        The packs, and the supervised tokens of the pieces in them now.
    """
    stream = StreamPieces.concat([packing.packed, packing.carried])
    counts, num_packed = np.concatenate([packed, carried]), len(packed)
    places = np.arange(len(stream))
    packs = np.repeat(np.arange(len(packing.offsets) - 1), np.diff(packing.offsets))
    rooms = pack_tokens - np.add.reduceat(packing.packed.slots, packing.offsets[:-1])
    trained = np.add.reduceat(packed, packing.offsets[:-1]) > 0
    for piece in (np.flatnonzero(carried > 0) + num_packed).tolist():
        if trained.sum() >= wanted:
            break
        more = stream.slots[piece] - stream.slots[places[:num_packed]]
        differ = np.where(trained[packs] | (more > rooms[packs]), np.iinfo(np.int64).max, np.abs(more))
        place = int(differ.argmin())
        if differ[place] == np.iinfo(np.int64).max:
            continue
        rooms[packs[place]] -= more[place]
        trained[packs[place]] = True
        places[place], places[piece] = piece, places[place]
    left = np.sort(places[num_packed:])
    left = left[np.argsort(stream.arrivals[left], kind="stable")]
    now = places[:num_packed]
    return replace(packing, packed=stream.take(now), carried=stream.take(left)), counts[now]
