"""Check what is trained on: a corpus's masks, and the counts that a plan made of them (L7).

In:   a corpus, or a plan and the documents that it was made from, whose files have been hashed
Out:  faults, as ``verify.py`` reports them
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ringfeed.pipeline.findings import Finding, shorten
from ringfeed.pipeline.mask_runs import RUN_COLUMNS
from ringfeed.pipeline.plan_blocks import block_name

if TYPE_CHECKING:
    from ringfeed.pipeline.corpus import Corpus
    from ringfeed.pipeline.plan import Plan
    from ringfeed.pipeline.planner.documents import DocumentTable
    from ringfeed.pipeline.progress import Progress
    from ringfeed.pipeline.step_packs import PackRows

__all__ = ["check_supervised", "mask_faults"]


def mask_faults(corpus: Corpus) -> list[str]:
    """Return where supervised counts and mask runs do not go with each other, or with the documents."""
    lengths, supervised = corpus.lengths, corpus.supervised
    if corpus.mask_runs is None:
        wrong = np.flatnonzero(supervised != np.maximum(lengths - 1, 0))
        return [
            f"document {i} has {lengths[i]} tokens and {supervised[i]} supervised" for i in wrong[:1].tolist()
        ]
    start, stop, before = (corpus.mask_runs[name].view(np.int64) for name in RUN_COLUMNS)
    first, count = (corpus.documents[name].view(np.int64) for name in ("first_run", "num_runs"))
    ends = np.cumsum(count)
    if (count < 0).any() or not np.array_equal(first, ends - count) or int(ends[-1]) != len(start):
        return ["documents do not share out the mask runs in order"]
    owners = np.repeat(np.arange(len(count)), count)
    sums = np.concatenate([[0], np.cumsum(stop - start)])
    # A run begins behind its document's first token and behind the run before it.
    limit = np.zeros(len(start), np.int64)
    limit[1:] = np.where(owners[1:] == owners[:-1], stop[:-1], 0)
    misplaced = (start <= limit) | (stop <= start) | (stop > lengths[owners])
    miscounted = before != sums[:-1] - sums[first][owners]
    faults = [
        f"mask run {i} of document {owners[i]}, {start[i]} to {stop[i]}, {what}"
        for what, found in (("is out of place", misplaced), ("has a wrong sum before it", miscounted))
        for i in np.flatnonzero(found)[:1].tolist()
    ]
    wrong = np.flatnonzero(supervised != sums[ends] - sums[ends - count])
    faults += [f"document {i} does not have {supervised[i]} supervised tokens" for i in wrong[:1].tolist()]
    return faults


def check_supervised(plan: Plan, documents: DocumentTable, *, progress: Progress) -> list[Finding]:
    """Count the supervised tokens of every pack again, per source."""
    if not documents.knows_masks:
        return []
    findings = []
    progress.begin("counting supervised tokens", total=plan.num_steps, unit="steps")
    for number, block in enumerate(plan.blocks()):
        rows = block.rows
        file = str(plan.path / block_name(number))
        for i in np.flatnonzero(_is_miscounted(plan, rows, documents)).tolist():
            problem = (
                f"step {rows.steps[i]}, pack {rows.packs[i]} does not say how many tokens are supervised"
            )
            findings.append(Finding(file=file, problem=f"{file}: {problem}"))
        progress.advance(block.facts.num_steps)
    progress.end()
    return shorten(findings, what="packs")


def _is_miscounted(plan: Plan, rows: PackRows, documents: DocumentTable) -> np.ndarray:
    """Return which packs have other supervised counts than their pieces: bool [K]."""
    if rows.supervised is None:
        return np.ones(len(rows.steps), np.bool_)
    ids = rows.pieces.documents
    # Documents that do not exist are told of where documents are counted.
    exists = (ids >= 0) & (ids < documents.num_documents)
    pieces = rows.pieces.take(np.flatnonzero(exists))
    counts = np.zeros((len(rows.steps), len(documents.sources)), np.int64)
    owners = np.repeat(np.arange(len(rows.steps)), np.diff(rows.offsets))[exists]
    found = documents.supervised(pieces, boundary=plan.recipe.boundary_label)
    np.add.at(counts, (owners, documents.source_of(pieces.documents)), found)
    return np.asarray((counts != rows.supervised).any(axis=1))
