"""One block of a plan on disk: the rows of some steps, and what is true of them.

In:   ``PackRows`` of whole steps, ``BlockFacts`` (``pipeline/planner/writer.py``)
Out:  ``block-NNNNN.arrow``: one compressed Arrow record batch, facts in the schema's metadata

The format is described, with its bytes, in ``docs/plan_format.md``.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash
from numpy.typing import NDArray

from ringfeed.pipeline.manifest import CorruptDataError, FileEntry, check_size
from ringfeed.pipeline.step_packs import SCHEMA, PackRows
from ringfeed.pipeline.token_files import DAMAGE
from ringfeed.sharding.padding import slot_lengths

__all__ = [
    "FOOTPRINT_MULTIPLES",
    "SNAPSHOT_KEY",
    "Block",
    "BlockFacts",
    "FootprintScan",
    "block_name",
    "losses_name",
    "pack_footprints",
    "read_block",
    "read_block_facts",
    "read_columns",
    "read_finished",
    "snapshot_name",
    "sum_facts",
    "write_block",
]

FOOTPRINT_MULTIPLES = tuple(1 << power for power in range(11))
"""Multiples whose largest pack footprint is stored: the powers of two up to 1,024."""

SNAPSHOT_KEY = b"ringfeed.snapshot"
"""Where a snapshot's schema has the planner's state (``planner/snapshots.py``)."""

_FACTS_KEY = b"ringfeed.plan_block"
# Level 1 is a few per cent larger and several times faster than 9 (docs/plan_format.md).
_CODEC = pa.Codec("zstd", compression_level=1)
_ONE_THREAD = pa.ipc.IpcReadOptions(use_threads=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockFacts:
    """What a block says about its rows without decoding them."""

    first_step: int
    previous_chain: str
    """h of the step before ``first_step``."""
    chains: tuple[str, ...]
    """h of each step, in order."""
    footprints: tuple[int, ...]
    """Largest pack footprint at each of ``FOOTPRINT_MULTIPLES``."""
    largest_num_pieces: int
    """Most pieces in one pack."""
    least_supervised: int | None
    """Fewest supervised tokens in one step; None where masks are unknown."""
    num_epochs: int
    """One more than the latest epoch that a piece was drawn in."""
    source_tokens: tuple[int, ...]
    """Real tokens of each source."""
    source_supervised: tuple[int, ...] | None
    """Supervised tokens of each source; None where masks are unknown."""
    tally: Mapping[str, Any] = field(default_factory=dict)
    """Sums for the report (``pipeline/planner/tally.py``)."""

    @property
    def num_steps(self) -> int:
        return len(self.chains)

    def encode(self) -> bytes:
        """Return the facts as JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return json.dumps(values, separators=(",", ":")).encode()

    @classmethod
    def decode(cls, text: bytes) -> "BlockFacts":
        """Return the facts in ``text``; the way back from ``encode``."""
        values: dict[str, Any] = json.loads(text)
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})


@dataclass(frozen=True, slots=True, eq=False)
class Block:
    """A block that has been read and checked."""

    facts: BlockFacts
    rows: PackRows
    table: pa.Table
    """The same rows, as ``SCHEMA`` says."""

    def row_range(self, step: int) -> tuple[int, int]:
        """Return the first row of ``step`` and the row after its last one."""
        first, last = np.searchsorted(self.rows.steps, [step, step + 1])
        return int(first), int(last)


@dataclass(frozen=True, kw_only=True, slots=True)
class FootprintScan:
    """How the packs of a plan fit a budget at another multiple than its own."""

    largest: int
    """Tokens that the largest pack takes: the smallest budget that is enough."""
    num_over: int
    """Packs that take more than the budget."""
    num_packs: int

    @classmethod
    def of(cls, blocks: Iterable[Block], *, multiple: int, budget: int) -> "FootprintScan":
        """Count the packs of ``blocks`` that take more than ``budget`` tokens at ``multiple``."""
        largest = num_over = num_packs = 0
        for block in blocks:
            footprints = pack_footprints(block.rows, multiple=multiple)
            largest = max(largest, int(footprints.max()))
            num_over += int((footprints > budget).sum())
            num_packs += len(footprints)
        return cls(largest=largest, num_over=num_over, num_packs=num_packs)


def block_name(block: int) -> str:
    """Return the file name of block ``block``."""
    return f"block-{block:05d}.arrow"


def snapshot_name(block: int) -> str:
    """Return the file name of the planner's state before block ``block``."""
    return f"snapshot-{block:05d}"


def losses_name(block: int) -> str:
    """Return the file name of the documents that lost tokens while block ``block`` was planned."""
    return f"losses-{block:05d}.arrow"


def pack_footprints(rows: PackRows, *, multiple: int) -> NDArray[np.int64]:
    """Return the tokens that each pack's slots take at ``multiple``: int64 [K]."""
    if len(rows.steps) == 0:
        return np.empty(0, np.int64)
    return np.add.reduceat(slot_lengths(rows.pieces.lengths, multiple=multiple), rows.offsets[:-1])


def sum_facts(facts: Sequence[BlockFacts]) -> dict[str, Any]:
    """Return what is true of some blocks together, JSON-able."""
    supervised = [block.source_supervised for block in facts if block.source_supervised is not None]
    return {
        "first_steps": [block.first_step for block in facts],
        "footprints": [max(sizes) for sizes in zip(*(block.footprints for block in facts), strict=True)],
        "largest_num_pieces": max((block.largest_num_pieces for block in facts), default=0),
        "least_supervised": min((b.least_supervised for b in facts if b.least_supervised), default=None),
        "num_epochs": max((block.num_epochs for block in facts), default=0),
        "source_tokens": [sum(counts) for counts in zip(*(b.source_tokens for b in facts), strict=True)],
        "source_supervised": [sum(c) for c in zip(*supervised, strict=True)] if supervised else None,
    }


def write_block(path: Path, rows: PackRows, facts: BlockFacts) -> None:
    """Write ``rows`` with ``facts`` to ``path``, the same bytes for the same rows."""
    schema = SCHEMA.with_metadata({_FACTS_KEY: facts.encode()})
    batch = rows.to_table().combine_chunks().to_batches()[0].replace_schema_metadata(schema.metadata)
    options = pa.ipc.IpcWriteOptions(compression=_CODEC, use_threads=False)
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        writer.write_batch(batch)


def read_block(folder: Path, entry: FileEntry) -> Block:
    """Read one block whole and check its hash.

    Raises:
        CorruptDataError: if a byte of it changed since it was written; names the file.
    """
    check_size(folder, entry)
    path = folder / entry.path
    content = path.read_bytes()
    found = xxhash.xxh3_64_hexdigest(content)
    if found != entry.xxh3_64:
        raise CorruptDataError(
            f"{path} has xxh3_64 {found}, the plan's manifest says {entry.xxh3_64}: a byte of it changed; "
            f"restore it from a copy or make {folder} again"
        )
    try:
        with pa.ipc.open_file(pa.BufferReader(content), options=_ONE_THREAD) as reader:
            table = reader.read_all()
        # Checks buffer sizes: lists that point past their values would be read.
        table.validate()
        facts = BlockFacts.decode(table.schema.metadata[_FACTS_KEY])
        table = table.replace_schema_metadata(None)
        return Block(facts, PackRows.from_table(table), table)
    except DAMAGE as error:
        raise CorruptDataError(f"{path} cannot be read: {error}; make {folder} again") from None


def read_block_facts(path: Path) -> BlockFacts:
    """Return the facts of a block, reading none of its rows and checking no hash."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source, options=_ONE_THREAD) as reader:
        return BlockFacts.decode(reader.schema.metadata[_FACTS_KEY])


def read_finished(path: Path) -> FileEntry | None:
    """Return what the snapshot at ``path`` says of the block before it, None for the first snapshot."""
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source, options=_ONE_THREAD) as reader:
        finished = json.loads(reader.schema.metadata[SNAPSHOT_KEY])["finished"]
    return None if finished is None else FileEntry(**finished)


def read_columns(path: Path, names: list[str]) -> pa.Table:
    """Return some columns of a block, decoding no others and checking no hash."""
    fields = [SCHEMA.get_field_index(name) for name in names]
    options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source, options=options) as reader:
        return reader.read_all()
