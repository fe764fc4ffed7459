"""Labels for multi-token prediction: each token's label some tokens further on, never past its piece.

In:   labels [T] of a whole chunk, next-token and made on whole documents; the chunk's offsets
Out:  labels [T] of depth k, to be cut by a layout like any other column

Made before sharding: the token that lies k ahead is often on another rank. For a rank that has only its
own part there is ``Batch.sharder.shift_token_tensor``.

Shapes: T slots in the chunk, N slots' count.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import numpy as np

from ringfeed.sharding.loss import IGNORE_LABEL
from ringfeed.sharding.offsets import as_offsets, as_real_offsets

__all__ = ["mtp_labels", "shift_within_pieces"]

ArrayOrTensor = TypeVar("ArrayOrTensor")


def mtp_labels(
    labels: ArrayOrTensor, cu_seqlens: Any, cu_seqlens_padded: Any, *, depth: int
) -> ArrayOrTensor:
    """Return labels of depth ``depth``: those of the token so many places later in the same piece.

    Depth 0 is ``labels`` itself, depth k predicts k + 1 tokens ahead. A label that is -100 stays so, whoever
    looks at it. A piece is all that a chunk knows of its document: where the document goes on after it
    and ``boundary_label`` is ``next``, the one token after the piece is a label, and those beyond are not.
    So the last k tokens of a piece have no label.

    Args:
        labels: int [T], array or tensor, not changed.
        cu_seqlens: real offsets [N + 1], 1-D integers.
        cu_seqlens_padded: slot offsets [N + 1], 1-D integers.
        depth: at least 0.

    Raises:
        ValueError: as ``shift_within_pieces``.
    """
    return shift_within_pieces(labels, cu_seqlens, cu_seqlens_padded, by=depth, fill=IGNORE_LABEL)


def shift_within_pieces(
    x: ArrayOrTensor, cu_seqlens: Any, cu_seqlens_padded: Any, *, by: int, fill: float, dim: int = 0
) -> ArrayOrTensor:
    """Give each token the entry of the one ``by`` places later in its piece: [..., T, ...] -> the same.

    Multi-token prediction takes its inputs like this, too: ``input_ids`` with the pad id as ``fill``.

    Args:
        x: array or tensor, not changed; for a tensor this is differentiable.
        cu_seqlens: real offsets [N + 1], 1-D integers.
        cu_seqlens_padded: slot offsets [N + 1], 1-D integers.
        by: at least 0.
        fill: for tokens with no such later one in their piece, and for padding.
        dim: the dimension of the tokens.

    Raises:
        ValueError: if ``by`` is negative, these are no offsets, or ``x`` has not T entries in ``dim``.
    """
    if by < 0:
        raise ValueError(f"a token's label lies ahead: by, or depth, must be at least 0, got {by}")
    slots = as_offsets(cu_seqlens_padded)
    lengths = np.diff(as_real_offsets(cu_seqlens, slots))
    values: Any = x
    num_tokens = int(slots[-1])
    if not -values.ndim <= dim < values.ndim or values.shape[dim] != num_tokens:
        raise ValueError(
            f"x has shape {list(values.shape)}, cu_seqlens_padded covers {num_tokens} tokens in dim {dim}"
        )
    # Where the real tokens of each token's piece end.
    ends = np.repeat(slots[:-1] + lengths, np.diff(slots))
    ahead = np.arange(num_tokens) + by
    is_inside = ahead < ends
    shape = [1] * values.ndim
    shape[dim] = num_tokens
    ahead, is_inside = np.where(is_inside, ahead, 0), is_inside.reshape(shape)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(values, torch.Tensor):
        kept: Any = np.where(is_inside, np.take(values, ahead, axis=dim), fill)
        return kept.astype(values.dtype)  # type: ignore[no-any-return]
    source = torch.from_numpy(ahead).to(values.device)
    outside = torch.from_numpy(~is_inside).to(values.device)
    return values.index_select(dim, source).masked_fill(outside, fill)  # type: ignore[no-any-return]
