"""The hash chain of a plan: one value per step that stands for all steps up to it (DESIGN, State).

In:   the value before, and the rows of one step (``pipeline/step_packs.py``)
Out:  32 hex digits, stored in the step's block and in every loader state

A state resumes on any plan whose chain has the state's prefix. Costs, slates and counts are part of a step's
rows: they decide which rank gets a pack and what a loss is divided by.
"""

import numpy as np
import xxhash

from ringfeed.pipeline.step_packs import StepPacks

__all__ = ["next_link"]


def next_link(previous: str, packs: StepPacks, *, segment: str | None = None) -> str:
    """Return h_s = H(h_{s-1}, the recipe segment if one starts at s, the canonical rows of step s).

    Canonical rows, all little-endian: step, K, P and S (-1 where masks are unknown); slates int32; costs;
    supervised counts row by row; offsets from 0; documents; starts; lengths; epochs int32. What is not said
    to be int32 is int64.

    Args:
        previous: h_{s-1}, 32 hex digits; before the first step the fingerprint of the first recipe segment.
        packs: the rows of step s; their ``chain`` is not looked at.
        segment: fingerprint of a recipe segment that starts at s, other than the first.
    """
    digest = xxhash.xxh3_128(bytes.fromhex(previous))
    if segment is not None:
        digest.update(bytes.fromhex(segment))
    supervised = packs.supervised
    num_sources = -1 if supervised is None else supervised.shape[1]
    digest.update(
        np.array([packs.step, packs.num_packs, len(packs.pieces), num_sources], dtype="<i8").tobytes()
    )
    digest.update(np.ascontiguousarray(packs.slates, dtype="<i4").data)
    digest.update(np.ascontiguousarray(packs.costs, dtype="<i8").data)
    if supervised is not None:
        digest.update(np.ascontiguousarray(supervised, dtype="<i8").data)
    digest.update(np.ascontiguousarray(packs.offsets, dtype="<i8").data)
    pieces = packs.pieces
    for column in (pieces.documents, pieces.starts, pieces.lengths):
        digest.update(np.ascontiguousarray(column, dtype="<i8").data)
    digest.update(np.ascontiguousarray(pieces.epochs, dtype="<i4").data)
    return digest.hexdigest()
