"""The loss of a step as one mean over all its supervised tokens, whatever rank holds them.

In:   logits and labels of one rank's view; the step's global count, which every view carries
Out:  a loss whose gradients, once reduced over dp and cp, are those of one process with the whole step

    loss = scaled_loss(
        token_loss_sum(logits, batch.tensors["labels"]),
        global_supervised=batch.info.global_supervised,
        reduction="mean",  # what DDP and FSDP do
        dp_size=batch.info.dp_size,
        cp_size=batch.info.cp_size,
        copies=batch.info.copies,  # 1 but for layout identity
    )
    loss.backward()  # every micro-batch; gradients add up, and nothing is divided again

A mean per rank or per micro-batch would weigh tokens by how few others share their rank. No collective
is needed to know the count.

Shapes: L local tokens, V vocabulary.
"""

from __future__ import annotations

from enum import StrEnum
from numbers import Integral
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IGNORE_LABEL", "GradientReduction", "loss_scale", "scaled_loss", "token_loss_sum"]

IGNORE_LABEL = -100


class GradientReduction(StrEnum):
    """What becomes of the gradients of all dp and cp ranks."""

    SUM = "sum"
    """They are added."""
    MEAN = "mean"
    """They are added and divided by the number of ranks: DDP's and FSDP's way."""


def loss_scale(
    *, global_supervised: int, reduction: GradientReduction | str, dp_size: int, cp_size: int, copies: int = 1
) -> float:
    """Return the factor on a rank's summed token loss, from counts alone.

    It is 1 / ``global_supervised``, times dp * cp where the reduction divides by that, over ``copies``.

    Args:
        global_supervised: supervised tokens of the step, over all ranks and micro-batches.
        reduction: how gradients are reduced over the dp * cp ranks.
        dp_size: data-parallel ranks.
        cp_size: context-parallel ranks.
        copies: ranks that hold the same token: cp_size for layout ``identity``, 1 for every other.

    Raises:
        ValueError: if a count is below 1, ``copies`` does not divide ``cp_size``, or there is no such
            reduction.
    """
    counts = {
        "global_supervised": global_supervised,
        "dp_size": dp_size,
        "cp_size": cp_size,
        "copies": copies,
    }
    for name, count in counts.items():
        if not isinstance(count, Integral) or count < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {count!r}")
    if cp_size % copies:
        raise ValueError(
            f"copies={copies} must divide cp_size={cp_size}: each token is on that many cp ranks"
        )
    if reduction not in tuple(GradientReduction):
        raise ValueError(f"reduction={reduction!r} must be one of {', '.join(GradientReduction)}")
    divided_by = dp_size * cp_size if reduction == GradientReduction.MEAN else 1
    return divided_by / (global_supervised * copies)


def scaled_loss(
    loss_sum: Tensor,
    *,
    global_supervised: int,
    reduction: GradientReduction | str,
    dp_size: int,
    cp_size: int,
    copies: int = 1,
) -> Tensor:
    """Return the scalar to call ``backward`` on: ``loss_sum`` times ``loss_scale``.

    The step's loss, for a log, is what ``reduction="sum"`` gives, added over all ranks and micro-batches.

    Args:
        loss_sum: sum of this rank's token losses, of one micro-batch; 0 where it has no supervised token.
        global_supervised: as ``loss_scale``, and so are the others.
        reduction: see there.
        dp_size: see there.
        cp_size: see there.
        copies: see there.

    Raises:
        ValueError: as ``loss_scale``.
    """
    return loss_sum * loss_scale(
        global_supervised=global_supervised,
        reduction=reduction,
        dp_size=dp_size,
        cp_size=cp_size,
        copies=copies,
    )


def token_loss_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy summed over tokens, a float32 scalar (float64 for float64 logits).

    A view without a supervised token gives 0 and zero gradients, not NaN, so it takes part in every
    collective of the backward pass.

    Args:
        logits: [..., V] of the local tokens.
        labels: [...], int64 or int32, shifted already as views have them; -100 is left out.

    Raises:
        ValueError: if ``labels`` are no integers.
    """
    import torch

    if labels.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"labels are {labels.dtype}, must be int64 or int32: one token id per position")

    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, -2).to(wide), labels.flatten().long(), ignore_index=IGNORE_LABEL, reduction="sum"
    )
