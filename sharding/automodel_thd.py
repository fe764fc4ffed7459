"""BSHD batches made THD streams: rows laid end to end, and offsets that say where sequences begin.

In:   a batch of tensors: ``input_ids`` [B, S], ``seq_lens`` [B, K] (read by ``bshd_offsets.py``), ...
Out:  the same batch as one stream of T = B * S tokens, or as several; cut by ``automodel_te.py``

Names, signatures and error types are those of nemo-automodel 0.7.0 (``automodel.py``). No token
moves: a stream is a view of the rows.

Shapes: B rows, S tokens in a row, K entries of a row, N sequences, T tokens of a stream, C chunks.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringfeed.sharding.bshd_offsets import RowSequences, read_row_sequences
from ringfeed.sharding.padding import cumulate
from ringfeed.sharding.run_kernels import Int64Array

__all__ = [
    "STREAM_FIELDS",
    "ChunkCountError",
    "chunk_streams",
    "position_dim",
    "process_input_for_thd",
    "split_batch_into_thd_chunks",
    "stack_chunks",
    "thd_padding_mask_from_token_ids",
    "token_aligned_extras",
]

STREAM_FIELDS = ("input_ids", "labels", "position_ids", "padding_mask")
"""What every stream has for each of its tokens."""
# Consumed here, or said anew by the stream.
_LENGTH_FIELDS = ("seq_lens", "seq_lens_padded", "cu_seqlens", "cu_seqlens_padded")


class ChunkCountError(ValueError, RuntimeError):
    """Rows cannot be split into that many chunks. A RuntimeError too, which is what the original raises."""


def process_input_for_thd(
    batch: dict[str, Any], seq_lens_padding_value: int = -1000, padding_token_id: int = 0
) -> dict[str, Any]:
    """Return ``batch`` as one THD stream. The batch is not changed; tensors may share its memory.

    Differs from the original: an extra tensor whose leading shape is [B, S] is flattened like the ids
    (there it keeps its rows); padding behind the last sequence of a row belongs to that sequence's slot
    (there it shifts all later sequences); ``position_ids`` [1, S] are those of every row; lengths that
    do not fit together are refused.

    Args:
        batch: ``input_ids`` [B, S] or, as embeddings, [B, S, H]; ``labels`` [B, S]; ``position_ids``
            [B, S], [n_rope, B, S] or None; ``seq_lens`` and ``seq_lens_padded`` [B, K], or [N] for the
            stream as a whole, or None.
        seq_lens_padding_value: stands for no sequence in the length tables.
        padding_token_id: tells padding from values where ``seq_lens`` is None, and only there.

    Returns:
        ``input_ids`` [T] or [T, H] (H = 1 is dropped), ``labels`` [T], ``position_ids`` [T] or
        [n_rope, 1, T], ``padding_mask`` bool [T]; ``cu_seqlens`` int32 [N + 1], real offsets, the last one
        grown to T where padding is at the end only; ``cu_seqlens_padded`` where it differs from these;
        ``max_seqlen`` int32, a scalar; and every other entry of the batch. Without ``seq_lens``,
        ``cu_seqlens`` is None.

    Raises:
        KeyError: if one of the five entries is missing.
        ValueError: if shapes or lengths do not fit together (field and row are named), or padding
            cannot be told.
    """
    input_ids, labels, positions = batch["input_ids"], batch["labels"], batch["position_ids"]
    seq_lens, seq_lens_padded = batch["seq_lens"], batch["seq_lens_padded"]
    rows = _row_shape(input_ids)
    if labels is None or tuple(labels.shape[:2]) != rows:
        raise ValueError(f"labels must be {list(rows)} like input_ids, got {_shape(labels)}")
    stream: dict[str, Any] = {
        "input_ids": _flatten_tokens(input_ids),
        "position_ids": None if positions is None else _flatten_positions(positions, rows),
        "labels": _flatten_tokens(labels),
    }
    if seq_lens is None:
        stream["cu_seqlens"] = None
        stream["padding_mask"] = thd_padding_mask_from_token_ids(stream["input_ids"], padding_token_id)
    else:
        sequences = _read_lengths(seq_lens, seq_lens_padded, rows, seq_lens_padding_value)
        tails = sequences.tails
        stream["padding_mask"] = _padding_mask(sequences, tails).to(input_ids.device)
        stream |= _stream_offsets(sequences, tails, seq_lens.device, absorb=seq_lens_padded is not None)
    aligned = token_aligned_extras(batch)
    for name, value in batch.items():
        if name not in stream and name not in _LENGTH_FIELDS:
            stream[name] = value.flatten(0, 1) if name in aligned else value
    return stream


def split_batch_into_thd_chunks(
    batch: dict[str, Any],
    num_chunks: int,
    seq_lens_padding_value: int = -1000,
    padding_token_id: int = 0,
) -> dict[str, Any]:
    """Return ``batch`` as C THD streams of B / C rows each, stacked; one of 1 and below is unstacked.

    Differs from the original: rows that C does not divide are refused (there the last ones vanish);
    extra entries are kept, token-aligned ones [C, T, ...] and all others whole (there tensors vanish);
    3-D ``position_ids`` are split by rows and come out as [C, n_rope, 1, T] (there the rope axis is split).

    Returns:
        As ``process_input_for_thd``, tensors with a leading C; ``cu_seqlens`` (and the padded ones, where
        any chunk has them) filled up on the right with ``seq_lens_padding_value``.

    Raises:
        ChunkCountError: if C does not divide B.
        KeyError, ValueError: as ``process_input_for_thd``, or if the fill is also a boundary.
    """
    if num_chunks <= 1:
        return process_input_for_thd(batch, seq_lens_padding_value, padding_token_id)
    chunks = chunk_streams(batch, num_chunks, seq_lens_padding_value, padding_token_id)
    return stack_chunks(chunks, token_aligned_extras(batch), seq_lens_padding_value)


def chunk_streams(
    batch: dict[str, Any], num_chunks: int, seq_lens_padding_value: int, padding_token_id: int
) -> list[dict[str, Any]]:
    """Return C streams of B / C rows each, as ``process_input_for_thd`` makes them.

    Raises:
        ChunkCountError, KeyError, ValueError: as ``split_batch_into_thd_chunks``.
    """
    num_rows, _ = _row_shape(batch["input_ids"])
    if num_rows % num_chunks or not num_rows:
        valid = [n for n in range(1, num_rows + 1) if num_rows % n == 0]
        raise ChunkCountError(
            f"num_chunks={num_chunks} does not divide the {num_rows} rows; use one of {valid}"
        )
    height = num_rows // num_chunks
    by_row = {*token_aligned_extras(batch), *STREAM_FIELDS, "seq_lens", "seq_lens_padded"}
    parts = [_take_rows(batch, first, height, by_row) for first in range(0, num_rows, height)]
    return [process_input_for_thd(part, seq_lens_padding_value, padding_token_id) for part in parts]


def stack_chunks(chunks: Sequence[dict[str, Any]], extras: Sequence[str], fill: int) -> dict[str, Any]:
    """Return C streams as one batch: what is aligned with tokens gets a leading C, all else stays whole.

    Args:
        chunks: streams of one length T.
        extras: names of token-aligned entries beyond those that every stream has.
        fill: stands behind the offsets of chunks that have fewer sequences than others.

    Raises:
        ValueError: if the fill is also a boundary of such a chunk.
    """
    by_chunk = {*STREAM_FIELDS, *extras, "max_seqlen"}
    stacked = {
        name: _stack([chunk[name] for chunk in chunks]) if name in by_chunk else value
        for name, value in chunks[0].items()
    }
    if stacked["cu_seqlens"] is not None:
        stacked["cu_seqlens"] = _fill_up([chunk["cu_seqlens"] for chunk in chunks], fill)
        if any("cu_seqlens_padded" in chunk for chunk in chunks):
            padded = [chunk.get("cu_seqlens_padded", chunk["cu_seqlens"]) for chunk in chunks]
            stacked["cu_seqlens_padded"] = _fill_up(padded, fill)
    return stacked


def thd_padding_mask_from_token_ids(input_ids: Tensor, padding_token_id: int) -> Tensor:
    """Return which tokens are padding, bool [T], told from their values.

    The one function of ringfeed that looks at token values to find padding, because its
    callers have nothing else (everything else carries lengths). So it only accepts input
    that leaves no doubt: the pad id fills the end of the stream and stands nowhere else.

    Args:
        input_ids: integers [T].
        padding_token_id: the filler.

    Raises:
        ValueError: if the pad id also occurs before the padding, as content.
    """
    padding = input_ids == padding_token_id
    returns_to_content = padding[:-1] & ~padding[1:]
    if input_ids.ndim != 1 or bool(returns_to_content.any()):
        raise ValueError(
            f"padding_token_id={padding_token_id} also occurs as content of input_ids "
            f"{list(input_ids.shape)}, so padding cannot be told from values; carry lengths "
            "(seq_lens and seq_lens_padded), or use a pad id that no document contains"
        )
    return padding


def token_aligned_extras(batch: Mapping[str, Any]) -> list[str]:
    """Return the names of extra tensors whose leading shape is that of ``input_ids``, [B, S]."""
    rows = tuple(batch["input_ids"].shape[:2])
    named = {*STREAM_FIELDS, *_LENGTH_FIELDS}
    return [
        name
        for name, value in batch.items()
        if name not in named and isinstance(value, Tensor) and tuple(value.shape[:2]) == rows
    ]


def position_dim(position_ids: Tensor) -> int:
    """Return the token dimension of a stream's ``position_ids``, [T] or [n_rope, 1, T]."""
    return 2 if position_ids.ndim == 3 else 0


def _row_shape(input_ids: Tensor) -> tuple[int, int]:
    if input_ids.ndim < 2:
        raise ValueError(f"input_ids must be [B, S] or [B, S, H], got {_shape(input_ids)}")
    return input_ids.shape[0], input_ids.shape[1]


def _flatten_tokens(x: Tensor) -> Tensor:
    flat = x.flatten(0, 1)
    return flat if flat.ndim == 1 else flat.flatten(1).squeeze(-1)


def _flatten_positions(position_ids: Tensor, rows: tuple[int, int]) -> Tensor:
    if position_ids.ndim == 2 and tuple(position_ids.shape) in (rows, (1, rows[1])):
        return position_ids.expand(*rows).reshape(-1)
    if position_ids.ndim == 3 and tuple(position_ids.shape[1:]) in (rows, (1, rows[1])):
        # The axis of one row stays: mRoPE takes [n_rope, B, S].
        return position_ids.expand(-1, *rows).reshape(len(position_ids), 1, -1)
    raise ValueError(
        f"position_ids must be {list(rows)} like input_ids, or [n_rope, {rows[0]}, {rows[1]}], "
        f"got {_shape(position_ids)}"
    )


def _read_lengths(
    seq_lens: Tensor, seq_lens_padded: Tensor | None, rows: tuple[int, int], absent: int
) -> RowSequences:
    num_rows, width = rows
    if seq_lens.ndim == 1:
        num_rows, width = 1, num_rows * width
        seq_lens = seq_lens.unsqueeze(0)
        seq_lens_padded = None if seq_lens_padded is None else seq_lens_padded.reshape(1, -1)
    return read_row_sequences(seq_lens, seq_lens_padded, num_rows=num_rows, width=width, absent=absent)


def _stream_offsets(
    sequences: RowSequences, tails: Int64Array, device: torch.device, *, absorb: bool
) -> dict[str, Tensor]:
    """Return ``cu_seqlens``, ``max_seqlen`` and, where it differs, ``cu_seqlens_padded``."""
    total = len(sequences.counts) * sequences.width
    real = cumulate(sequences.lengths)
    padded = cumulate(sequences.slots + tails)
    # As in the original, padding at the end of the stream is in no slot ...
    padded[-1] -= tails[-1]
    # ... but where there is no other, and slots are told, the last sequence takes it all: one set of
    # offsets is what keeps TransformerEngine off its slow path for pads between sequences.
    if absorb and np.array_equal(real[:-1], padded[:-1]):
        real[-1] = padded[-1] = total
    offsets = {
        "cu_seqlens": torch.from_numpy(real).to(device),
        "max_seqlen": torch.tensor(int(np.diff(real).max()), dtype=torch.int32, device=device),
    }
    if not np.array_equal(real, padded):
        offsets["cu_seqlens_padded"] = torch.from_numpy(padded).to(device)
    return offsets


def _padding_mask(sequences: RowSequences, tails: Int64Array) -> Tensor:
    """Return bool [T], True = padding: each sequence's real tokens, then what its slot and row add."""
    pads = sequences.slots - sequences.lengths + tails
    stretches = np.stack([sequences.lengths, pads], axis=1).reshape(-1)
    return torch.from_numpy(np.repeat(np.arange(len(stretches)) % 2 == 1, stretches))


def _take_rows(batch: Mapping[str, Any], first: int, height: int, by_row: set[str]) -> dict[str, Any]:
    num_rows = len(batch["input_ids"])

    def take(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor) or name not in by_row:
            return value
        is_position = name == "position_ids"
        dim = 1 if is_position and value.ndim == 3 else 0
        if is_position and value.shape[dim] == 1:
            # Positions of one row are those of every row.
            return value
        if value.shape[dim] != num_rows or value.ndim < 2:
            raise ValueError(f"{name} must have the {num_rows} rows of input_ids, got {_shape(value)}")
        return value.narrow(dim, first, height)

    return {name: take(name, value) for name, value in batch.items()}


def _stack(parts: Sequence[Tensor | None]) -> Tensor | None:
    tensors = [part for part in parts if part is not None]
    return torch.stack(tensors) if tensors else None


def _fill_up(offsets: Sequence[Tensor], fill: int) -> Tensor:
    width = max(map(len, offsets))
    for chunk, boundaries in enumerate(offsets):
        if len(boundaries) < width and fill > 0 and bool((boundaries == fill).any()):
            raise ValueError(
                f"seq_lens_padding_value={fill} is also a boundary of chunk {chunk}, so the fill could not "
                "be told from it; use a negative value"
            )
    return torch.stack(
        [torch.nn.functional.pad(part, (0, width - len(part)), value=fill) for part in offsets]
    )


def _shape(value: Any) -> Any:
    return list(value.shape) if isinstance(value, Tensor) else value
