"""Write pre-sharded steps: one pass over each pack gives the views of all cp ranks.

In:   a plan, its corpora, a ``ViewSpec`` (``pipeline/opening.py``)
Out:  folders of a shards folder (``pipeline/shard_files.py``), and the manifest over them

Every function here is pure: the same task gives the same bytes, on any worker, as often as it is asked.
``workers/shard_job.py`` runs them on Ray.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from ringfeed.pipeline.arrow_codec import FORMAT_VERSION, encode_view
from ringfeed.pipeline.manifest import FileEntry, Manifest, file_entry, fingerprint
from ringfeed.pipeline.opening import count_slots
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_source import PlanSource
from ringfeed.pipeline.shard_files import (
    FileIndex,
    FolderFacts,
    ViewFileWriter,
    index_name,
    packs_name,
    view_file_name,
)
from ringfeed.pipeline.staging import write_atomically
from ringfeed.pipeline.store import SHARDS_FORMAT
from ringfeed.pipeline.token_files import DAMAGE
from ringfeed.pipeline.view_source import NO_OVERLAY
from ringfeed.pipeline.views import RankView

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from ringfeed.pipeline.laid_pack import LaidPack
    from ringfeed.pipeline.opening import ViewSpec
    from ringfeed.pipeline.view_source import Overlay

__all__ = ["ShardTask", "ShardWriter", "num_folders", "shards_made_from", "shards_manifest", "write_steps"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardTask:
    """All that decides the bytes of a shards folder; small, and picklable for Ray."""

    plan: Path
    folder: Path
    """Where to write: ``StagedFolder.path``."""
    spec: ViewSpec
    steps_per_folder: int
    corpora: tuple[Path, ...] | None = None
    """In command order; None takes the plan's own."""
    overlay: Overlay | None = None


def num_folders(plan: Plan, *, steps_per_folder: int) -> int:
    """Return how many times ``write_steps`` is called, with index 0 and up."""
    return -(-plan.num_steps // steps_per_folder)


def write_steps(task: ShardTask, index: int) -> list[FileEntry]:
    """Do what ``ShardWriter.write_steps`` does, for a worker that is asked once."""
    with ShardWriter(task) as writer:
        return writer.write_steps(index)


class ShardWriter:
    """Writes folders of one task. Opening plan and corpora takes a while: keep it for several folders."""

    def __init__(self, task: ShardTask) -> None:
        """Open the plan and its corpora.

        Raises:
            ValueError: if the corpora are not the planned ones.
            CorruptDataError: if plan or corpora are damaged.
        """
        self._task = task
        self._plan = Plan.open(task.plan)
        corpora = self._plan.open_corpora(task.corpora)
        self._source = PlanSource(self._plan, corpora, spec=task.spec, overlay=task.overlay)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._source.close()

    def write_steps(self, index: int) -> list[FileEntry]:
        """Write folder ``index`` of the shards, or find it finished, and return what is in it.

        A killed writer leaves at most temporary files and a folder without ``packs.arrow``, which is
        written last; the next call writes the same bytes over it, and over a folder that was damaged since.

        Raises:
            ValueError: if a pack is over the budget.
            CorruptDataError: if plan or corpora are damaged.
            OSError: if the disk is full.
        """
        first = index * self._task.steps_per_folder
        steps = range(first, min(first + self._task.steps_per_folder, self._plan.num_steps))
        if not _is_whole(self._task, index, self._source, steps):
            _write_folder(self._task, index, self._source, steps)
        return _entries(self._task, index, sum(self._plan.step_packs(step).num_packs for step in steps))


def shards_made_from(plan: Plan, task: ShardTask) -> dict[str, Any]:
    """Return what goes into the fingerprint of the shards: all that shapes them, nothing of the machine."""
    return {
        "recipe": plan.recipe_fingerprint,
        "num_steps": plan.num_steps,
        "chain": plan.chain(plan.num_steps - 1),
        "corpora": plan.corpus_fingerprints(),
        "spec": task.spec.facts(),
        "overlay": NO_OVERLAY if task.overlay is None else task.overlay.digest,
        "steps_per_folder": task.steps_per_folder,
        "view_format": FORMAT_VERSION.decode(),
    }


def shards_manifest(plan: Plan, task: ShardTask, files: Sequence[FileEntry]) -> Manifest:
    """Return the manifest of finished shards; ``files`` are those of all folders, in order."""
    made_from = shards_made_from(plan, task)
    return Manifest(
        format=SHARDS_FORMAT,
        fingerprint=fingerprint(made_from),
        made_from=made_from,
        files=tuple(files),
        facts={
            "num_steps": plan.num_steps,
            "packs_per_step": plan.packs_per_step,
            "slate_size": plan.slate_size,
            "recipe_fingerprint": plan.recipe_fingerprint,
            "sources": list(plan.sources),
            "replaced_steps": [list(pair) for pair in plan.replaced_steps],
            "num_documents": sum(source.num_documents for source in plan.recipe.sources),
            "overlay": made_from["overlay"],
            "max_slots": plan.largest_num_pieces + 1,
            "num_slots": count_slots(plan, task.spec),
            "steps_per_folder": task.steps_per_folder,
            "spec": task.spec.facts(),
        },
    )


def _is_whole(task: ShardTask, index: int, source: PlanSource, steps: range) -> bool:
    """Return whether an earlier writer finished the folder, and all is what it wrote."""
    folder = task.folder
    if not (folder / packs_name(index)).exists():
        return False
    try:
        for rank in range(task.spec.cp_size):
            path = folder / view_file_name(index, rank)
            data = (folder / index_name(index, rank)).read_bytes()
            if not FileIndex.read(data, of_bytes=path.stat().st_size).is_of(path):
                return False
        found = FolderFacts.read((folder / packs_name(index)).read_bytes())
    except DAMAGE:
        return False
    return found.equals(FolderFacts.of_steps([source.step_facts(step) for step in steps]))


def _write_folder(task: ShardTask, index: int, source: PlanSource, steps: range) -> None:
    cp_size = task.spec.cp_size
    with ExitStack() as stack:
        writers = []
        for rank in range(cp_size):
            path = stack.enter_context(write_atomically(task.folder / view_file_name(index, rank)))
            writer = ViewFileWriter(path)
            stack.callback(writer.abandon)
            writers.append(writer)
        cutter = _Cutter(source)
        for step in steps:
            for pack in range(source.step_facts(step).num_packs):
                cutter.write(step, pack, writers)
        indexes: list[FileIndex] = [writer.finish() for writer in writers]
    for rank, file_index in enumerate(indexes):
        with write_atomically(task.folder / index_name(index, rank)) as path:
            file_index.write(path)
    facts = FolderFacts.of_steps([source.step_facts(step) for step in steps])
    with write_atomically(task.folder / packs_name(index)) as path:
        facts.write(path)


class _Cutter:
    """Lays packs out and writes all ranks' views of them; its buffers are reused."""

    def __init__(self, source: PlanSource) -> None:
        self._source = source
        # Uneven shares (layout magi) and variable packs have other lengths in every pack: the longest stay.
        self._ids = [np.empty(0, dtype=np.int32)] * source.spec.cp_size
        self._labels = [*self._ids]

    def write(self, step: int, pack: int, writers: Sequence[ViewFileWriter]) -> None:
        laid = self._source.lay_pack(step, pack)
        ids, labels = (self._first(buffers, laid) for buffers in (self._ids, self._labels))
        counts = self._source.fill_ranks(laid, ids, labels)
        for rank, writer in enumerate(writers):
            view = _view(laid, ids[rank], labels[rank], counts[rank])
            writer.write(encode_view(view, laid.pieces, step=step, pack=pack))

    @staticmethod
    def _first(buffers: list[npt.NDArray[np.int32]], laid: LaidPack) -> list[npt.NDArray[np.int32]]:
        """Return each rank's buffer, grown if need be and cut to its L."""
        for rank, index_map in enumerate(laid.maps):
            if len(buffers[rank]) < len(index_map):
                buffers[rank] = np.empty(len(index_map), dtype=np.int32)
        return [buffer[: len(index_map)] for buffer, index_map in zip(buffers, laid.maps, strict=True)]


def _view(
    laid: LaidPack, ids: npt.NDArray[np.int32], labels: npt.NDArray[np.int32], local_supervised: int
) -> RankView:
    # Positions and mask are not encoded: whoever reads the view derives them.
    return RankView(
        input_ids=ids,
        labels=labels,
        position_ids=ids[:0],
        padding_mask=np.empty(0, dtype=np.bool_),
        cu_seqlens=laid.slots.cu_seqlens,
        cu_seqlens_padded=laid.slots.cu_seqlens_padded,
        documents=laid.slots.documents,
        local_supervised=local_supervised,
    )


def _entries(task: ShardTask, index: int, num_packs: int) -> list[FileEntry]:
    """Hash the files of a finished folder, in a fixed order."""
    ranks = range(task.spec.cp_size)
    files = [(view_file_name(index, rank), num_packs) for rank in ranks]
    files += [(index_name(index, rank), num_packs + 2) for rank in ranks]
    files.append((packs_name(index), num_packs))
    return [file_entry(task.folder, name, rows) for name, rows in files]
