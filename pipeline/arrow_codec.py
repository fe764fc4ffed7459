"""One rank's view of one pack as one Arrow record batch, and back.

In:   ``RankView`` (``pipeline/views.py``) and the ``Pieces`` it was made from
Out:  ``pyarrow.RecordBatch`` of one row, for a file, Flight or Ray's object store

The schema is the wire format. A change to it is a new ``FORMAT_VERSION``. Position ids and the padding
mask are not in it: the reader derives them from the offsets and its layout, which costs less than
reading five more bytes a token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ringfeed.pipeline.step_packs import Pieces
from ringfeed.pipeline.view_kernels import fill_positions
from ringfeed.pipeline.view_source import PackView
from ringfeed.pipeline.views import RankView

if TYPE_CHECKING:
    import numpy.typing as npt

    from ringfeed.pipeline.opening import ViewSpec

__all__ = ["FORMAT_VERSION", "SCHEMA", "EncodedView", "FormatError", "ViewDecoder", "encode_view"]

FORMAT_VERSION = b"1"
_VERSION_KEY = b"ringfeed.view_format"

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("pack", pa.int64()),
        ("local_supervised", pa.int64()),
        ("input_ids", pa.large_list(pa.int32())),
        ("labels", pa.large_list(pa.int32())),
        ("documents", pa.list_(pa.int64())),
        ("starts", pa.list_(pa.int64())),
        ("lengths", pa.list_(pa.int64())),
        ("epochs", pa.list_(pa.int32())),
        ("cu_seqlens", pa.list_(pa.int32())),
        ("cu_seqlens_padded", pa.list_(pa.int32())),
    ],
    metadata={_VERSION_KEY: FORMAT_VERSION},
)
"""``input_ids`` and ``labels`` are the rank's own [L]; everything else is of the whole pack, the same on
every rank. Piece lists have the skipped pieces too: their real length, from ``cu_seqlens``, is 0."""


class FormatError(ValueError):
    """The batch was written by a version of ringfeed that this one cannot read."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class EncodedView:
    """What a batch holds."""

    step: int
    pack: int
    view: PackView


def encode_view(view: RankView, pieces: Pieces, *, step: int, pack: int) -> pa.RecordBatch:
    """Return the view that one rank has of a pack as a one-row batch with ``SCHEMA``.

    Args:
        view: of one pack (not of a chunk of several).
        pieces: of the pack in slot order, skipped ones included.
        step: of the plan.
        pack: order in the step.
    """
    scalars = [pa.array([value], pa.int64()) for value in (step, pack, view.local_supervised)]
    own = [_row(values, pa.LargeListArray) for values in (view.input_ids, view.labels)]
    lists = (pieces.documents, pieces.starts, pieces.lengths, pieces.epochs)
    shared = [_row(values, pa.ListArray) for values in (*lists, view.cu_seqlens, view.cu_seqlens_padded)]
    return pa.RecordBatch.from_arrays([*scalars, *own, *shared], schema=SCHEMA)


class ViewDecoder:
    """Turns batches back into views of one run. Buffers for positions and masks are reused."""

    def __init__(self, spec: ViewSpec) -> None:
        """Take the spec that the views were made with."""
        self._spec = spec
        self._positions = np.empty(0, dtype=np.int32)
        self._mask = np.empty(0, dtype=np.bool_)

    def decode(self, batch: pa.RecordBatch, *, cp_rank: int) -> EncodedView:
        """Return the view in ``batch``, over the batch's own memory; valid until the next call.

        Args:
            batch: one row, from ``encode_view``.
            cp_rank: whose view it is: position ids follow from it.

        Raises:
            FormatError: if the batch has another format version, or none.
        """
        version = (batch.schema.metadata or {}).get(_VERSION_KEY)
        if version != FORMAT_VERSION:
            raise FormatError(
                f"a view has format version {version!r}, this ringfeed reads {FORMAT_VERSION!r}; "
                "make the shards again with this version"
            )
        flat = {name: batch.column(name).values.to_numpy() for name in SCHEMA.names[3:]}
        step, pack, supervised = (int(batch.column(name)[0].as_py()) for name in SCHEMA.names[:3])
        pieces = Pieces(*(flat[name] for name in ("documents", "starts", "lengths", "epochs")))
        view = self._view(flat, pieces, supervised, cp_rank)
        return EncodedView(step=step, pack=pack, view=PackView(view=view, pieces=pieces))

    def _view(
        self, flat: dict[str, npt.NDArray[Any]], pieces: Pieces, supervised: int, cp_rank: int
    ) -> RankView:
        spec, cu_seqlens, padded = self._spec, flat["cu_seqlens"], flat["cu_seqlens_padded"]
        index_map = spec.layout.index_map(
            padded, cp_size=spec.cp_size, cp_rank=cp_rank, cu_seqlens=cu_seqlens
        )
        if not len(index_map) == len(flat["input_ids"]) == len(flat["labels"]):
            raise ValueError(
                f"a view of {len(flat['input_ids'])} ids and {len(flat['labels'])} labels does not fit "
                f"cp_rank={cp_rank}, which holds {len(index_map)} tokens"
            )
        real = np.diff(cu_seqlens).astype(np.int64)
        first_positions = np.zeros_like(real)
        if spec.positions == "continue":
            first_positions[: len(pieces)] = pieces.starts
        num_local = len(index_map)
        if len(self._mask) < num_local:
            self._positions = np.empty(num_local, dtype=np.int32)
            self._mask = np.empty(num_local, dtype=np.bool_)
        # Uneven shares and variable packs have another L in every view.
        positions, mask = self._positions[:num_local], self._mask[:num_local]
        # A copy of the few offsets: for read-only ones numba would compile the kernel a second time.
        fill_positions(index_map.runs, padded.copy(), real, first_positions, positions, mask)
        return RankView(
            input_ids=flat["input_ids"],
            labels=flat["labels"],
            position_ids=positions,
            padding_mask=mask,
            cu_seqlens=cu_seqlens,
            cu_seqlens_padded=padded,
            documents=pieces.documents[real[: len(pieces)] > 0],
            local_supervised=supervised,
        )


def _row(values: npt.NDArray[Any], kind: Any) -> pa.Array:
    """Return one row that is the whole of ``values``, over the same memory."""
    width = np.int64 if kind is pa.LargeListArray else np.int32
    return kind.from_arrays(pa.array(np.array([0, len(values)], dtype=width)), pa.array(values))
