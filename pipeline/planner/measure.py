"""Measure a finished plan beside what is possible: for any dp, by any cost model.

In:   an opened ``Plan``, the dp sizes and cost models to measure by
Out:  ``Measurement``, for the report (``report_text.py``) and the picture (``plot.py``)

Every block is read and hash-checked once, and one is in memory at a time.
"""

from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ringfeed.pipeline.pack_lengths import PackShape
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_blocks import pack_footprints
from ringfeed.pipeline.planner.balance import BalanceFigures, BalanceMeter
from ringfeed.pipeline.planner.bounds import PieceSums, least_packs, least_work
from ringfeed.pipeline.planner.cost import CostModel, cost_model_of
from ringfeed.pipeline.planner.report import PlanReport
from ringfeed.pipeline.step_packs import PackRows, packs_before
from ringfeed.sharding.padding import slot_lengths

__all__ = ["MeasureOptions", "MeasuredBalance", "Measurement", "StepSeries", "measure"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasureOptions:
    """What to measure by, beside the plan's own dp and costs."""

    dp_sizes: tuple[int, ...] = ()
    cost_models: tuple[CostModel, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredBalance:
    """The balance for one dp, by one cost model."""

    dp_size: int
    cost_model: str
    whole: BalanceFigures
    documents_bound: float | None
    """No plan of the same pieces has a lower ``step_imbalance``, however they are packed and ordered; None
    where costs are known per pack only."""
    settled: BalanceFigures | None
    """Without the last ``window + 1`` steps; None for a plan no longer than that."""

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values."""
        settled = None if self.settled is None else asdict(self.settled)
        return {
            "dp_size": self.dp_size,
            "cost_model": self.cost_model,
            **asdict(self.whole),
            "documents_bound": self.documents_bound,
            "settled": settled,
        }


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class StepSeries:
    """What a picture shows of each of S steps, for the plan's own dp and costs."""

    fill: NDArray[np.float32]
    """float32 [S]"""
    loads: NDArray[np.float32]
    """float32 [S, dp], cost of each rank."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measurement:
    """Figures of a plan that take a reading of all its pieces."""

    fill_bound: float
    """No packing of the same pieces is fuller."""
    packs_bound: int
    """Nor takes fewer packs."""
    waste_by_multiple: dict[int, float]
    """Padding of documents over all slots of documents, had they been padded to this multiple."""
    source_tokens: dict[str, int]
    """Real tokens of each source."""
    source_supervised: dict[str, int] | None
    """Those of them that are trained on; None where masks are unknown."""
    balances: list[MeasuredBalance]
    """The plan's own dp and costs first."""
    series: StepSeries

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-able values; the bounds of the plan's own dp stand beside its figures."""
        own = self.balances[0]
        tokens = sum(self.source_tokens.values())
        return {
            "fill_bound": self.fill_bound,
            "packs_bound": self.packs_bound,
            "step_imbalance_bound": own.whole.step_imbalance_bound,
            "step_imbalance_p99_bound": own.whole.step_imbalance_p99_bound,
            "micro_batch_imbalance_bound": own.whole.micro_batch_imbalance_bound,
            "waste_by_multiple": {str(key): value for key, value in self.waste_by_multiple.items()},
            "source_tokens": self.source_tokens,
            "source_supervised": self.source_supervised,
            "source_shares": {name: count / tokens for name, count in self.source_tokens.items()},
            "balances": [balance.as_dict() for balance in self.balances],
        }


@dataclass(slots=True)
class _Lengths:
    """Real lengths of all pieces so far, and how often each occurs."""

    values: Int64 = field(default_factory=lambda: np.empty(0, np.int64))
    counts: Int64 = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, lengths: Int64) -> None:
        values, counts = np.unique(lengths, return_counts=True)
        self.values, places = np.unique(np.concatenate([self.values, values]), return_inverse=True)
        merged = np.zeros(len(self.values), np.int64)
        np.add.at(merged, places, np.concatenate([self.counts, counts]))
        self.counts = merged


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Way:
    """One way to measure: a dp and a cost model."""

    meter: BalanceMeter
    name: str
    model: CostModel | None
    """What a piece costs; None where only the plan's costs per pack are known."""
    by_plan: bool
    """The costs that the plan holds are this model's."""

    def add(self, rows: PackRows) -> None:
        """Measure a block."""
        costs = None
        if self.model is not None and not self.by_plan:
            costs = np.add.reduceat(self.model.piece_costs(rows.pieces.lengths), rows.offsets[:-1])
        self.meter.add(rows.steps, slates=rows.slates, planned=rows.costs, costs=costs)


class _Figures(NamedTuple):
    """What one way came to."""

    whole: BalanceFigures
    settled: BalanceFigures | None
    work: int
    """Cost of all packs."""


def measure(plan: Plan, options: MeasureOptions) -> Measurement:
    """Measure ``plan``.

    Raises:
        ValueError: if a dp does not divide the packs of a step, or a cost model does not know a length.
        CorruptDataError: if a block is damaged; names the file.
    """
    ways, stored, facts = _ways(plan, options), PlanReport(**plan.report), plan.manifest.facts
    # The plan's own dp and costs were measured when it was made.
    unknown = ways if stored.figures is None else ways[1:]
    lengths, work = _Lengths(), 0
    fills, loads = [], []
    for block in plan.blocks():
        rows = block.rows
        lengths.add(rows.pieces.lengths)
        for way in unknown:
            way.add(rows)
        work += int(rows.costs.sum())
        packs = ways[0].meter.deal(rows.steps, slates=rows.slates, planned=rows.costs)
        loads.append(packs.sum(axis=1).astype(np.float32))
        fills.append(_step_fill(plan, rows))
    slots = slot_lengths(lengths.values, multiple=plan.pad_multiple)
    pieces = PieceSums(slots=slots, costs=slots, counts=lengths.counts)
    packs_bound = least_packs(pieces, pack_tokens=plan.pack_tokens)
    figures = [] if stored.figures is None else [_Figures(stored.figures, stored.settled_figures, work)]
    figures += [_metered(plan, way) for way in unknown]
    return Measurement(
        fill_bound=stored.tokens / _least_room(plan, pieces, packs_bound),
        packs_bound=packs_bound,
        waste_by_multiple=_waste_by_multiple(lengths, plan.pad_multiple),
        source_tokens=dict(zip(plan.sources, facts["source_tokens"], strict=True)),
        source_supervised=None
        if facts["source_supervised"] is None
        else dict(zip(plan.sources, facts["source_supervised"], strict=True)),
        balances=[
            _balance(way, found, _documents_bound(plan, way, lengths.values, pieces, found.work))
            for way, found in zip(ways, figures, strict=True)
        ],
        series=StepSeries(fill=np.concatenate(fills), loads=np.concatenate(loads)),
    )


def _ways(plan: Plan, options: MeasureOptions) -> list[_Way]:
    """Return every dp with every cost model, the plan's own first."""
    own = plan.recipe.cost_model
    given = {model.name: model for model in options.cost_models}
    models: dict[str, CostModel | None] = {own: given.get(own) or _described(own), **given}
    return [
        _Way(
            meter=BalanceMeter(
                packs_per_step=plan.packs_per_step, slate_size=plan.slate_size, dp_size=dp_size
            ),
            name=name,
            model=model,
            by_plan=name == own,
        )
        for dp_size in dict.fromkeys([plan.slate_size, *options.dp_sizes])
        for name, model in models.items()
    ]


def _described(name: str) -> CostModel | None:
    """Return the cost model of a recipe if its name describes it: that of a table is only a digest."""
    try:
        return cost_model_of(name)
    except ValueError:
        return None


def _metered(plan: Plan, way: _Way) -> _Figures:
    num_settled = plan.num_steps - plan.recipe.window - 1
    settled = way.meter.balance(num_steps=num_settled) if num_settled > 0 else None
    return _Figures(way.meter.balance(), settled, way.meter.work)


def _balance(way: _Way, found: _Figures, documents_bound: float | None) -> MeasuredBalance:
    return MeasuredBalance(
        dp_size=way.meter.dp_size,
        cost_model=way.name,
        whole=found.whole,
        documents_bound=documents_bound,
        settled=found.settled,
    )


def _documents_bound(plan: Plan, way: _Way, lengths: Int64, pieces: PieceSums, work: int) -> float | None:
    if way.model is None:
        return None
    costs = replace(pieces, costs=way.model.piece_costs(lengths))
    dp_size = way.meter.dp_size
    least = least_work(
        costs, pack_tokens=plan.pack_tokens, packs_per_step=plan.packs_per_step, dp_size=dp_size
    )
    return least / (work / dp_size)


def _least_room(plan: Plan, pieces: PieceSums, packs_bound: int) -> int:
    """Return the slots that any packs of these pieces have at least."""
    if plan.pack_lengths.shape is PackShape.FIXED:
        return packs_bound * plan.pack_tokens
    # A variable pack is no shorter than its pieces.
    return sum(s * n for s, n in zip(pieces.slots.tolist(), pieces.counts.tolist(), strict=True))


def _step_fill(plan: Plan, rows: PackRows) -> NDArray[np.float32]:
    """Return real tokens over slots of each step: float32 [S]."""
    first_packs = packs_before(rows.steps)
    tokens = np.add.reduceat(rows.pieces.lengths, rows.offsets[first_packs[:-1]])
    lengths = plan.pack_lengths.of(pack_footprints(rows, multiple=plan.pad_multiple))
    return np.asarray(tokens / np.add.reduceat(lengths, first_packs[:-1]), dtype=np.float32)


def _waste_by_multiple(lengths: _Lengths, multiple: int) -> dict[int, float]:
    """Return the share of slots that pads documents, at ``multiple`` and its halves down to 1."""
    multiples = [1]
    while multiple > 1:
        multiples.append(multiple)
        multiple = multiple // 2 if multiple % 2 == 0 else 1
    tokens = int((lengths.values * lengths.counts).sum())
    slots = {
        m: int((slot_lengths(lengths.values, multiple=m) * lengths.counts).sum()) for m in sorted(multiples)
    }
    return {m: 1 - tokens / taken for m, taken in slots.items()}
