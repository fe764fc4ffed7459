"""All micro-batches of one step as one ``Batch``.

In:   the M batches of a step, in order (``pipeline/loader.py``)
Out:  one batch whose tensors have a leading M: what pipeline schedules and CUDA graphs want

Every micro-batch has the same L, but not the same number of slots N. Offsets are brought to one
width by repeating the last value: slots of width 0 at the end, which own nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from ringfeed.pipeline.batch import OFFSET_COLUMNS, VARYING_FIELDS, Batch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

__all__ = ["stack_step"]


def stack_step(batches: Sequence[Batch], *, max_slots: int) -> Batch:
    """Return the M ``batches`` of one step as one.

    Args:
        batches: all micro-batches of the step, in order.
        max_slots: N after widening; offsets become [M, max_slots + 1].

    Raises:
        ValueError: if a micro-batch has more slots than ``max_slots``, or the micro-batches differ in L.
    """
    tensors = {}
    for name in batches[0].tensors:
        columns = [batch.tensors[name] for batch in batches]
        if name in OFFSET_COLUMNS:
            columns = [_widened(column, max_slots, batches[0].info.step) for column in columns]
        else:
            _check_even([len(column) for column in columns], batches[0].info.step)
        tensors[name] = torch.stack(columns)
    infos = [batch.info for batch in batches]
    varying: dict[str, Any] = {name: tuple(getattr(info, name) for info in infos) for name in VARYING_FIELDS}
    return Batch(
        tensors=tensors,
        info=replace(infos[0], **varying),
        chunks=tuple(batch.chunks[0] for batch in batches),
        is_step=True,
        pads=batches[0].pads,
    )


def _check_even(num_local: Sequence[int], step: int) -> None:
    if len(set(num_local)) > 1:
        raise ValueError(
            f"the micro-batches of step {step} have {list(num_local)} local tokens, a whole step needs one "
            "number; iterate over the loader, or take a layout with even shares (magi: uneven=False)"
        )


def _widened(offsets: Tensor, max_slots: int, step: int) -> Tensor:
    lacking = max_slots + 1 - len(offsets)
    if lacking < 0:
        raise ValueError(
            f"a micro-batch of step {step} has {len(offsets) - 1} slots, more than "
            f"max_documents={max_slots}; pass max_documents of at least {len(offsets) - 1} (tail slots count)"
        )
    return torch.cat([offsets, offsets[-1:].expand(lacking)])
