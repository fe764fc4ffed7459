"""Cut chunks into what each cp rank holds.

In:   token-aligned columns of a chunk [T] and its offsets (``pipeline/thd.py``),
      runs of every rank (``sharding/layouts.py``)
Out:  one ``RankView`` per rank (``pipeline/arrow_codec.py`` encodes it, ``pipeline/loader.py`` hands it out)

All ranks are cut in one walk over the source: each run is one memcpy to the rank that holds it.

Shapes: T slots in the chunk, L local tokens, N slots' count, D real documents, R cp ranks, C columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ringfeed.pipeline.view_kernels import IGNORE, address, order_segments, scatter
from ringfeed.sharding.layouts import read_layout
from ringfeed.sharding.padding import SlotOffsets, concat_offsets, slot_offsets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.thd import ThdChunk
    from ringfeed.sharding.index_map import IndexMap
    from ringfeed.sharding.layouts import Layout

__all__ = ["RankView", "concat_views", "cut_all", "cut_chunk", "cut_columns", "padding_view"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RankView:
    """One rank's tokens of one chunk, and what it must know of the whole chunk."""

    input_ids: npt.NDArray[np.int32]
    """int32 [L]"""
    labels: npt.NDArray[np.int32]
    """int32 [L], the next token of each token; -100 = ignore."""
    position_ids: npt.NDArray[np.int32]
    """int32 [L], position within the piece (or the document, ``positions: continue``); padding has 0."""
    padding_mask: npt.NDArray[np.bool_]
    """bool [L], True = padding."""
    cu_seqlens: npt.NDArray[np.int32]
    """int32 [N + 1], real offsets of the whole chunk, the same on every rank."""
    cu_seqlens_padded: npt.NDArray[np.int32]
    """int32 [N + 1], slot offsets of the whole chunk; the last one is T."""
    documents: npt.NDArray[np.int64]
    """int64 [D], one id per piece of the whole chunk, slot order; tail slots and skipped pieces have none."""
    local_supervised: int
    """Labels of this view that are not -100."""
    chunk_digest: int | None = None
    """``BatchInfo.digest`` of the micro-batch that this is part of, where ids or labels were left out
    (``columns=``) and are empty here. None: it is made from them."""
    extras: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    """Further token-aligned columns [L] that came with a BSHD batch."""

    @property
    def tensors(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays by their ``Batch.tensors`` names, in numpy."""
        return {
            "input_ids": self.input_ids,
            "labels": self.labels,
            "position_ids": self.position_ids,
            "padding_mask": self.padding_mask,
            "cu_seqlens": self.cu_seqlens,
            "cu_seqlens_padded": self.cu_seqlens_padded,
            **self.extras,
        }


def cut_all(
    columns: Mapping[str, Any],
    cu_seqlens_padded: Any,
    *,
    layout: Layout | str,
    cp_size: int,
    cu_seqlens: Any = None,
    out: list[dict[str, npt.NDArray[Any]]] | None = None,
) -> list[dict[str, npt.NDArray[Any]]]:
    """Cut every column of one chunk for all ranks, walking over the source once.

    Args:
        columns: name -> [T] integers (array, CPU tensor or list), dtypes may differ; left untouched.
        cu_seqlens_padded: slot offsets [N + 1] (tensor, array or list).
        layout: who holds what; a name stands for that layout with its default options.
        cp_size: context-parallel ranks, R.
        cu_seqlens: real offsets [N + 1]; without them every slot counts as real.
        out: what an earlier call returned; its buffers are filled again and returned.

    Returns:
        Per rank a dict of name -> array [L] of the column's dtype. No array shares memory with a column.

    Raises:
        ValueError: if a column is not [T] integers (of the padded T, where layout ``magi`` pads), the offsets
            break the layout's rules, or ``out`` does not fit (the rank and the column are named).
    """
    chosen = read_layout(layout)
    maps = chosen.index_maps(cu_seqlens_padded, cp_size=cp_size, cu_seqlens=cu_seqlens)
    arrays = {name: np.asarray(values) for name, values in columns.items()}
    total = int(cu_seqlens_padded[-1])
    for name, array in arrays.items():
        if array.dtype.kind not in "iub":
            raise ValueError(f"columns[{name!r}] must hold integers, got {array.dtype}")
        if array.shape == (total,) and total != maps[0].num_tokens:
            padded = maps[0].num_tokens
            raise ValueError(
                f"columns[{name!r}] has {total} rows, but layout {chosen.name!r} at cp_size={cp_size} pads "
                f"this chunk to {padded}; append {padded - total} rows of padding to each column, or make "
                f"the chunk a multiple of {chosen.chunk_multiple(cp_size=cp_size)} (layout.chunk_multiple)"
            )
    return cut_columns(arrays, maps, out=out)


def cut_columns(
    columns: Mapping[str, npt.NDArray[Any]],
    maps: Sequence[IndexMap],
    *,
    out: list[dict[str, npt.NDArray[Any]]] | None = None,
) -> list[dict[str, npt.NDArray[Any]]]:
    """Do what ``cut_all`` does for [T] arrays of any fixed-size dtype, with index maps that exist already."""
    for name, column in columns.items():
        if column.shape != (maps[0].num_tokens,):
            raise ValueError(
                f"columns[{name!r}] has shape {list(column.shape)}, the offsets say [{maps[0].num_tokens}]"
            )
    parts = _allocate(columns, maps) if out is None else out
    if out is not None:
        _check_out(out, columns, maps)
    sources = {name: np.ascontiguousarray(column) for name, column in columns.items()}
    runs = np.concatenate([index_map.runs for index_map in maps])
    bounds = np.cumsum([0, *(len(index_map.runs) for index_map in maps)])
    segments = np.empty((len(runs), 4), dtype=np.int64)
    order_segments(runs, bounds, segments)
    targets = [[address(part[name]) for part in parts] for name in sources]
    scatter(
        np.array([address(source) for source in sources.values()], dtype=np.int64),
        np.array(targets, dtype=np.int64).reshape(len(sources), len(maps)),
        np.array([source.itemsize for source in sources.values()], dtype=np.int64),
        segments,
    )
    return parts


def cut_chunk(chunk: ThdChunk, *, layout: Layout, cp_size: int) -> list[RankView]:
    """Return the views that all ranks have of ``chunk``; they own their memory.

    Raises:
        ValueError: if the chunk holds several packs and the layout takes one, or its offsets break the
            layout's rules.
    """
    if chunk.num_packs > 1 and not layout.holds_many_packs:
        raise ValueError(
            f"layout {layout.name!r} takes one pack per chunk, got {chunk.num_packs}; give each pack a chunk "
            f"of its own, or use layout 'te' or 'identity'"
        )
    maps = layout.index_maps(chunk.cu_seqlens_padded, cp_size=cp_size, cu_seqlens=chunk.cu_seqlens)
    columns = {
        "input_ids": chunk.tokens,
        "labels": chunk.labels,
        "position_ids": chunk.position_ids,
        "padding_mask": chunk.padding_mask,
    }
    return [
        RankView(
            input_ids=part["input_ids"],
            labels=part["labels"],
            position_ids=part["position_ids"],
            padding_mask=part["padding_mask"],
            cu_seqlens=chunk.cu_seqlens,
            cu_seqlens_padded=chunk.cu_seqlens_padded,
            documents=chunk.documents,
            local_supervised=int(np.count_nonzero(part["labels"] != IGNORE)),
            extras={name: part[name] for name in chunk.extras},
        )
        for part in cut_columns({**columns, **chunk.extras}, maps)
    ]


def padding_view(spec: ViewSpec, *, cp_rank: int, num_slots: int | None = None) -> RankView:
    """Return what ``cp_rank`` has of the all-padding pack, which stands where a step has no pack.

    Args:
        spec: of the run.
        cp_rank: which share.
        num_slots: T in place of the smallest that the run has.

    Raises:
        ValueError: if there is no such rank.
    """
    total = spec.pack_lengths.padding if num_slots is None else num_slots
    offsets = slot_offsets([], multiple=spec.multiple, total=total)
    index_map = spec.layout.index_map(
        offsets.cu_seqlens_padded, cp_size=spec.cp_size, cp_rank=cp_rank, cu_seqlens=offsets.cu_seqlens
    )
    num_local = len(index_map)
    return RankView(
        input_ids=np.full(num_local, spec.pad_id, dtype=np.int32),
        labels=np.full(num_local, IGNORE, dtype=np.int32),
        position_ids=np.zeros(num_local, dtype=np.int32),
        padding_mask=np.ones(num_local, dtype=np.bool_),
        cu_seqlens=offsets.cu_seqlens,
        cu_seqlens_padded=offsets.cu_seqlens_padded,
        documents=np.empty(0, dtype=np.int64),
        local_supervised=0,
    )


def concat_views(views: Sequence[RankView]) -> RankView:
    """Lay one rank's views of the packs of a chunk end to end; the result owns its memory.

    Raises:
        ValueError: if there is no view.
    """
    offsets = concat_offsets(
        [SlotOffsets(cu_seqlens=v.cu_seqlens, cu_seqlens_padded=v.cu_seqlens_padded) for v in views]
    )
    names = ("input_ids", "labels", "position_ids", "padding_mask", "documents")
    joined: dict[str, Any] = {name: np.concatenate([getattr(view, name) for view in views]) for name in names}
    return RankView(
        **joined,
        cu_seqlens=offsets.cu_seqlens,
        cu_seqlens_padded=offsets.cu_seqlens_padded,
        local_supervised=sum(view.local_supervised for view in views),
        extras={name: np.concatenate([view.extras[name] for view in views]) for name in views[0].extras},
    )


def _allocate(
    columns: Mapping[str, npt.NDArray[Any]], maps: Sequence[IndexMap]
) -> list[dict[str, npt.NDArray[Any]]]:
    return [
        {name: np.empty(len(index_map), column.dtype) for name, column in columns.items()}
        for index_map in maps
    ]


def _check_out(
    out: list[dict[str, npt.NDArray[Any]]],
    columns: Mapping[str, npt.NDArray[Any]],
    maps: Sequence[IndexMap],
) -> None:
    """Refuse buffers that do not fit: what is written next goes to raw addresses."""
    if len(out) != len(maps):
        raise ValueError(f"out has {len(out)} ranks, cp_size={len(maps)} needs {len(maps)}")
    bounds = [np.lib.array_utils.byte_bounds(column) for column in columns.values()]
    for rank, (part, index_map) in enumerate(zip(out, maps, strict=True)):
        if part.keys() != columns.keys():
            raise ValueError(f"out[{rank}] has columns {sorted(part)}, need {sorted(columns)}")
        for name, column in columns.items():
            buffer = part[name]
            if buffer.shape != (len(index_map),) or buffer.dtype != column.dtype:
                raise ValueError(
                    f"out[{rank}][{name!r}] is {buffer.dtype} {list(buffer.shape)}, "
                    f"need {column.dtype} [{len(index_map)}]"
                )
            if not (buffer.flags.c_contiguous and buffer.flags.writeable):
                raise ValueError(f"out[{rank}][{name!r}] must be contiguous and writeable")
            start = address(buffer)
            if any(start < high and low < start + buffer.nbytes for low, high in bounds):
                raise ValueError(f"out[{rank}][{name!r}] shares memory with a column; inputs stay untouched")
