"""What the demo found out, for a person and for a program.

In:   figures of every stage (``demo.py``)
Out:  ``DemoReport``, its text and its JSON-able values
"""

from __future__ import annotations

import io
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from rich.table import Table

__all__ = ["TOLERANCE", "DemoReport", "Stage", "render"]

TOLERANCE = 1e-4
"""Largest difference of a step's loss. float32 sums in another order differ by about 1e-6."""
_BAR_WIDTH = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage's work and time."""

    name: str
    tokens: int
    """Real tokens that went through."""
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Rate over the whole stage, its start included."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DemoReport:
    """Everything that the demo prints."""

    documents: int
    skipped_empty: int
    """Files without a byte."""
    skipped_encoding: int
    """Files that are not UTF-8."""
    tokens: int
    packs: int
    fill: float
    """Real tokens over all slots of all packs."""
    slot_padding: int
    """Tokens that pad documents to a multiple that cp needs."""
    tail_padding: int
    """Tokens at the end of packs."""
    rank_bytes_per_step: int
    """Of the tensors that the rank with most of them was handed."""
    full_bytes_per_step: int
    """Of the same tensors where one rank holds the whole batch."""
    stages: tuple[Stage, ...]
    sharded_losses: tuple[float, ...]
    unsharded_losses: tuple[float, ...]
    ranks_agree: bool
    """Whether all ranks of the sharded run saw the same losses."""
    seconds: float
    kept_in: Path | None

    @property
    def max_difference(self) -> float:
        """Largest difference of a step's loss; infinite where a loss is missing or no number."""
        pairs = list(zip(self.sharded_losses, self.unsharded_losses, strict=False))
        differences = [abs(a - b) for a, b in pairs]
        lengths = {len(pairs), len(self.sharded_losses), len(self.unsharded_losses)}
        if len(lengths) > 1 or not differences or not all(map(math.isfinite, differences)):
            return math.inf
        return max(differences)

    @property
    def passed(self) -> bool:
        """Whether both runs learned the same."""
        return self.ranks_agree and self.max_difference <= TOLERANCE

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        stages = [{**asdict(stage), "tokens_per_second": stage.tokens_per_second} for stage in self.stages]
        difference = self.max_difference
        return {
            **asdict(self),
            "kept_in": None if self.kept_in is None else str(self.kept_in),
            "stages": stages,
            "padding": 1 - self.fill,
            # JSON has no infinity.
            "max_difference": difference if math.isfinite(difference) else None,
            "tolerance": TOLERANCE,
            "passed": self.passed,
        }


def render(report: DemoReport) -> str:
    """Return the report as text of about 80 columns."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=88, highlight=False, markup=False)
    console.print(_data_lines(report))
    console.print(_stage_table(report))
    console.print(_loss_table(report))
    verdict = "equal" if report.passed else "NOT EQUAL"
    if not report.ranks_agree:
        verdict += ": the ranks of the sharded run disagree among themselves"
    console.print(
        f"losses of the sharded and the unsharded run are {verdict}: largest difference "
        f"{report.max_difference:.1e}, at most {TOLERANCE:.0e} wanted; {report.seconds:.0f} s in all"
    )
    if report.kept_in is not None:
        console.print(f"files kept in {report.kept_in}", soft_wrap=True)
    file = console.file
    assert isinstance(file, io.StringIO)  # noqa: S101 - made above
    return file.getvalue().rstrip()


def _data_lines(report: DemoReport) -> str:
    share = report.rank_bytes_per_step / max(1, report.full_bytes_per_step)
    return (
        f"\n{report.documents:,} documents, {report.tokens:,} tokens "
        f"({report.skipped_empty} empty files and {report.skipped_encoding} that are not UTF-8 skipped)\n"
        f"{report.packs:,} packs, fill {report.fill:.2%}, padding {1 - report.fill:.2%} "
        f"({report.slot_padding:,} tokens in slots, {report.tail_padding:,} at the end of packs)\n"
        f"bytes per step: {report.rank_bytes_per_step:,} a rank of {report.full_bytes_per_step:,} "
        f"in the full batch ({share:.1%})\n"
    )


def _stage_table(report: DemoReport) -> Table:
    from rich.table import Table

    table = Table("stage", box=None, pad_edge=False)
    for column in ("tokens", "seconds", "tokens/s"):
        table.add_column(column, justify="right")
    for stage in report.stages:
        table.add_row(
            stage.name, f"{stage.tokens:,}", f"{stage.seconds:.2f}", f"{stage.tokens_per_second:,.0f}"
        )
    return table


def _loss_table(report: DemoReport) -> Table:
    from rich.table import Table

    table = Table("\nstep", box=None, pad_edge=False)
    for column in ("unsharded\n1 process", "sharded\ndp 2 x cp 2", "\ndifference"):
        table.add_column(column, justify="right")
    table.add_column("\nloss")
    top = max(report.unsharded_losses, default=1.0)
    pairs = zip(report.unsharded_losses, report.sharded_losses, strict=False)
    for step, (unsharded, sharded) in enumerate(pairs):
        bar = round(_BAR_WIDTH * unsharded / top) if math.isfinite(unsharded) else 0
        table.add_row(
            str(step), f"{unsharded:.6f}", f"{sharded:.6f}", f"{abs(unsharded - sharded):.1e}", "█" * bar
        )
    return table
