"""Read the blocks that arrive at one rank: check every byte, then give the views in them.

In:   ``EncodedBlock``s from any transport (``pipeline/block_fetcher.py``)
Out:  ``ReadBlock``: shares of steps, and views over the block's own memory (``pipeline/feed_source.py``)

Offsets, position ids and the padding mask are made here, by the functions that make them from a plan.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ringfeed.pipeline.arrow_values import numpy_values
from ringfeed.pipeline.manifest import CorruptDataError, describe_difference
from ringfeed.pipeline.pack_slots import lay_out
from ringfeed.pipeline.ranks import MISSING
from ringfeed.pipeline.step_block import TOKEN_COLUMNS, BlockHeader, block_schema, column_digests
from ringfeed.pipeline.step_packs import Pieces
from ringfeed.pipeline.view_kernels import fill_positions
from ringfeed.pipeline.views import RankView

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

    from ringfeed.pipeline.feed_facts import FeedFacts
    from ringfeed.pipeline.feed_request import BlockRequest
    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.pack_slots import PackSlots
    from ringfeed.pipeline.step_block import EncodedBlock
    from ringfeed.pipeline.step_share import StepShare

__all__ = ["ReadBlock", "read_block"]

_EMPTY = np.empty(0, dtype=np.int32)
_EMPTY.flags.writeable = False


def read_block(block: EncodedBlock, request: BlockRequest, facts: FeedFacts) -> ReadBlock:
    """Check that ``block`` is the whole and unharmed answer to ``request``.

    Raises:
        CorruptDataError: if it is not; names the block and what of it is wrong.
        ValueError: if it is of another run, or another version of ringfeed.
    """
    header = BlockHeader.from_bytes(block.header)
    where = _where(request)
    if header.fingerprint != facts.fingerprint:
        raise ValueError(
            f"{where} is of run {header.fingerprint}, this rank follows {facts.fingerprint}; the service at "
            "this address serves something else now"
        )
    if header.request != request:
        difference = describe_difference(request.to_dict(), header.request.to_dict(), words=("asked", "got"))
        raise CorruptDataError(f"{where} is the answer to another request ({difference})")
    per_step = facts.batches_per_step(request.place)
    if [share.step for share in header.shares] != list(request.steps(per_step)):
        raise CorruptDataError(f"{where} has the facts of steps {[share.step for share in header.shares]}")
    _check_rows(block.rows, header, facts, where)
    return ReadBlock(block, header, facts, where)


def _check_rows(rows: pa.RecordBatch, header: BlockHeader, facts: FeedFacts, where: str) -> None:
    schema = block_schema(facts, header.request.columns)
    if not rows.schema.equals(schema):
        raise CorruptDataError(f"{where} has columns {rows.schema.names}, expected {schema.names}")
    if any(column.null_count for column in rows.columns):
        raise CorruptDataError(f"{where} has entries without a value")
    found = column_digests(rows)
    damaged = [name for name in schema.names if found[name] != header.digests.get(name)]
    if damaged:
        raise CorruptDataError(f"{where} is damaged in {', '.join(damaged)}: its bytes changed on the way")


class ReadBlock:
    """A block whose bytes are right. Views lie over its memory; one thread at a time."""

    def __init__(self, block: EncodedBlock, header: BlockHeader, facts: FeedFacts, where: str) -> None:
        """Use ``read_block``."""
        self.nbytes = block.nbytes
        """Bytes that the block holds as long as it is kept."""
        self.request = header.request
        self.shares: dict[int, StepShare] = {share.step: share for share in header.shares}
        self._spec: ViewSpec = facts.spec
        self._where = where
        self._columns = {name: _flat(block.rows.column(name)) for name in block.rows.schema.names}
        batches = header.request.batches(facts.batches_per_step(header.request.place))
        packs = [
            (step, pack)
            for step, micro_batch in batches
            for pack in self.shares[step].packs[micro_batch].tolist()
            if pack != MISSING
        ]
        if header.request.columns and len(packs) != block.rows.num_rows:
            raise CorruptDataError(f"{where} has {block.rows.num_rows} packs, its steps say {len(packs)}")
        rows = packs if header.request.columns else []
        self._rows = {place: row for row, place in enumerate(rows)}

    def holds(self, step: int, pack: int) -> bool:
        """Return whether the pack is in this block."""
        return (step, pack) in self._rows

    def view(self, step: int, pack: int) -> RankView:
        """Return the rank's view of a pack that is in this block.

        Position ids and mask are fresh arrays, ids and labels the block's own and read-only.

        Raises:
            ValueError: if the pack is not in this block.
            CorruptDataError: if the row does not fit the layout.
        """
        row = self._rows.get((step, pack))
        if row is None:
            raise ValueError(f"{self._where} holds no pack {pack} of step {step}")
        pieces, skipped = self._pieces(row)
        slots = lay_out(pieces, spec=self._spec, skipped=skipped)
        tokens = {n: self._entries(n, row) if n in self._columns else _EMPTY for n in TOKEN_COLUMNS}
        positions, mask = self._derive(slots, tokens)
        digests = self._columns.get("chunk_digest")
        return RankView(
            input_ids=tokens["input_ids"],
            labels=tokens["labels"],
            position_ids=positions,
            padding_mask=mask,
            cu_seqlens=slots.cu_seqlens,
            cu_seqlens_padded=slots.cu_seqlens_padded,
            documents=slots.documents,
            local_supervised=int(self._columns["local_supervised"][1][row]),
            chunk_digest=None if digests is None else int(digests[1][row]),
        )

    def _pieces(self, row: int) -> tuple[Pieces, npt.NDArray[np.bool_] | None]:
        lengths = self._entries("lengths", row).astype(np.int64)
        documents = self._entries("documents", row).astype(np.int64)
        # Starts are sent where positions continue from them, epochs never: no view depends on them.
        has_starts = "starts" in self._columns
        starts = self._entries("starts", row) if has_starts else np.zeros(len(lengths), dtype=np.int64)
        skipped = self._entries("skipped", row) != 0 if "skipped" in self._columns else None
        return Pieces(documents, starts, lengths, np.zeros(len(lengths), dtype=np.int32)), skipped

    def _derive(
        self, slots: PackSlots, tokens: dict[str, npt.NDArray[np.int32]]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.bool_]]:
        """Return position ids and padding mask; they follow from offsets and layout."""
        place, padded = self.request.place, slots.cu_seqlens_padded
        index_map = self._spec.layout.index_map(
            padded, cp_size=place.cp_size, cp_rank=place.cp_rank, cu_seqlens=slots.cu_seqlens
        )
        wrong = [n for n in TOKEN_COLUMNS if n in self._columns and len(tokens[n]) != len(index_map)]
        if wrong:
            raise CorruptDataError(
                f"{self._where} has {len(tokens[wrong[0]])} {wrong[0]} for cp_rank={place.cp_rank}, which "
                f"holds {len(index_map)} tokens of the pack"
            )
        positions, mask = np.empty(len(index_map), dtype=np.int32), np.empty(len(index_map), dtype=np.bool_)
        fill_positions(index_map.runs, padded, slots.real_lengths, slots.first_positions, positions, mask)
        return positions, mask

    def _entries(self, name: str, row: int) -> npt.NDArray[Any]:
        offsets, values = self._columns[name]
        return values[offsets[row] : offsets[row + 1]]


def _flat(column: pa.Array) -> tuple[npt.NDArray[np.int64], npt.NDArray[Any]]:
    """Return offsets and values of a column over its own memory; a flat column has an entry a row."""
    if hasattr(column, "offsets"):
        return numpy_values(column.offsets), numpy_values(column.values)
    return np.arange(len(column) + 1), numpy_values(column)


def _where(request: BlockRequest) -> str:
    place = request.place
    return (
        f"the block of {request.num_micro_batches} micro-batches from step {request.first_step}, "
        f"micro-batch {request.first_micro_batch} (dp rank {place.dp_rank} of {place.dp_size}, "
        f"cp rank {place.cp_rank} of {place.cp_size})"
    )
