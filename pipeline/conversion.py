"""Convert one BSHD batch to the THD views of every rank: a pure function, for any process.

In:   a batch of BSHD rows, tensors or arrays (``pipeline/bshd.py``), and ``ConvertOptions``
Out:  per chunk one ``RankView`` per cp rank (``pipeline/views.py``)

Tensors become numpy before a batch goes anywhere (``numpy_batch``), and only what is converted goes along.

Shapes: B rows, S tokens in a row, K entries of a row, L local tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ringfeed.pipeline.bshd import BSHD_FIELDS, thd_from_bshd
from ringfeed.pipeline.views import cut_chunk
from ringfeed.sharding.layout_contract import check_ranks

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

    from ringfeed.pipeline.thd import ThdChunk
    from ringfeed.pipeline.views import RankView
    from ringfeed.sharding.layouts import Layout

__all__ = ["ConvertOptions", "batch_bytes", "convert_batch", "numpy_batch", "own_views"]

_LENGTHS = ("seq_lens", "seq_lens_padded")
_LARGEST_TOKEN = int(np.iinfo(np.int32).max)
# Of one token in a view: ids, labels and positions in int32, and a mask.
_VIEW_BYTES = 13


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertOptions:
    """What batches are converted to.

    Raises:
        ValueError: if a number is out of its range.
    """

    layout: Layout
    cp_size: int
    pad_id: int = 0
    """Token written into padding."""
    num_chunks: int | None = 1
    """Chunks made of each batch; it divides the rows of every one. None: one of each row."""
    pack_slots: int | None = None
    """Slots of every row of every batch, by the pad rule alone; None: what the rows of each batch need."""

    def __post_init__(self) -> None:
        check_ranks(self.cp_size)
        if self.num_chunks is not None and self.num_chunks < 1:
            raise ValueError(f"num_chunks={self.num_chunks} must be at least 1")
        if not 0 <= self.pad_id <= _LARGEST_TOKEN:
            raise ValueError(f"pad_id={self.pad_id} must be 0 to {_LARGEST_TOKEN}")

    def facts(self) -> dict[str, Any]:
        """Return JSON-able values that tell one conversion from another."""
        return {
            "layout": {"name": self.layout.name, "options": self.layout.options},
            "cp_size": self.cp_size,
            "pad_id": self.pad_id,
            "num_chunks": self.num_chunks,
            "pack_slots": self.pack_slots,
        }


def convert_batch(batch: Mapping[str, Any], options: ConvertOptions) -> list[list[RankView]]:
    """Return per chunk the views of all cp ranks, cut in one pass; the batch is left untouched.

    Args:
        batch: as ``thd_from_bshd`` takes it. Each row is a pack; a chunk is rows laid end to end.
        options: what to make of it.

    Returns:
        ``num_chunks`` lists of ``cp_size`` views. Document ids count the sequences of the batch from 0.

    Raises:
        ValueError: if lengths are missing or do not fit together (row and field are named),
            ``num_chunks`` does not divide B, the layout takes one pack per chunk and B is more, or rows of
            ``pack_slots`` come with positions that do not restart.
    """
    layout, cp_size = options.layout, options.cp_size
    chunks = thd_from_bshd(
        batch,
        layout=layout,
        cp_size=cp_size,
        pad_id=options.pad_id,
        num_chunks=options.num_chunks,
        pack_slots=options.pack_slots,
    )
    height = chunks[0].num_packs
    if height > 1 and not layout.holds_many_packs:
        raise ValueError(
            f"layout {layout.name!r} takes one pack per chunk, and num_chunks={options.num_chunks} puts "
            f"{height} rows into one; use num_chunks={height * len(chunks)}, or layout 'te' or 'identity'"
        )
    if options.pack_slots is not None and batch.get("position_ids") is not None:
        for row, chunk in enumerate(chunks):
            _check_positions(chunk, row)
    return [cut_chunk(chunk, layout=layout, cp_size=cp_size) for chunk in chunks]


def _check_positions(chunk: ThdChunk, row: int) -> None:
    """Refuse positions that ranks of a feed, who derive them from the lengths, would not have."""
    starts, lengths = chunk.cu_seqlens_padded[:-1], np.diff(chunk.cu_seqlens)
    real = np.flatnonzero(~chunk.padding_mask)
    if (chunk.position_ids[real] != real - np.repeat(starts, lengths)).any():
        raise ValueError(
            f"row {row}: its position_ids do not restart with each sequence, and ranks of a feed derive them "
            "from the lengths; leave position_ids out, or iterate over convert()"
        )


def numpy_batch(batch: Any) -> dict[str, npt.NDArray[Any]]:
    """Return what is converted of a batch, in numpy: over the memory of the batch where that can be.

    Lists, and columns of a data set whose rows are arrays, are stacked; length tables of rows with different
    numbers of sequences are filled up with 0.

    Raises:
        ValueError: if it is no mapping, or an entry cannot become an array (it is named).
    """
    if not hasattr(batch, "items"):
        raise ValueError(
            f"a batch is a dict of tensors or arrays with input_ids and seq_lens, got {type(batch).__name__}"
        )
    named = [name for name in BSHD_FIELDS if batch.get(name) is not None]
    arrays = {name: _as_array(name, batch[name]) for name in named if name != "padding_mask"}
    if "input_ids" not in arrays:
        raise ValueError(f"the batch has no input_ids; it has {sorted(map(str, batch))}")
    shape = arrays["input_ids"].shape
    for name, values in batch.items():
        if name not in BSHD_FIELDS and tuple(getattr(values, "shape", ())) in (shape, shape[:1]):
            column = _as_array(name, values)
            if column.shape == shape and column.dtype.kind in "iufb":
                arrays[name] = column
    return arrays


def batch_bytes(batch: Mapping[str, npt.NDArray[Any]], options: ConvertOptions) -> int:
    """Return about what a batch of ``numpy_batch`` and its views take.

    Padding counts where ``pack_slots`` say how much there is; what the rows of a batch need is left aside.
    """
    given = sum(array.nbytes for array in batch.values())
    ids = batch["input_ids"]
    extras = sum(array.nbytes for name, array in batch.items() if name not in BSHD_FIELDS)
    copies = options.cp_size if options.layout.name == "identity" else 1
    added = 0
    if options.pack_slots is not None and ids.ndim == 2:
        added = len(ids) * max(0, options.pack_slots - ids.shape[1])
    return given + copies * (_VIEW_BYTES * (ids.size + added) + extras)


def own_views(chunks: list[list[RankView]]) -> list[list[RankView]]:
    """Return views that share no memory with those given, nor with one another."""
    return [[_own_view(view) for view in chunk] for chunk in chunks]


def _own_view(view: RankView) -> RankView:
    return replace(
        view,
        input_ids=view.input_ids.copy(),
        labels=view.labels.copy(),
        position_ids=view.position_ids.copy(),
        padding_mask=view.padding_mask.copy(),
        cu_seqlens=view.cu_seqlens.copy(),
        cu_seqlens_padded=view.cu_seqlens_padded.copy(),
        documents=view.documents.copy(),
        extras={name: column.copy() for name, column in view.extras.items()},
    )


def _as_array(name: str, values: Any) -> npt.NDArray[Any]:
    try:
        return _stack(name, values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{name} cannot become one array: {error}; give a tensor or array of a dtype that numpy has, "
            "with rows of one length"
        ) from None


def _stack(name: str, values: Any) -> npt.NDArray[Any]:
    if hasattr(values, "detach"):
        # A tensor brings its own way to numpy, so this module need not import torch.
        return np.asarray(values.detach().cpu().numpy())
    rows = _rows_of(values)
    if rows is None:
        return np.asarray(values)
    arrays = [_stack(name, row) for row in rows]
    if name in _LENGTHS and all(array.ndim == 1 for array in arrays):
        width = max(map(len, arrays), default=0)
        arrays = [np.pad(array, (0, width - len(array))) for array in arrays]
    return np.stack(arrays)


def _rows_of(values: Any) -> list[Any] | None:
    """Return the rows of what is no array yet; None for one that is, and for numbers."""
    if isinstance(values, np.ndarray):
        return list(values) if values.dtype.kind == "O" else None
    is_nested = isinstance(values, list | tuple) and any(
        np.ndim(row) or hasattr(row, "detach") for row in values
    )
    return list(values) if is_nested else None
