"""Check that no token of a plan is lost or doubled (L3): each drawn document once in an epoch of its source.

In:   a plan, the documents that it was made from, and the state after its last block
Out:  findings

What was drawn is told by the cursors of that state (``planner/drawn_documents.py``). A plan that ends at
``--steps`` was not flushed: what it carries, and what it drew for a window that it has only the first steps
of, may be in it or not.
Memory is bounded: pieces are gathered for a range of documents at a time, the plan is read once per range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from ringfeed.pipeline.coverage import Expected, coverage_faults
from ringfeed.pipeline.findings import Finding, shorten
from ringfeed.pipeline.manifest import CorruptDataError, describe_difference
from ringfeed.pipeline.mixture_recipe import MixtureRecipe
from ringfeed.pipeline.plan_blocks import snapshot_name
from ringfeed.pipeline.planner.drawn_blocks import LaneOrder
from ringfeed.pipeline.planner.drawn_documents import DrawnDocuments
from ringfeed.pipeline.planner.options import Balance
from ringfeed.pipeline.planner.snapshots import read_snapshot
from ringfeed.pipeline.step_packs import Pieces
from ringfeed.pipeline.token_files import DAMAGE

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from ringfeed.pipeline.plan import Plan
    from ringfeed.pipeline.planner.documents import DocumentTable
    from ringfeed.pipeline.progress import Progress

__all__ = ["check_coverage"]

_CELLS_AT_ONCE = 1 << 23
"""Pieces, or documents times epochs: about 1 GB with what sorting needs."""
_LOSSES_PREFIX = "losses-"
_LOSS_COLUMNS = ("document", "epoch", "tokens")


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Losses:
    """Tokens that documents lost on purpose: int64 [N] each."""

    documents: npt.NDArray[np.int64]
    epochs: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int64]

    def within(self, low: int, high: int) -> _Losses:
        """Return those of the documents ``low`` to ``high``."""
        inside = (self.documents >= low) & (self.documents < high)
        return _Losses(
            documents=self.documents[inside], epochs=self.epochs[inside], tokens=self.tokens[inside]
        )


def check_coverage(plan: Plan, documents: DocumentTable, *, progress: Progress) -> list[Finding]:
    """Check that every token that was drawn is in the plan once, but for what it gave up."""
    losses = _read_losses(plan)
    findings = _loss_findings(plan, losses)
    recipe = plan.recipe
    mixture = recipe.mixture or MixtureRecipe.concatenated()
    row_starts = documents.row_starts() if recipe.balance == Balance.GIVEN else None
    order = LaneOrder(documents, mixture, seed=recipe.seed, row_starts=row_starts)
    drawn = DrawnDocuments(order, read_snapshot(plan.path / snapshot_name(plan.num_blocks)))
    ranges = list(_ranges(plan, drawn))
    progress.begin("counting tokens", total=len(ranges) * plan.num_blocks, unit="blocks")
    faults = []
    for low, high in ranges:
        pieces = _gather(plan, low, high, documents.num_documents, progress)
        for source, first, last in _within(drawn, low, high):
            faults += _range_faults(pieces, losses, drawn, documents, place=(source, first, last))
        faults += _stray_faults(pieces, documents.num_documents)
    progress.end()
    findings += [Finding(file=str(plan.path), problem=fault) for fault in faults]
    return shorten(findings, what="documents")


def _ranges(plan: Plan, drawn: DrawnDocuments) -> Iterator[tuple[int, int]]:
    """Yield ranges of global ids, of any sources, that are checked together."""
    epochs = [drawn.num_epochs(source, latest=-1) for source in range(len(drawn.spans))]
    cells = sum(count * span.num_documents for count, span in zip(epochs, drawn.spans, strict=True))
    per_cell = max(1, -(-int(plan.manifest.facts["num_pieces"]) // max(1, cells)))
    low = high = room = 0
    for count, span in zip(epochs, drawn.spans, strict=True):
        left = span.num_documents
        while left:
            if room < count * per_cell and high > low:
                yield low, high
                low = high
            if low == high:
                room = _CELLS_AT_ONCE
            taken = min(left, max(1, room // max(1, count * per_cell)))
            high, left, room = high + taken, left - taken, room - taken * count * per_cell
    if high > low:
        yield low, high


def _within(drawn: DrawnDocuments, low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """Yield source, first and last id of the part of each source inside a range."""
    for source, span in enumerate(drawn.spans):
        first = max(low, span.first_document)
        last = min(high, span.first_document + span.num_documents)
        if first < last:
            yield source, first, last


def _range_faults(
    pieces: Pieces,
    losses: _Losses,
    drawn: DrawnDocuments,
    documents: DocumentTable,
    *,
    place: tuple[int, int, int],
) -> list[str]:
    """Return what is wrong with the documents ``first`` to ``last`` of one source."""
    source, first, last = place
    own = pieces.take(np.flatnonzero((pieces.documents >= first) & (pieces.documents < last)))
    given_up = losses.within(first, last)
    latest = max(int(own.epochs.max(initial=-1)), int(given_up.epochs.max(initial=-1)))
    num_epochs = drawn.num_epochs(source, latest=latest)
    lost = np.zeros((num_epochs, last - first), dtype=np.int64)
    known = given_up.epochs < num_epochs
    np.add.at(lost, (given_up.epochs[known], given_up.documents[known] - first), given_up.tokens[known])
    expected = Expected(
        first_document=first,
        lengths=documents.lengths(np.arange(first, last, dtype=np.int64)),
        num_epochs=num_epochs,
        lost=lost,
        demand=drawn.demand(source, first, last, num_epochs=num_epochs),
    )
    return coverage_faults(own, expected)


def _stray_faults(pieces: Pieces, num_documents: int) -> list[str]:
    """Return the first piece of no document at all."""
    stray = np.flatnonzero((pieces.documents < 0) | (pieces.documents >= num_documents))
    return [
        f"document {pieces.documents[i]} in epoch {pieces.epochs[i]} does not exist"
        for i in stray[:1].tolist()
    ]


def _gather(plan: Plan, low: int, high: int, num_documents: int, progress: Progress) -> Pieces:
    """Return all pieces of documents ``low`` to ``high``; ids of no document go with the last range."""
    parts = []
    for block in plan.blocks():
        ids = block.rows.pieces.documents
        inside = (ids >= low) & (ids < high)
        if high == num_documents:
            inside |= (ids < 0) | (ids >= num_documents)
        parts.append(block.rows.pieces.take(np.flatnonzero(inside)))
        progress.advance(1)
    return Pieces.concat(parts)


def _read_losses(plan: Plan) -> _Losses:
    """Return the rows of all loss files."""
    parts: dict[str, list[npt.NDArray[np.int64]]] = {name: [] for name in _LOSS_COLUMNS}
    for entry in plan.manifest.files:
        if entry.path.startswith(_LOSSES_PREFIX):
            table = _read_table(plan.path / entry.path)
            for name, columns in parts.items():
                columns.append(table.column(name).to_numpy())
    empty = np.empty(0, dtype=np.int64)
    documents, epochs, tokens = (np.concatenate([empty, *columns]) for columns in parts.values())
    return _Losses(documents=documents, epochs=epochs, tokens=tokens)


def _read_table(path: Path) -> pa.Table:
    try:
        with pa.OSFile(str(path), "rb") as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
            table.validate()
            return table.select(_LOSS_COLUMNS)
    except DAMAGE as error:
        raise CorruptDataError(f"{path} cannot be read: {error}") from None


def _loss_findings(plan: Plan, losses: _Losses) -> list[Finding]:
    """What is named must be what is counted."""
    report = plan.report
    counted = {
        "documents": report["dropped"] + report["truncated"],
        "tokens": report["dropped_tokens"] + report["truncated_tokens"],
    }
    named = {"documents": len(losses.documents), "tokens": int(losses.tokens.sum())}
    difference = describe_difference(counted, named)
    if not difference:
        return []
    problem = f"documents that lost tokens are not named as they are counted ({difference})"
    return [Finding(file=str(plan.path), problem=problem)]
