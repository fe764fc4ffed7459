"""Balanced work moves documents; every source still gets what was drawn of it, step by step."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from ringfeed.pipeline.mixture_recipe import MixtureUnit
from ringfeed.pipeline.planner.cost import cost_model_of
from ringfeed.pipeline.planner.documents import LengthsTable
from ringfeed.pipeline.planner.mixture import Exhausted, Mixture, MixturePoint, MixtureSource
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.windows import WindowStart, plan_windows
from ringfeed.pipeline.recipe import SourceRef

PACK = 4096
STEP = 16 * PACK


class SourcesTable(LengthsTable):
    """Lengths of several sources."""

    def source_of(self, ids):
        ends = np.cumsum([source.num_documents for source in self.sources])
        return np.searchsorted(ends, ids, side="right").astype(np.int32)


@dataclass(frozen=True)
class Tokens:
    """Tokens per step and source, [steps, S] each."""

    planned: np.ndarray
    drawn: np.ndarray
    """Those of the same slots of the stream, in drawing order."""

    @property
    def ahead(self):
        """What each source has got beyond what was drawn of it, in steps, after each step."""
        return np.cumsum(self.planned - self.drawn, axis=0) / self.planned.sum(axis=1).mean()

    def shares(self, steps):
        """Shares over so many steps, for every place where they may begin: planned and drawn."""
        for tokens in (self.planned, self.drawn):
            ends = np.concatenate([np.zeros((1, tokens.shape[1])), np.cumsum(tokens, axis=0)])
            sums = ends[steps:] - ends[:-steps]
            yield sums / sums.sum(axis=1, keepdims=True)


def tokens_of(lengths, mixture, *, steps, **asked):
    """Plan a mixture in memory."""
    sources = tuple(
        SourceRef(kind="corpus", name=f"s{i}", fingerprint="", num_documents=len(own))
        for i, own in enumerate(lengths)
    )
    table = SourcesTable(Path("lengths.npy"), np.concatenate(lengths).astype(np.int64), sources)
    sizes = {"pack_tokens": PACK, "packs_per_step": 16, "slate_size": 4, "window": 16, "pad_multiple": 1}
    options = PlanOptions(
        output=Path("plan"), lengths=table.path, mixture=mixture, steps=steps, seed=1,
        cost_model=cost_model_of("quadratic:linear_tokens=768"), **{**sizes, **asked},
    )  # fmt: skip
    ends, parts = [], []
    for window in plan_windows(table, options, start=WindowStart.beginning()):
        packed, first_pieces = window.packing.packed, window.packing.offsets[window.first_packs]
        within = np.repeat(np.arange(window.num_steps), np.diff(first_pieces)) + window.start.first_step
        slots = np.concatenate([[0], np.cumsum(packed.slots)])[first_pieces[1:]]
        ends.append(window.start.planned_slots + slots)
        parts.append((within, packed))
        if window.final or window.after.first_step >= steps:
            carried = window.packing.carried
            parts.append((np.full(len(carried), window.after.first_step), carried))
            break
    within = np.concatenate([steps_of for steps_of, _ in parts])
    arrivals = np.concatenate([pieces.arrivals for _, pieces in parts])
    real = np.concatenate([pieces.pieces.lengths for _, pieces in parts])
    source = table.source_of(np.concatenate([pieces.pieces.documents for _, pieces in parts]))
    of_stream = np.searchsorted(np.concatenate(ends), arrivals, side="right")

    def summed(at):
        sums = np.zeros((max(within.max(), at.max()) + 1, len(lengths)))
        np.add.at(sums, (at, source), real)
        return sums[:steps]

    return Tokens(summed(within), summed(of_stream))


def web(count, seed=0):
    return np.clip(np.random.default_rng(seed).lognormal(np.log(20), 1.5, count), 1, PACK)


def code(count, seed=1):
    return np.clip(np.random.default_rng(seed).lognormal(np.log(10), 1.2, count), 1, PACK)


def books(count, seed=2):
    return np.random.default_rng(seed).integers(PACK // 4, PACK + 1, count)


def mixture(weights, *, exhausted=("repeat", "repeat", "repeat"), points=(), unit="tokens"):
    sources = tuple(
        MixtureSource(name=f"s{i}", weight=weight, exhausted=Exhausted(policy))
        for i, (weight, policy) in enumerate(zip(weights, exhausted, strict=True))
    )
    asked = tuple(
        MixturePoint(step=step, weights={f"s{i}": weight for i, weight in enumerate(later)})
        for step, later in points
    )
    return Mixture(unit=MixtureUnit(unit), sources=sources, points=asked)


def dropping(steps, seed=0):
    """Lengths and mixture of three sources; the first ends about that step, with half of the tokens."""
    first = web(40_000, seed)
    first = first[: int(np.searchsorted(np.cumsum(first), steps * STEP / 2))]
    lengths = [first, code(20_000, seed + 1), web(20_000, seed + 2)]
    return lengths, mixture((0.5, 0.3, 0.2), exhausted=("drop", "repeat", "repeat"))


@pytest.mark.parametrize("seed", range(4))
def test_a_source_keeps_its_share_up_to_where_it_drops_out(seed):
    lengths, asked = dropping(24, seed)
    tokens = tokens_of(lengths, asked, steps=60)
    planned, drawn = tokens.shares(2)

    # From nothing being held back to nothing being left.
    last = int(np.flatnonzero(tokens.drawn[:, 0])[-1])
    assert 20 < last < 28
    assert planned[: last - 1, 0].min() > 0.3
    assert planned[last + 16 :, 0].max() == 0
    assert np.abs(tokens.ahead).max() < 0.5
    assert np.abs(planned - drawn)[: last - 1].max() < 0.2
    # The two that stay share what it leaves, 3 to 2, whether it is there or not.
    sums = tokens.planned[8:].sum(axis=0)
    assert sums[1] / sums[1:].sum() == pytest.approx(0.6, abs=0.01)


@pytest.mark.parametrize("seed", range(3))
def test_steps_follow_weights_that_change_from_one_step_to_the_next(seed):
    lengths = [web(20_000, seed), code(20_000, seed + 1), web(20_000, seed + 2)]
    asked = mixture((0.7, 0.1, 0.2), points=[(30, (0.2, 0.5, 0.3))])
    tokens = tokens_of(lengths, asked, steps=60)
    planned, _ = tokens.shares(2)

    assert np.abs(tokens.ahead).max() < 0.5
    assert planned[:28] == pytest.approx(np.tile((0.7, 0.1, 0.2), (28, 1)), abs=0.15)
    assert planned[32:58] == pytest.approx(np.tile((0.2, 0.5, 0.3), (26, 1)), abs=0.15)


@pytest.mark.parametrize("schedule", ["spread", "homogeneous"])
@pytest.mark.parametrize("unit", ["tokens", "documents"])
def test_no_source_is_far_from_what_was_drawn(unit, schedule):
    lengths = [web(20_000), code(20_000), books(3_000)]
    weights = (0.5, 0.3, 0.2) if unit == "tokens" else (0.6, 0.39, 0.01)
    tokens = tokens_of(lengths, mixture(weights, unit=unit), steps=200, schedule=schedule)

    assert np.abs(tokens.ahead).max() < 0.5
    # No source that is drawn is left out for long.
    planned, drawn = tokens.shares(4)
    assert (planned > drawn / 4).all()


def test_shares_are_those_drawn_over_any_thousand_steps():
    lengths = [web(300_000), code(40_000), books(3_000)]
    points = [(400, (0.3, 0.5, 0.2)), (900, (0.6, 0.3, 0.1))]
    asked = mixture((0.5, 0.3, 0.2), exhausted=("drop", "repeat", "repeat"), points=points)
    tokens = tokens_of(lengths, asked, steps=1300)
    planned, drawn = tokens.shares(1000)

    assert tokens.drawn[0, 0] > 0
    assert tokens.drawn[-1, 0] == 0
    assert np.abs(planned - drawn).max() < 0.001
