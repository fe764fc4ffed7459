"""Plan: from corpora and options to a finished plan folder.

In:   ``PlanOptions`` (``options.py``)
Out:  the plan folder, by one rename (``pipeline/staging.py``), and a ``PlanReport``

Killed at any moment, the same call goes on at the last finished block and ends with the same bytes.
"""

import os
from pathlib import Path
from typing import Any

import pyarrow as pa

from ringfeed.pipeline.manifest import FileEntry, Manifest, file_entry, fingerprint
from ringfeed.pipeline.plan import PLAN_FORMAT
from ringfeed.pipeline.plan_blocks import (
    block_name,
    losses_name,
    read_block_facts,
    snapshot_name,
)
from ringfeed.pipeline.planner.documents import DocumentTable, open_documents
from ringfeed.pipeline.planner.draw import BLOCK_DOCUMENTS, DrawCursor
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.report import PlanReport, measure_plan
from ringfeed.pipeline.planner.rows import window_rows
from ringfeed.pipeline.planner.windows import plan_windows
from ringfeed.pipeline.planner.writer import PlanWriter, find_progress
from ringfeed.pipeline.progress import Progress, SilentProgress
from ringfeed.pipeline.recipe import Recipe
from ringfeed.pipeline.staging import StagedFolder

__all__ = ["run_plan"]


def run_plan(options: PlanOptions, *, progress: Progress | None = None) -> PlanReport:
    """Make the plan that ``options`` ask for; nothing is done where it is finished already.

    Raises:
        ValueError: if a corpus or the file of lengths cannot be planned with these options, or the output
            holds something else.
        CorruptDataError: if a corpus is damaged.
    """
    progress = progress or SilentProgress()
    documents = open_documents(options)
    if options.strategy is not options.balance:
        progress.log(f"balance={options.balance} is not there yet: planned with {options.strategy}")
    recipe = _recipe(options, documents)
    made_from = {
        "segments": [{"first_step": 0, "recipe": recipe.to_json()}],
        "epochs": options.epochs,
        "block_limits": {"steps": options.block_limits.steps, "pieces": options.block_limits.pieces},
    }
    with StagedFolder.open(options.output, format=PLAN_FORMAT, made_from=made_from) as staged:
        if staged.finished is not None:
            return PlanReport(**staged.finished.facts["report"])
        try:
            num_blocks = _write_blocks(staged.path, documents, options, recipe.fingerprint, progress)
        except ValueError:
            # A mistake in the input: a rerun could not finish this either.
            staged.discard()
            raise
        manifest = _manifest(staged.path, num_blocks, documents, options, made_from, staged.output)
        staged.publish(manifest)
    return PlanReport(**manifest.facts["report"])


def _recipe(options: PlanOptions, documents: DocumentTable) -> Recipe:
    return Recipe(
        pack_tokens=options.pack_tokens,
        pack_shape=str(options.pack_shape),
        length_buckets=str(options.length_buckets),
        pad_multiple=options.document_multiple,
        packs_per_step=options.packs_per_step,
        slate_size=options.packs_per_slate,
        balance=str(options.strategy),
        window=options.window,
        overflow=str(options.overflow),
        seed=options.seed,
        positions=options.positions,
        boundary_label=options.boundary_label,
        cost_model=options.cost_model.name,
        sources=documents.sources,
    )


def _write_blocks(
    folder: Path, documents: DocumentTable, options: PlanOptions, beginning: str, progress: Progress
) -> int:
    """Write all blocks that are not there yet; return how many there are."""
    number, snapshot = find_progress(folder, beginning=beginning)
    writer = PlanWriter(
        folder, limits=options.block_limits, overflow=options.overflow, number=number, snapshot=snapshot
    )
    steps_done = snapshot.steps_done
    progress.begin("plan", total=documents.num_documents * options.epochs, unit="documents")
    drawn = 0
    for window in plan_windows(documents, options, start=snapshot.window):
        rows, tally = window_rows(window, documents, options)
        writer.add(window, rows, tally, steps_done=steps_done)
        steps_done = 0
        before, drawn = drawn, _documents_drawn(window.cursor, documents.num_documents)
        progress.advance(drawn - before)
    writer.finish()
    progress.end()
    if writer.num_blocks == 0:
        raise ValueError(
            f"no pack to plan: all {documents.num_documents} documents are empty or longer than "
            f"pack_tokens={options.pack_tokens} with overflow={options.overflow}"
        )
    return writer.num_blocks


def _documents_drawn(cursor: DrawCursor, num_documents: int) -> int:
    in_epoch = min(cursor.block * BLOCK_DOCUMENTS + cursor.offset, num_documents)
    return cursor.epoch * num_documents + in_epoch


def _manifest(
    folder: Path,
    num_blocks: int,
    documents: DocumentTable,
    options: PlanOptions,
    made_from: dict[str, Any],
    output: Path,
) -> Manifest:
    facts = [read_block_facts(folder / block_name(number)) for number in range(num_blocks)]
    blocks = [
        file_entry(folder, block_name(number), rows=block.tally["packs"])
        for number, block in enumerate(facts)
    ]
    report = measure_plan(folder, blocks, facts, options)
    return Manifest(
        format=PLAN_FORMAT,
        fingerprint=fingerprint(made_from),
        made_from=made_from,
        files=(*blocks, *_other_files(folder, num_blocks)),
        facts={
            "num_steps": report.steps,
            "num_packs": report.packs,
            "num_pieces": report.pieces,
            "first_steps": [block.first_step for block in facts],
            "footprints": [
                max(column) for column in zip(*(block.footprints for block in facts), strict=True)
            ],
            "largest_num_pieces": max(block.largest_num_pieces for block in facts),
            "least_supervised": min((b.least_supervised for b in facts if b.least_supervised), default=None),
            "source_paths": [_relative(path, output) for path in documents.source_paths],
            "source_made_from": documents.source_made_from,
            "knows_masks": documents.knows_masks,
            "report": report.as_dict(),
        },
    )


def _other_files(folder: Path, num_blocks: int) -> list[FileEntry]:
    names = [snapshot_name(number) for number in range(num_blocks)]
    names += [losses_name(n) for n in range(num_blocks) if (folder / losses_name(n)).exists()]
    return [file_entry(folder, name, rows=_num_rows(folder / name)) for name in names]


def _num_rows(path: Path) -> int:
    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        return sum(reader.get_batch(i).num_rows for i in range(reader.num_record_batches))


def _relative(path: Path, output: Path) -> str:
    return os.path.relpath(os.path.realpath(path), output)
