"""What a plan says it was made from, and the manifest of a finished one.

In:   ``PlanOptions``, the documents of the plan, blocks that are done (``writer.py``)
Out:  ``Recipe``, the request of a ``StagedFolder`` (``pipeline/staging.py``), ``Manifest``
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from ringfeed.pipeline.manifest import CorruptDataError, FileEntry, Manifest, file_entry, fingerprint
from ringfeed.pipeline.plan import PLAN_FORMAT
from ringfeed.pipeline.plan_blocks import (
    block_name,
    losses_name,
    read_block_facts,
    snapshot_name,
    sum_facts,
)
from ringfeed.pipeline.planner.block_planner import BlocksDone, PlanTask
from ringfeed.pipeline.planner.documents import DocumentTable
from ringfeed.pipeline.planner.mixture import resolve_mixture
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.report import report_on_blocks
from ringfeed.pipeline.planner.snapshots import Snapshot, state_after
from ringfeed.pipeline.recipe import Recipe, RecipeSegment

__all__ = ["announcement", "finished_manifest", "plan_recipe", "plan_request", "source_facts"]


def plan_recipe(options: PlanOptions, documents: DocumentTable) -> Recipe:
    """Return what shapes the steps of the plan that ``options`` ask for.

    Raises:
        ValueError: if the mixture does not fit the corpora.
    """
    mixture = None
    if options.mixture is not None:
        mixture = resolve_mixture(options.mixture, documents.sources, epochs=options.epochs).recipe
    return Recipe(
        pack_tokens=options.pack_tokens,
        pack_shape=str(options.pack_shape),
        length_buckets=str(options.length_buckets),
        pad_multiple=options.document_multiple,
        packs_per_step=options.packs_per_step,
        slate_size=options.packs_per_slate,
        balance=str(options.balance),
        schedule=str(options.schedule_of_steps) if options.has_slates else None,
        long_tokens=options.tokens_of_long if options.has_slates else None,
        window=options.window,
        overflow=str(options.overflow),
        seed=options.seed,
        positions=options.positions,
        boundary_label=options.boundary_label,
        mean_tokens=None if options.variable is None else options.variable.mean_tokens,
        piece_tokens=None if options.variable is None else options.variable.piece_tokens,
        work_budget=None if options.variable is None else options.variable.work_budget,
        max_delay=None if options.variable is None else options.variable.max_delay,
        unsupervised=str(options.unsupervised),
        cost_model=options.cost_model.name,
        sources=documents.sources,
        mixture=mixture,
    )


def plan_request(options: PlanOptions, segments: Sequence[RecipeSegment]) -> dict[str, Any]:
    """Return all that decides the files of the plan, JSON-able.

    Args:
        options: where the plan ends, and how its blocks are cut.
        segments: what shapes its steps.
    """
    return {
        "segments": [segment.to_json() for segment in segments],
        "epochs": options.epochs,
        "steps": options.steps,
        "mixture": None if options.mixture is None else options.mixture.to_json(),
        "block_limits": {"steps": options.block_limits.steps, "pieces": options.block_limits.pieces},
        "extensions": [],
    }


def source_facts(documents: DocumentTable, output: Path) -> dict[str, Any]:
    """Return where the documents of a plan are, for whoever opens it."""
    return {
        "source_paths": [os.path.relpath(os.path.realpath(path), output) for path in documents.source_paths],
        "source_made_from": documents.source_made_from,
        "knows_masks": documents.knows_masks,
    }


def announcement(task: PlanTask, *, request: dict[str, Any], output: Path) -> Manifest:
    """Return what is known of a plan before its first block, for those who follow it."""
    return Manifest(
        format=PLAN_FORMAT,
        fingerprint=fingerprint(request),
        made_from=request,
        files=(),
        facts=source_facts(task.documents, output),
    )


def finished_manifest(task: PlanTask, done: BlocksDone, *, request: dict[str, Any], output: Path) -> Manifest:
    """Measure the blocks in the task's folder, and return the manifest of the plan that they are.

    Raises:
        CorruptDataError: if a byte of a block changed since it was written; names the file.
    """
    folder = task.folder
    states = [_state_after(folder, number) for number in range(done.num_blocks)]
    # As they were when they were written: what is on disk now is no witness of that.
    blocks = [state.finished for state in states if state.finished is not None]
    facts = [read_block_facts(folder / block_name(number)) for number in range(done.num_blocks)]
    report = report_on_blocks(folder, blocks, facts, task.options)
    return Manifest(
        format=PLAN_FORMAT,
        fingerprint=fingerprint(request),
        made_from=request,
        files=(*blocks, *_other_files(folder, states)),
        facts={
            "num_steps": report.steps,
            "num_packs": report.packs,
            "num_pieces": report.pieces,
            "flush_step": done.flush_step,
            **sum_facts(facts),
            **source_facts(task.documents, output),
            "report": report.as_dict(),
        },
    )


def _state_after(folder: Path, number: int) -> Snapshot:
    try:
        return state_after(folder, number)
    except CorruptDataError as error:
        raise CorruptDataError(f"{error}; or run the same command again, which plans on from there") from None


def _other_files(folder: Path, states: Sequence[Snapshot]) -> list[FileEntry]:
    names = [snapshot_name(number) for number in range(len(states) + 1)]
    losses = [state.losses for state in states if state.losses is not None]
    noted = {entry.path for entry in losses}
    # Plans of an earlier ringfeed do not note them.
    more = [losses_name(n) for n in range(len(states)) if (folder / losses_name(n)).exists()]
    names += [name for name in more if name not in noted]
    return [*(file_entry(folder, name, rows=_num_rows(folder / name)) for name in names), *losses]


def _num_rows(path: Path) -> int:
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        return sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))
