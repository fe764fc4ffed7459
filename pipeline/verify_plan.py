"""Check a plan: its chain, its packs, its corpora, and that no token is lost or doubled (L3, L8).

In:   a plan folder whose files have been hashed (``findings.py``)
Out:  findings; what could not be checked because corpora are elsewhere

Memory is bounded: pieces are gathered for a range of documents at a time, the plan is read once per range.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ringfeed.pipeline.chain import next_link
from ringfeed.pipeline.coverage import Expected, coverage_faults
from ringfeed.pipeline.findings import Finding, shorten
from ringfeed.pipeline.manifest import CorruptDataError, describe_difference
from ringfeed.pipeline.plan_blocks import block_name, pack_footprints
from ringfeed.pipeline.planner.documents import CorpusTable, DocumentTable, LengthsTable
from ringfeed.pipeline.step_packs import Pieces

if TYPE_CHECKING:
    import numpy.typing as npt

    from ringfeed.pipeline.plan import Plan
    from ringfeed.pipeline.plan_blocks import Block
    from ringfeed.pipeline.progress import Progress

__all__ = ["check_blocks", "check_coverage", "open_planned_documents"]

_PIECES_AT_ONCE = 1 << 23
"""About 1 GB with what sorting needs."""
_LOSSES_PREFIX = "losses-"


def check_blocks(plan: Plan, *, progress: Progress) -> list[Finding]:
    """Walk over all steps: their order, the hash chain, and packs within the budget."""
    findings = []
    chain, next_step = plan.recipe_fingerprint, 0
    progress.begin("checking steps", total=plan.num_steps, unit="steps")
    for number, block in enumerate(plan.blocks()):
        faults = _row_faults(plan, block) + _chain_faults(block)
        if block.facts.first_step != next_step or block.facts.previous_chain != chain:
            faults.append(f"does not go on where step {next_step - 1} ended")
        file = str(plan.path / block_name(number))
        findings += [Finding(file=file, problem=f"{file}: {fault}") for fault in faults]
        next_step, chain = block.facts.first_step + block.facts.num_steps, block.facts.chains[-1]
        progress.advance(block.facts.num_steps)
    progress.end()
    if next_step != plan.num_steps:
        problem = f"the blocks end with step {next_step - 1}, the manifest says {plan.num_steps} steps"
        findings.append(Finding(file=str(plan.path), problem=problem))
    return shorten(findings, what="steps or packs")


def check_coverage(plan: Plan, documents: DocumentTable, *, progress: Progress) -> list[Finding]:
    """Check that every token of every document is in the plan once per epoch, but for what it gave up."""
    num_epochs = plan.num_epochs
    losses = _read_losses(plan)
    findings = _loss_findings(plan, losses)
    width = _documents_at_once(plan, documents.num_documents)
    ranges = [
        (low, min(low + width, documents.num_documents)) for low in range(0, documents.num_documents, width)
    ]
    progress.begin("counting tokens", total=len(ranges) * plan.num_blocks, unit="blocks")
    faults = []
    for low, high in ranges:
        lost = np.zeros((num_epochs, high - low), dtype=np.int64)
        inside = (losses["document"] >= low) & (losses["document"] < high)
        np.add.at(lost, (losses["epoch"][inside], losses["document"][inside] - low), losses["tokens"][inside])
        expected = Expected(
            first_document=low,
            lengths=documents.lengths(np.arange(low, high, dtype=np.int64)),
            num_epochs=num_epochs,
            lost=lost,
        )
        faults += coverage_faults(_gather(plan, low, high, documents.num_documents, progress), expected)
    progress.end()
    findings += [Finding(file=str(plan.path), problem=fault) for fault in faults]
    return shorten(findings, what="documents")


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


def _chain_faults(block: Block) -> list[str]:
    """Return the first step whose rows are not what its chain value says."""
    chain = block.facts.previous_chain
    for step, stored in enumerate(block.facts.chains, start=block.facts.first_step):
        first, last = block.row_range(step)
        chain = next_link(chain, block.rows.step_packs(first, last, chain=""))
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
    expected = np.arange(len(rows.steps)) - np.searchsorted(rows.steps, rows.steps)
    wrong = np.flatnonzero((rows.packs != expected) | (rows.packs >= plan.packs_per_step))
    faults += [f"step {rows.steps[i]} has a pack {rows.packs[i]} out of order" for i in wrong[:1].tolist()]
    if rows.supervised is not None:
        steps, first = np.unique(rows.steps, return_index=True)
        unsupervised = np.flatnonzero(np.add.reduceat(rows.supervised.sum(axis=1), first) == 0)
        faults += [f"step {steps[i]} has no supervised token" for i in unsupervised.tolist()]
    return faults


def _documents_at_once(plan: Plan, num_documents: int) -> int:
    pieces = max(1, int(plan.manifest.facts["num_pieces"]))
    num_ranges = -(-pieces // _PIECES_AT_ONCE)
    return max(1, -(-num_documents // num_ranges))


def _gather(plan: Plan, low: int, high: int, num_documents: int, progress: Progress) -> Pieces:
    """Return all pieces of documents ``low`` to ``high``; ids of no document go with the last range."""
    parts = []
    for block in plan.blocks():
        ids = block.rows.pieces.documents
        inside = (ids >= low) & ((ids < high) | (high == num_documents))
        parts.append(block.rows.pieces.take(np.flatnonzero(inside)))
        progress.advance(1)
    return Pieces.concat(parts)


def _read_losses(plan: Plan) -> dict[str, npt.NDArray[np.int64]]:
    """Return the columns document, epoch and tokens of all loss files, int64 each."""
    parts: dict[str, list[npt.NDArray[np.int64]]] = {"document": [], "epoch": [], "tokens": []}
    for entry in plan.manifest.files:
        if entry.path.startswith(_LOSSES_PREFIX):
            with pa.OSFile(str(plan.path / entry.path), "rb") as source, pa.ipc.open_file(source) as reader:
                table = reader.read_all()
            for name, columns in parts.items():
                columns.append(table.column(name).to_numpy())
    empty = np.empty(0, dtype=np.int64)
    return {name: np.concatenate([empty, *columns]) for name, columns in parts.items()}


def _loss_findings(plan: Plan, losses: dict[str, npt.NDArray[np.int64]]) -> list[Finding]:
    """What is named must be what is counted."""
    report = plan.report
    counted = {
        "documents": report["dropped"] + report["truncated"],
        "tokens": report["dropped_tokens"] + report["truncated_tokens"],
    }
    named = {"documents": len(losses["document"]), "tokens": int(losses["tokens"].sum())}
    difference = describe_difference(counted, named)
    if not difference:
        return []
    problem = f"documents that lost tokens are not named as they are counted ({difference})"
    return [Finding(file=str(plan.path), problem=problem)]
