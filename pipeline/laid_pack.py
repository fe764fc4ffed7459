"""One pack with everything that is known of it before a token is read: its slots, and all ranks' runs.

In:   ``Pieces`` (``pipeline/step_packs.py``), a ``ViewSpec`` (``pipeline/opening.py``)
Out:  ``LaidPack``: how long each rank's view is, and what fills it (``pipeline/view_source.py``)

Who makes the views of all ranks first lays every pack, then allocates once, then fills.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ringfeed.pipeline.pack_slots import PackSlots, lay_out

if TYPE_CHECKING:
    import numpy.typing as npt

    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.step_packs import Pieces
    from ringfeed.sharding.index_map import IndexMap

__all__ = ["LaidPack", "lay_pack"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LaidPack:
    """A pack whose tokens are yet to be read."""

    step: int
    pack: int
    pieces: Pieces
    """In slot order, skipped ones included."""
    skipped: npt.NDArray[np.bool_]
    """bool [P], pieces that the skip list leaves out."""
    slots: PackSlots
    maps: list[IndexMap]
    """One per cp rank; ``len`` is the rank's L."""


def lay_pack(
    pieces: Pieces, *, place: tuple[int, int], spec: ViewSpec, skipped: npt.NDArray[np.bool_] | None
) -> LaidPack:
    """Lay out the pack at ``place`` (step, pack) for every cp rank.

    Raises:
        ValueError: if the slots do not fit into T.
    """
    slots = lay_out(pieces, spec=spec, skipped=skipped)
    maps = spec.layout.index_maps(slots.cu_seqlens_padded, cp_size=spec.cp_size, cu_seqlens=slots.cu_seqlens)
    return LaidPack(
        step=place[0],
        pack=place[1],
        pieces=pieces,
        skipped=np.zeros(len(pieces), dtype=np.bool_) if skipped is None else skipped,
        slots=slots,
        maps=maps,
    )
