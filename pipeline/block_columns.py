"""Leave columns out of a block: a pipeline stage gets what it needs, from a build that all share.

In:   an ``EncodedBlock`` with all columns (``pipeline/step_block.py``), the columns that a rank wants
Out:  one with these alone, over the same memory
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import xxhash

from ringfeed.pipeline.arrow_values import numpy_values
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS
from ringfeed.pipeline.ranks import MISSING
from ringfeed.pipeline.step_block import (
    TOKEN_COLUMNS,
    BlockHeader,
    EncodedBlock,
    block_schema,
    column_digests,
)
from ringfeed.pipeline.views import padding_view

if TYPE_CHECKING:
    import numpy.typing as npt

    from ringfeed.pipeline.feed_facts import FeedFacts
    from ringfeed.pipeline.feed_request import BlockRequest

__all__ = ["facts_block", "narrow_block"]

_DIGEST_COLUMN = "chunk_digest"


def facts_block(header: BlockHeader) -> EncodedBlock:
    """Return a block without any row, for a request that has no column."""
    empty = pa.RecordBatch.from_arrays([], schema=pa.schema([]))
    return EncodedBlock(header=replace(header, digests={}).to_bytes(), rows=empty)


def narrow_block(block: EncodedBlock, request: BlockRequest, facts: FeedFacts) -> EncodedBlock:
    """Return ``block`` with the columns of ``request`` alone.

    Args:
        block: the answer to ``request`` with all columns, or with some more than asked for.
        request: what is wanted of it; at least ``pieces``.
        facts: of the service.
    """
    if request.columns == BLOCK_COLUMNS:
        return block
    header = BlockHeader.from_bytes(block.header)
    if request.columns == header.request.columns:
        return block
    schema = block_schema(facts, request.columns)
    columns = []
    digests: dict[str, str] = {}
    for name in schema.names:
        if name == _DIGEST_COLUMN and name not in block.rows.schema.names:
            column = pa.array(_chunk_digests(block, header, facts), pa.uint64())
            digests |= column_digests(pa.RecordBatch.from_arrays([column], names=[name]))
        else:
            column = block.rows.column(name)
            digests[name] = header.digests[name]
        columns.append(column)
    narrow = replace(header, request=request, digests=digests)
    return EncodedBlock(header=narrow.to_bytes(), rows=pa.RecordBatch.from_arrays(columns, schema=schema))


def _chunk_digests(block: EncodedBlock, header: BlockHeader, facts: FeedFacts) -> npt.NDArray[np.uint64]:
    """Return per row the ``BatchInfo.digest`` of its micro-batch: of ids and labels of all its packs."""
    padding = padding_view(facts.spec, cp_rank=header.request.place.cp_rank)
    nothing = [np.ascontiguousarray(getattr(padding, name)) for name in TOKEN_COLUMNS]
    columns = [block.rows.column(name) for name in TOKEN_COLUMNS]
    offsets = numpy_values(columns[0].offsets)
    values = [numpy_values(column.values) for column in columns]
    packs = {share.step: share.packs for share in header.shares}
    found = np.empty(block.rows.num_rows, dtype=np.uint64)
    first = 0
    for step, micro_batch in header.request.batches(facts.batches_per_step(header.request.place)):
        hasher = xxhash.xxh3_64()
        row = first
        for pack in packs[step][micro_batch].tolist():
            part = nothing
            if pack != MISSING:
                part = [column[offsets[row] : offsets[row + 1]] for column in values]
                row += 1
            for tokens in part:
                hasher.update(tokens.data)
        found[first:row] = hasher.intdigest()
        first = row
    return found
