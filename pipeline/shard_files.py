"""One folder of pre-sharded steps on disk: names, tables, and the checked bytes of each view.

In:   encoded views (``pipeline/arrow_codec.py``), facts of steps (``pipeline/view_source.py``)
Out:  ``steps-NNNNN/``: per cp rank ``cp-RR.arrow`` and ``cp-RR.index.arrow``, and one ``packs.arrow``

``cp-RR.arrow`` is an ordinary Arrow IPC file with one record batch per pack. Its index says where each
batch lies and what its bytes hash to, so that a reader gets exactly its rows with one ``preadv`` each and
trusts none of them unchecked. Every byte of the file belongs to one entry: header, batches, footer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import xxhash

from ringfeed.pipeline.arrow_codec import SCHEMA
from ringfeed.pipeline.view_source import StepFacts

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

__all__ = [
    "FileIndex",
    "FolderFacts",
    "ViewFileWriter",
    "folder_name",
    "index_name",
    "packs_name",
    "view_file_name",
]

_INDEX_SCHEMA = pa.schema([("offset", pa.int64()), ("bytes", pa.int64()), ("xxh3_64", pa.uint64())])


def folder_name(index: int) -> str:
    """Return the name of the folder with steps ``index * steps_per_folder`` and following."""
    return f"steps-{index:05d}"


def view_file_name(index: int, cp_rank: int) -> str:
    """Return where the views of ``cp_rank`` are, relative to the shards folder."""
    return f"{folder_name(index)}/cp-{cp_rank:02d}.arrow"


def index_name(index: int, cp_rank: int) -> str:
    """Return where the byte ranges of ``view_file_name`` are."""
    return f"{folder_name(index)}/cp-{cp_rank:02d}.index.arrow"


def packs_name(index: int) -> str:
    """Return where the facts of the packs are; it is written last, so a folder with it is complete."""
    return f"{folder_name(index)}/packs.arrow"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FileIndex:
    """Byte ranges of one view file: entry 0 is the header, the last one the footer, packs between."""

    offsets: npt.NDArray[np.int64]
    sizes: npt.NDArray[np.int64]
    digests: npt.NDArray[np.uint64]
    """xxh3_64 of each range."""

    @property
    def num_packs(self) -> int:
        return len(self.offsets) - 2

    def write(self, path: Path) -> None:
        """Write the index as an Arrow IPC file."""
        columns = [pa.array(values) for values in (self.offsets, self.sizes, self.digests)]
        _write_table(path, pa.RecordBatch.from_arrays(columns, schema=_INDEX_SCHEMA))

    @classmethod
    def read(cls, data: bytes, *, of_bytes: int) -> FileIndex:
        """Return the index in the bytes of its file, which the caller has checked.

        Raises:
            ValueError: if its ranges do not make up a view file of ``of_bytes``.
        """
        batch = _read_table(data)
        offsets, sizes, digests = (batch.column(name).to_numpy() for name in _INDEX_SCHEMA.names)
        ends = np.cumsum(sizes)
        if len(sizes) < 2 or (sizes < 0).any() or ends[-1] != of_bytes or (offsets != ends - sizes).any():
            raise ValueError(f"its ranges do not make up a file of {of_bytes} bytes")
        return cls(offsets=offsets, sizes=sizes, digests=digests)

    def is_of(self, path: Path) -> bool:
        """Return whether each range of the view file at ``path`` has its hash."""
        return bool((_hash_ranges(path, self.sizes) == self.digests).all())


class ViewFileWriter:
    """Writes one ``cp-RR.arrow`` and remembers where everything in it lies."""

    def __init__(self, path: Path) -> None:
        """Begin the file at ``path``."""
        self._path = path
        self._sink = pa.OSFile(str(path), "wb")
        self._writer = pa.ipc.new_file(self._sink, SCHEMA)
        self._ends: list[int] = []

    def write(self, batch: pa.RecordBatch) -> None:
        """Append one view."""
        # The header is written with the first batch, so it is known where that begins only afterwards.
        self._writer.write_batch(batch)
        self._ends.append(self._sink.tell())

    def finish(self) -> FileIndex:
        """End the file and return its index."""
        self._writer.close()
        self._sink.close()
        total = self._path.stat().st_size
        with pa.memory_map(str(self._path)) as source:
            first = _header_size(source)
        bounds = np.array([0, first, *self._ends, total], dtype=np.int64)
        sizes = np.diff(bounds)
        return FileIndex(offsets=bounds[:-1], sizes=sizes, digests=_hash_ranges(self._path, sizes))

    def abandon(self) -> None:
        """Close the file after an error; what it holds is worth nothing."""
        self._sink.close()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FolderFacts:
    """What ``packs.arrow`` says: one row per pack, in (step, pack) order, without any list."""

    steps: npt.NDArray[np.int64]
    slates: npt.NDArray[np.int32]
    costs: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    """int64 [K], T of each pack."""
    supervised: npt.NDArray[np.int64]
    """int64 [K, S]"""
    chains: pa.StringArray
    """Chain value of each row's step. Left in Arrow: a Python string per pack would be most of the memory."""

    @classmethod
    def of_steps(cls, steps: Sequence[StepFacts]) -> FolderFacts:
        """Gather the facts of consecutive steps."""
        return cls(
            steps=np.concatenate([np.full(facts.num_packs, facts.step, dtype=np.int64) for facts in steps]),
            slates=np.concatenate([facts.slates for facts in steps]),
            costs=np.concatenate([facts.costs for facts in steps]),
            slots=np.concatenate([facts.slots for facts in steps]),
            supervised=np.concatenate([facts.supervised for facts in steps]),
            chains=pa.array([facts.chain for facts in steps for _ in range(facts.num_packs)], pa.string()),
        )

    def rows(self, step: int) -> tuple[int, int]:
        """Return the first row of ``step`` and the one after its last."""
        first, last = np.searchsorted(self.steps, [step, step + 1]).tolist()
        return first, last

    def step_facts(self, step: int) -> StepFacts:
        """Return the facts of one step that is in the folder."""
        first, last = self.rows(step)
        return StepFacts(
            step=step,
            slates=self.slates[first:last],
            costs=self.costs[first:last],
            slots=self.slots[first:last],
            supervised=self.supervised[first:last],
            chain=self.chains[first].as_py(),
        )

    def equals(self, other: FolderFacts) -> bool:
        """Return whether both say the same."""
        names = ("steps", "slates", "costs", "slots", "supervised")
        same = all(np.array_equal(getattr(self, name), getattr(other, name)) for name in names)
        return same and bool(self.chains.equals(other.chains))

    def write(self, path: Path) -> None:
        """Write the facts as an Arrow IPC file."""
        packs = np.arange(len(self.steps)) - np.searchsorted(self.steps, self.steps)
        columns = {
            "step": self.steps,
            "pack": packs.astype(np.int64),
            "slate": self.slates,
            "cost": self.costs,
            "slots": self.slots,
            **{f"supervised_{s}": self.supervised[:, s].copy() for s in range(self.supervised.shape[1])},
        }
        arrays = {name: pa.array(column) for name, column in columns.items()}
        _write_table(path, pa.RecordBatch.from_pydict({**arrays, "chain": self.chains}))

    @classmethod
    def read(cls, data: bytes) -> FolderFacts:
        """Return the facts in the bytes of their file, which the caller has checked."""
        batch = _read_table(data)
        sources = [name for name in batch.schema.names if name.startswith("supervised_")]
        return cls(
            steps=batch.column("step").to_numpy(),
            slates=batch.column("slate").to_numpy(),
            costs=batch.column("cost").to_numpy(),
            slots=batch.column("slots").to_numpy(),
            supervised=np.stack([batch.column(name).to_numpy() for name in sources], axis=1),
            chains=batch.column("chain"),
        )


def _header_size(source: pa.NativeFile) -> int:
    """Return where the first record batch begins: after the magic and the schema message."""
    # Magic "ARROW1" and 2 bytes of padding, then one encapsulated message.
    source.seek(8)
    pa.ipc.read_message(source)
    return int(source.tell())


def _hash_ranges(path: Path, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return the xxh3_64 of consecutive ranges of a file that was just written."""
    digests = np.empty(len(sizes), dtype=np.uint64)
    with path.open("rb") as stream:
        # A range is one view at most: it was in memory a moment ago.
        for i, size in enumerate(sizes.tolist()):
            digests[i] = xxhash.xxh3_64_intdigest(stream.read(size))
    return digests


def _write_table(path: Path, batch: pa.RecordBatch) -> None:
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)


def _read_table(data: bytes) -> pa.RecordBatch:
    batch = pa.ipc.open_file(pa.BufferReader(data)).get_batch(0)
    batch.validate(full=True)
    return batch
