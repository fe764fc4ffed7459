"""Views read from pre-sharded files.

In:   a shards folder, written by ``ringfeed shard`` (``pipeline/shard_writer.py``)
Out:  ``PackView``s of any rank (``pipeline/view_source.py``), one ``preadv`` each into a reused buffer

A rank reads its own rows, the index of its own files, and the small table of all packs. What is read is
hashed before it is decoded.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import xxhash

from ringfeed.pipeline.arrow_codec import SCHEMA, ViewDecoder
from ringfeed.pipeline.laid_pack import LaidPack, lay_pack
from ringfeed.pipeline.local_source import LocalSource
from ringfeed.pipeline.manifest import (
    CorruptDataError,
    FileEntry,
    check_size,
    check_sizes_at_open,
    read_manifest,
)
from ringfeed.pipeline.opening import ViewSpec
from ringfeed.pipeline.shard_files import FileIndex, FolderFacts, index_name, packs_name, view_file_name
from ringfeed.pipeline.step_packs import Pieces
from ringfeed.pipeline.token_files import DAMAGE
from ringfeed.pipeline.view_source import PackView, StepFacts
from ringfeed.pipeline.views import padding_view

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from ringfeed.pipeline.manifest import Manifest

__all__ = ["SHARDS_FORMAT", "FileStore"]

SHARDS_FORMAT = "ringfeed-shards"
# The folder in use and its neighbour: prefetching goes on while a late reader finishes.
_FOLDERS_KEPT = 2


class FileStore(LocalSource):
    """A ``ViewSource`` over a shards folder. One thread at a time."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Use ``FileStore.open``."""
        self.path = folder
        self.manifest = manifest
        self.spec = ViewSpec.from_facts(manifest.facts["spec"])
        self.bytes_read = 0
        """Bytes read from the folder so far, its manifest not counted."""
        self._entries = {entry.path: entry for entry in manifest.files}
        self._decoder = ViewDecoder(self.spec)
        self._staging = np.empty(0, dtype=np.uint8)
        self._tables: OrderedDict[int, FolderFacts] = OrderedDict()
        self._files: OrderedDict[tuple[int, int], _OpenFile] = OrderedDict()

    @classmethod
    def open(cls, path: str | Path) -> FileStore:
        """Open a finished shards folder; reads its manifest and checks sizes of files.

        Raises:
            ValueError: if there is none, it is half-written, or from a newer ringfeed.
            CorruptDataError: if a file is missing or truncated; names it.
        """
        folder = Path(path)
        manifest = read_manifest(folder, format=SHARDS_FORMAT)
        check_sizes_at_open(folder, manifest)
        return cls(folder, manifest)

    @property
    def num_steps(self) -> int:
        return int(self.manifest.facts["num_steps"])

    @property
    def packs_per_step(self) -> int:
        return int(self.manifest.facts["packs_per_step"])

    @property
    def slate_size(self) -> int:
        return int(self.manifest.facts["slate_size"])

    @property
    def recipe_fingerprint(self) -> str:
        return str(self.manifest.facts["recipe_fingerprint"])

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(self.manifest.facts["sources"])

    @property
    def replaced_steps(self) -> tuple[tuple[int, int], ...]:
        return tuple((first, end) for first, end in self.manifest.facts["replaced_steps"])

    @property
    def num_documents(self) -> int:
        return int(self.manifest.facts["num_documents"])

    @property
    def overlay_digest(self) -> str:
        return str(self.manifest.facts["overlay"])

    def max_slots(self) -> int:
        return int(self.manifest.facts["max_slots"])

    def chain(self, step: int) -> str:
        if step == -1:
            return self.recipe_fingerprint
        return self.step_facts(step).chain

    def step_facts(self, step: int) -> StepFacts:
        return self._table(self._folder_of(step)).step_facts(step)

    def pack_view(self, step: int, pack: int | None, *, cp_rank: int) -> PackView:
        if pack is None:
            return PackView(view=padding_view(self.spec, cp_rank=cp_rank), pieces=Pieces.concat([]))
        if not 0 <= cp_rank < self.spec.cp_size:
            raise ValueError(f"cp_rank={cp_rank}: {self.path} holds ranks 0 to {self.spec.cp_size - 1}")
        folder = self._folder_of(step)
        first, last = self._table(folder).rows(step)
        if not 0 <= pack < last - first:
            raise ValueError(f"step {step} has no pack {pack}: it has packs 0 to {last - first - 1}")
        opened = self._open_file(folder, cp_rank)
        where = f"step {step}, pack {pack}"
        data = self._read_entry(opened, first + pack + 1, what=where)
        batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.py_buffer(data)), SCHEMA)
        found = self._decoder.decode(batch, cp_rank=cp_rank)
        if (found.step, found.pack) != (step, pack):
            raise CorruptDataError(
                f"{opened.path}: {where} holds step {found.step}, pack {found.pack}; make {self.path} again"
            )
        return found.view

    def lay_pack(self, step: int, pack: int) -> LaidPack:
        found = self.pack_view(step, pack, cp_rank=0)
        # Copies: what the decoder returns lies in the staging buffer.
        pieces = found.pieces.take(np.arange(len(found.pieces)))
        skipped = np.diff(found.view.cu_seqlens)[: len(pieces)] == 0
        return lay_pack(pieces, place=(step, pack), spec=self.spec, skipped=skipped)

    def fill_ranks(
        self, laid: LaidPack, ids: Sequence[npt.NDArray[np.int32]], labels: Sequence[npt.NDArray[np.int32]]
    ) -> list[int]:
        counts = []
        for rank, (rank_ids, rank_labels) in enumerate(zip(ids, labels, strict=True)):
            view = self.pack_view(laid.step, laid.pack, cp_rank=rank).view
            rank_ids[:], rank_labels[:] = view.input_ids, view.labels
            counts.append(view.local_supervised)
        return counts

    @property
    def bytes_held(self) -> int:
        """Bytes of the staging buffer."""
        return self._staging.nbytes

    def close(self) -> None:
        for opened in self._files.values():
            os.close(opened.descriptor)
        self._files.clear()
        self._tables.clear()
        self._staging = np.empty(0, dtype=np.uint8)

    def _folder_of(self, step: int) -> int:
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step {step} is not in {self.path}: it has steps 0 to {self.num_steps - 1}")
        return step // int(self.manifest.facts["steps_per_folder"])

    def _table(self, folder: int) -> FolderFacts:
        table = self._tables.get(folder)
        if table is None:
            with self._decoding(packs_name(folder)) as data:
                table = FolderFacts.read(data)
            self._tables[folder] = table
            if len(self._tables) > _FOLDERS_KEPT:
                self._tables.popitem(last=False)
        return table

    def _open_file(self, folder: int, cp_rank: int) -> _OpenFile:
        key = (folder, cp_rank)
        opened = self._files.get(key)
        if opened is None:
            entry = self._entry(view_file_name(folder, cp_rank))
            check_size(self.path, entry)
            with self._decoding(index_name(folder, cp_rank)) as data:
                index = FileIndex.read(data, of_bytes=entry.bytes)
            opened = _OpenFile(self.path / entry.path, index)
            self._files[key] = opened
            # A reader of all ranks (verify) needs one file per rank, a trainer one in all.
            if len(self._files) > _FOLDERS_KEPT * self.spec.cp_size:
                os.close(self._files.popitem(last=False)[1].descriptor)
            for place, what in ((0, "the header"), (index.num_packs + 1, "the footer")):
                self._read_entry(opened, place, what=what)
        return opened

    @contextmanager
    def _decoding(self, name: str) -> Iterator[bytes]:
        """Give the checked bytes of a small file; what decoding them raises names it."""
        data = self._read_checked(name)
        try:
            yield data
        except DAMAGE as error:
            raise CorruptDataError(f"{self.path / name} cannot be read: {error}; {self._way_out()}") from None

    def _read_checked(self, name: str) -> bytes:
        """Read a small file whole and check its hash against the manifest."""
        entry = self._entry(name)
        check_size(self.path, entry)
        path = self.path / name
        data = path.read_bytes()
        self.bytes_read += len(data)
        if xxhash.xxh3_64_hexdigest(data) != entry.xxh3_64:
            raise CorruptDataError(f"{path} is damaged: its bytes changed; {self._way_out()}")
        return data

    def _entry(self, name: str) -> FileEntry:
        entry = self._entries.get(name)
        if entry is None:
            raise CorruptDataError(f"{self.path}: the manifest lists no {name}; make it again")
        return entry

    def _read_entry(self, opened: _OpenFile, entry: int, *, what: str) -> memoryview:
        """Read one byte range of a view file into the staging buffer and check its hash."""
        offset, size = int(opened.index.offsets[entry]), int(opened.index.sizes[entry])
        if size > len(self._staging):
            self._staging = np.empty(size, dtype=np.uint8)
        data = self._staging.data[:size]
        done = 0
        while done < size:
            got = os.preadv(opened.descriptor, [data[done:]], offset + done)
            if not got:
                raise CorruptDataError(f"{opened.path} ends within {what}; {self._way_out()}")
            done += got
        self.bytes_read += size
        if xxhash.xxh3_64_intdigest(data) != int(opened.index.digests[entry]):
            raise CorruptDataError(
                f"{opened.path} is damaged in {what}: its bytes changed; {self._way_out()}"
            )
        return data

    def _way_out(self) -> str:
        return f"restore it from a copy or make {self.path} again"


class _OpenFile:
    """A view file that is open, and where everything in it lies."""

    def __init__(self, path: Path, index: FileIndex) -> None:
        self.path = path
        self.index = index
        self.descriptor = os.open(path, os.O_RDONLY)
