"""The report of a plan for a person: what was reached, and beside it what is possible.

In:   ``PlanReport`` (``report.py``), ``Measurement`` (``measure.py``), advice (``advice.py``)
Out:  lines for a terminal
"""

from collections.abc import Iterator, Sequence

from ringfeed.pipeline.planner.balance import BalanceFigures
from ringfeed.pipeline.planner.measure import MeasuredBalance, Measurement
from ringfeed.pipeline.planner.report import PlanReport

__all__ = ["report_text"]


def report_text(report: PlanReport, measured: Measurement, advice: Sequence[str]) -> str:
    """Return the report as lines."""
    return "\n".join(
        [
            *_packs(report, measured),
            *_balances(measured.balances),
            *_documents(report, measured),
            *(f"  advice          {sentence}" for sentence in advice),
        ]
    )


def _packs(report: PlanReport, measured: Measurement) -> Iterator[str]:
    yield f"  fill            {report.fill:.4%}; {measured.fill_bound:.4%} at most"
    yield f"  packs           {report.packs:,}; {measured.packs_bound:,} at least"
    yield (
        f"  slot padding    {report.slot_waste:.4%} of all slots, {report.slot_padding:,} tokens: documents "
        f"to a multiple of {report.pad_multiple}"
    )
    yield f"  tail padding    {report.tail_waste:.4%} of all slots, {report.tail_padding:,} tokens"


def _balances(balances: Sequence[MeasuredBalance]) -> Iterator[str]:
    yield "  balance         most expensive rank / mean rank [at least, of these packs; of these documents]"
    for balance in balances:
        yield f"    dp {balance.dp_size}, {balance.cost_model}"
        yield from _figures("all steps", balance.whole, balance.documents_bound)
        if balance.settled is not None:
            yield from _figures("before the end", balance.settled, None)


def _figures(name: str, balance: BalanceFigures, documents: float | None) -> Iterator[str]:
    least = "" if documents is None else f"; {documents:.4f}"
    yield (
        f"      {name:<16}step {balance.step_imbalance:.4f} [{balance.step_imbalance_bound:.4f}{least}], "
        f"p99 {balance.step_imbalance_p99:.4f} [{balance.step_imbalance_p99_bound:.4f}], "
        f"micro-batch {balance.micro_batch_imbalance:.4f} [{balance.micro_batch_imbalance_bound:.4f}]"
    )


def _documents(report: PlanReport, measured: Measurement) -> Iterator[str]:
    mean, most = report.displacement_mean, report.displacement_max
    yield f"  displacement    {mean:.4f} steps on average, {most:,} at most"
    yield (
        f"  documents       {report.empty:,} empty, {report.split:,} split, {report.truncated:,} truncated "
        f"({report.truncated_tokens:,} tokens lost), {report.dropped:,} dropped "
        f"({report.dropped_tokens:,} tokens lost)"
    )
    tokens = sum(measured.source_tokens.values())
    shares = (f"{name} {count / tokens:.3%}" for name, count in measured.source_tokens.items())
    yield f"  tokens          {report.tokens:,} in {report.pieces:,} pieces: {', '.join(shares)}"
    yield (
        f"  size            {report.bytes:,} bytes, {report.bytes_per_piece:.2f} a piece, "
        f"{report.bytes_per_step:,.0f} a step"
    )
