"""Labels for multi-token prediction: each token's label some tokens further on, never past its piece.

In:   labels [T] of a whole chunk, next-token and made on whole documents; the chunk's offsets
Out:  labels [T] of depth k, to be cut by a layout like any other column; how many of them there are

Made before sharding: the token that lies k ahead is often on another rank. For a rank that has only its
own part there is ``Batch.sharder.shift_token_tensor``, and for the loss of each depth, which needs the
count of the whole step, ``ringfeed.pipeline.mtp_counts``.

Shapes: T slots in the chunk, L local tokens, N slots' count.
"""

from __future__ import annotations

import sys
from typing import Any, TypeVar

import numpy as np

from ringfeed.sharding.loss import IGNORE_LABEL
from ringfeed.sharding.offsets import as_offsets, as_real_offsets

__all__ = ["mtp_labels", "shift_within_pieces", "supervised_by_depth"]

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


def supervised_by_depth(
    labels: ArrayOrTensor,
    cu_seqlens: Any,
    cu_seqlens_padded: Any,
    *,
    num_depths: int,
    positions: Any = None,
) -> ArrayOrTensor:
    """Count the labels of depths 0 to ``num_depths`` - 1 that are not -100: int64 [num_depths].

    Without making them: a label that stands k places into its piece is one of depths 0 to k. So a rank counts
    its own labels, and the sum over the ranks is the count of the chunk. (How many labels of depth k a rank
    *holds* after sharding is another number, with the same sum.)

    Args:
        labels: int [T] of the whole chunk, array or tensor, of depth 0; or [L] with ``positions``. Counted on
            its device.
        cu_seqlens: real offsets [N + 1], 1-D integers.
        cu_seqlens_padded: slot offsets [N + 1], 1-D integers.
        num_depths: at least 1.
        positions: int array [L], the chunk position of each label (``expand_runs`` of an index map).

    Raises:
        ValueError: if ``num_depths`` is below 1, these are no offsets, or there are not as many
            labels as positions.
    """
    if num_depths < 1:
        raise ValueError(f"num_depths must be at least 1 (depth 0 is the next token), got {num_depths}")
    slots = as_offsets(cu_seqlens_padded)
    as_real_offsets(cu_seqlens, slots)
    held = np.arange(slots[-1]) if positions is None else np.asarray(positions)
    values: Any = labels
    if values.shape != held.shape:
        raise ValueError(f"labels have shape {list(values.shape)}, but there are {len(held)} positions")
    # The last slot that begins at or before a token is its own: slots of length 0 come before it.
    places = held - slots[np.searchsorted(slots[:-1], held, side="right") - 1]
    depths = np.arange(num_depths)
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(values, torch.Tensor):
        counted: Any = ((values != IGNORE_LABEL) & (places >= depths[:, None])).sum(axis=1)
        return counted.astype(np.int64)  # type: ignore[no-any-return]
    is_deep = torch.from_numpy(places >= depths[:, None]).to(values.device)
    return ((values != IGNORE_LABEL) & is_deep).sum(dim=1)  # type: ignore[no-any-return]
