"""Check a plan: its chain, its packs (L8), and that its corpora are what it was planned from.

In:   a plan folder whose files have been hashed (``findings.py``)
Out:  findings; what could not be checked because corpora are elsewhere
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ringfeed.pipeline.chain import next_link
from ringfeed.pipeline.findings import Finding, named, shorten
from ringfeed.pipeline.manifest import CorruptDataError, describe_difference
from ringfeed.pipeline.plan_blocks import block_name, pack_footprints, snapshot_name
from ringfeed.pipeline.planner.documents import CorpusTable, DocumentTable, LengthsTable
from ringfeed.pipeline.planner.snapshots import read_snapshot

if TYPE_CHECKING:
    import numpy.typing as npt

    from ringfeed.pipeline.plan import Plan
    from ringfeed.pipeline.plan_blocks import Block
    from ringfeed.pipeline.progress import Progress
    from ringfeed.pipeline.step_packs import PackRows

__all__ = ["check_blocks", "open_planned_documents"]


def check_blocks(plan: Plan, *, progress: Progress) -> tuple[list[Finding], int]:
    """Walk over all steps: their order, the hash chain, and packs within the budget.

    Returns:
        What is wrong, and how many blocks cannot be read at all.
    """
    findings: list[Finding] = []
    unreadable: list[Finding] = []
    # What the next block goes on from; None behind one that cannot be read.
    border: tuple[int, str] | None = (0, plan.recipe_fingerprint)
    bounds = np.cumsum([0, *(source.num_documents for source in plan.recipe.sources)])
    progress.begin("checking steps", total=plan.num_steps, unit="steps")
    for number in range(plan.num_blocks):
        path = plan.path / block_name(number)
        before, border = border, None
        with named(plan.path / snapshot_name(number + 1), findings):
            written = read_snapshot(plan.path / snapshot_name(number + 1)).finished
            if written != plan.manifest.files[number]:
                problem = f"{path} is not what the planner wrote: the state after it tells of another hash"
                findings.append(Finding(file=str(path), problem=problem))
        with named(path, unreadable):
            block = plan.block(number)
            facts = block.facts
            faults = _row_faults(plan, block) + _count_faults(block, bounds) + _chain_faults(plan, block)
            if before not in (None, (facts.first_step, facts.previous_chain)):
                faults.append(f"does not begin with step {before[0]}, where the block before it ended")
            findings += [Finding(file=str(path), problem=f"{path}: {fault}") for fault in faults]
            border = (facts.first_step + facts.num_steps, facts.chains[-1])
            progress.advance(facts.num_steps)
    progress.end()
    if border is not None and border[0] != plan.num_steps:
        problem = f"the blocks end with step {border[0] - 1}, the manifest says {plan.num_steps} steps"
        findings.append(Finding(file=str(plan.path), problem=problem))
    return [*shorten(unreadable, what="blocks"), *shorten(findings, what="steps or packs")], len(unreadable)


def open_planned_documents(plan: Plan) -> tuple[DocumentTable | None, list[Finding], list[str]]:
    """Open what the plan was made from, and compare.

    Returns:
        The documents, or None where they cannot be opened; what is wrong with them; what is not there.
    """
    paths = [(plan.path / Path(path)).resolve() for path in plan.manifest.facts["source_paths"]]
    missing = [str(path) for path in paths if not path.exists()]
    if missing:
        return None, [], [f"{', '.join(missing)} is not there: documents were not counted (L3)"]
    try:
        if plan.recipe.sources[0].kind == "corpus":
            return CorpusTable(plan.open_corpora(check="table")), [], []
        table = LengthsTable.open(paths[0])
    except CorruptDataError as error:
        return None, [Finding(file=str(paths[0]), problem=str(error))], []
    except ValueError as error:
        return None, [Finding(file=str(plan.path), problem=str(error))], []
    difference = describe_difference(
        {"fingerprint": plan.recipe.sources[0].fingerprint}, {"fingerprint": table.sources[0].fingerprint}
    )
    if difference:
        problem = f"{plan.path} was not planned from {paths[0]} ({difference})"
        return None, [Finding(file=str(plan.path), problem=problem)], []
    return table, [], []


def _chain_faults(plan: Plan, block: Block) -> list[str]:
    """Return the first step whose rows are not what its chain value says."""
    chain = block.facts.previous_chain
    segments = {segment.first_step: segment.recipe.fingerprint for segment in plan.segments[1:]}
    for step, stored in enumerate(block.facts.chains, start=block.facts.first_step):
        first, last = block.row_range(step)
        rows = block.rows.step_packs(first, last, chain="")
        chain = next_link(chain, rows, segment=segments.get(step))
        if chain != stored:
            return [f"step {step} is not what its hash chain says"]
    return []


def _row_faults(plan: Plan, block: Block) -> list[str]:
    rows = block.rows
    faults = []
    over = np.flatnonzero(pack_footprints(rows, multiple=plan.pad_multiple) > plan.pack_tokens)
    faults += [
        f"step {rows.steps[i]}, pack {rows.packs[i]} takes more than pack_tokens" for i in over.tolist()
    ]
    budget = plan.recipe.work_budget
    if budget is not None:
        costly = np.flatnonzero(rows.costs > budget).tolist()
        faults += [f"step {rows.steps[i]}, pack {rows.packs[i]} costs more than work_budget" for i in costly]
    expected = np.arange(len(rows.steps)) - np.searchsorted(rows.steps, rows.steps)
    wrong = np.flatnonzero((rows.packs != expected) | (rows.packs >= plan.packs_per_step))
    faults += [f"step {rows.steps[i]} has a pack {rows.packs[i]} out of order" for i in wrong[:1].tolist()]
    faults += _slate_faults(plan, rows)
    if rows.supervised is not None:
        steps, first = np.unique(rows.steps, return_index=True)
        unsupervised = np.flatnonzero(np.add.reduceat(rows.supervised.sum(axis=1), first) == 0)
        faults += [f"step {steps[i]} has no supervised token" for i in unsupervised.tolist()]
    return faults


def _slate_faults(plan: Plan, rows: PackRows) -> list[str]:
    """Return the first slate that has more packs than a slate has, or that no step has."""
    size, num_slates = plan.slate_size, plan.packs_per_step // plan.slate_size
    none = np.flatnonzero((rows.slates < 0) | (rows.slates >= num_slates))
    if len(none):
        return [f"step {rows.steps[none[0]]} has a slate {rows.slates[none[0]]}, there are {num_slates}"]
    cells, counts = np.unique(rows.steps * num_slates + rows.slates, return_counts=True)
    return [
        f"step {cell // num_slates}, slate {cell % num_slates} has more than slate_size={size} packs"
        for cell in cells[counts > size][:1].tolist()
    ]


def _count_faults(block: Block, bounds: npt.NDArray[np.int64]) -> list[str]:
    """Return the first pack whose tokens are not what its pieces come to."""
    rows = block.rows
    num_sources = len(bounds) - 1
    sources = np.searchsorted(bounds, rows.pieces.documents, side="right") - 1
    known = (sources >= 0) & (sources < num_sources)
    packs = np.repeat(np.arange(len(rows.steps)), np.diff(rows.offsets))
    tokens = np.zeros((len(rows.steps), num_sources), dtype=np.int64)
    np.add.at(tokens, (packs[known], sources[known]), rows.pieces.lengths[known])
    stored = np.zeros_like(tokens) if rows.tokens is None else rows.tokens
    if stored.shape != tokens.shape:
        return [f"counts tokens of {stored.shape[1]} sources, the plan has {num_sources}"]
    wrong = np.flatnonzero((stored != tokens).any(axis=1))
    return [
        f"step {rows.steps[i]}, pack {rows.packs[i]} counts other tokens than it has"
        for i in wrong[:1].tolist()
    ]
