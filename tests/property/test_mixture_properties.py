"""What must hold for a mixture of any sources: shares, exactly once per source epoch, resume anywhere."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ringfeed.pipeline.coverage import Demand
from ringfeed.pipeline.mixture_recipe import Interpolation, LengthLimit, LongDocuments, MixtureUnit
from ringfeed.pipeline.planner.draw_rules import draw_rules
from ringfeed.pipeline.planner.drawn_blocks import LaneOrder
from ringfeed.pipeline.planner.drawn_documents import DrawnDocuments
from ringfeed.pipeline.planner.mixture import Exhausted, Mixture, MixturePoint, MixtureSource
from ringfeed.pipeline.planner.options import Balance, PlanOptions
from ringfeed.pipeline.planner.rows import window_rows
from ringfeed.pipeline.planner.snapshots import Snapshot
from ringfeed.pipeline.planner.windows import WindowStart, plan_windows
from ringfeed.pipeline.recipe import SourceRef

PACK_TOKENS = 24
STEPS = 30

examples = settings(max_examples=40)


class SourcesTable:
    """Documents of several sources, by their lengths."""

    knows_masks = False
    source_paths: tuple[Path, ...] = ()

    def __init__(self, lengths):
        self.source_made_from: list[dict[str, Any]] = []
        self.sources = tuple(
            SourceRef(kind="corpus", name=f"s{i}", fingerprint="", num_documents=len(own))
            for i, own in enumerate(lengths)
        )
        self.num_documents = sum(map(len, lengths))
        self.by_source = [np.array(own, np.int64) for own in lengths]
        self._bounds = np.cumsum([0, *map(len, lengths)])

    def lengths(self, ids):
        return np.concatenate(self.by_source)[ids]

    def source_of(self, ids):
        return (np.searchsorted(self._bounds, ids, side="right") - 1).astype(np.int32)

    def row_starts(self):
        return np.arange(self.num_documents + 1)

    def supervised(self, pieces, *, boundary):
        raise ValueError(f"nothing is known of the labels of {len(pieces)} pieces, boundary {boundary}")


@st.composite
def asked_mixtures(draw, num_sources):
    names = [f"s{i}" for i in range(num_sources)]
    weights = st.fixed_dictionaries({name: st.sampled_from([0, 1, 2, 7.5]) for name in names}).filter(
        lambda drawn: sum(drawn.values()) > 0
    )
    first = draw(weights)
    steps = draw(st.lists(st.integers(1, 12), unique=True, max_size=2).map(sorted))
    limits = draw(st.lists(st.integers(0, 12), unique=True, max_size=2).map(sorted))
    return Mixture(
        unit=draw(st.sampled_from(MixtureUnit)),
        sources=tuple(
            MixtureSource(
                name=name,
                weight=first[name],
                exhausted=draw(st.sampled_from(Exhausted)),
                epochs=draw(st.one_of(st.none(), st.integers(1, 3))),
            )
            for name in names
        ),
        interpolation=draw(st.sampled_from(Interpolation)),
        points=tuple(MixturePoint(step=step, weights=draw(weights)) for step in steps),
        limits=tuple(
            LengthLimit(step=step, max_tokens=draw(st.sampled_from([4, 11, 24, None]))) for step in limits
        ),
        long_documents=draw(st.sampled_from(LongDocuments)),
    )


@st.composite
def plans(draw):
    """A table and options that fit it."""
    lengths = draw(
        st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=25).map(lambda own: [3, *own]),
                 min_size=1, max_size=3)
    )  # fmt: skip
    options = PlanOptions(
        output=Path("plan"),
        lengths=Path("lengths.npy"),
        pack_tokens=PACK_TOKENS,
        packs_per_step=draw(st.integers(1, 2)),
        window=draw(st.integers(1, 3)),
        pad_multiple=draw(st.sampled_from([1, 4])),
        balance=draw(st.sampled_from(["work", "work", "best_fit", "in_order", "concat"])),
        overflow=draw(st.sampled_from(["split", "truncate", "drop"])),
        seed=draw(st.one_of(st.none(), st.integers(0, 5))),
        epochs=draw(st.integers(1, 2)),
        mixture=draw(asked_mixtures(len(lengths))),
        steps=STEPS,
    )
    return SourcesTable(lengths), options


def windows_of(table, options, start=None):
    """The windows up to ``STEPS``."""
    windows = []
    for window in plan_windows(table, options, start=start or WindowStart.beginning()):
        windows.append(window)
        if window.after.first_step >= STEPS:
            break
    return windows


def drawn_pieces(windows):
    """Per (document, epoch) the pieces that were drawn, in steps or carried, sorted."""
    drawn: dict[tuple[int, int], list[tuple[int, int]]] = {}
    parts = [window.packing.packed.pieces for window in windows] + [windows[-1].packing.carried.pieces]
    for pieces in parts:
        columns = (pieces.documents, pieces.epochs, pieces.starts, pieces.lengths)
        for document, epoch, start, length in zip(*(c.tolist() for c in columns), strict=True):
            drawn.setdefault((document, epoch), []).append((start, length))
    return {key: sorted(pieces) for key, pieces in drawn.items()}


def kept_tokens(length, options):
    if length > PACK_TOKENS and options.overflow != "split":
        return PACK_TOKENS if options.overflow == "truncate" else 0
    return length


@examples
@given(asked=plans())
def test_what_is_drawn_is_drawn_whole_and_once_in_an_epoch_of_its_source(asked):
    table, options = asked
    windows = windows_of(table, options)
    lengths = table.lengths(np.arange(table.num_documents))
    for (document, _), pieces in drawn_pieces(windows).items():
        ends = np.cumsum([length for _, length in pieces])
        assert [start for start, _ in pieces] == [0, *ends[:-1].tolist()]
        assert ends[-1] == kept_tokens(lengths[document], options)


@examples
@given(asked=plans())
def test_cursors_tell_which_documents_were_drawn(asked):
    table, options = asked
    windows = windows_of(table, options)
    drawn = drawn_pieces(windows)
    order = LaneOrder(table, draw_rules(table, options)[0].mixture, seed=options.seed)
    state = Snapshot(window=windows[-1].after, steps_done=0, chain="")
    found = DrawnDocuments(order, state)
    first = 0
    for source, own in enumerate(table.by_source):
        num_epochs = found.num_epochs(source, latest=0)
        demand = found.demand(source, first, first + len(own), num_epochs=num_epochs)
        asked_for = {(first + d, e) for e, d in np.argwhere(demand != Demand.MUST_NOT_BE).tolist()}
        has_tokens = {key for key in asked_for if kept_tokens(own[key[0] - first], options)}
        assert has_tokens == {key for key in drawn if first <= key[0] < first + len(own)}
        first += len(own)


@examples
@given(asked=plans())
def test_planning_goes_on_from_any_window(asked):
    table, options = asked
    whole = windows_of(table, options)
    for i, window in enumerate(whole):
        again = windows_of(table, options, start=window.start)
        assert [facts(one) for one in again] == [facts(one) for one in whole[i:]]


def facts(window):
    packed = window.packing.packed
    columns = (packed.pieces.documents, packed.pieces.starts, packed.pieces.epochs, window.first_packs)
    lists = [column.tolist() for column in columns]
    return lists, window.after.cursor, window.after.drawn.to_json(), window.losses.num_early


@examples
@given(asked=plans())
def test_the_state_tells_what_was_drawn_of_each_source_beyond_the_steps(asked):
    table, options = asked
    # Chopped pieces arrive in parts.
    assume(options.balance is not Balance.CONCAT)
    windows = windows_of(table, options)
    parts = [*(window.packing.packed for window in windows), windows[-1].packing.carried]
    arrivals = np.concatenate([part.arrivals for part in parts])
    tokens = np.concatenate([part.pieces.lengths for part in parts])
    sources = table.source_of(np.concatenate([part.pieces.documents for part in parts]))
    step_slots = options.packs_per_step * PACK_TOKENS
    for state in (window.after for window in windows):
        first = state.planned_slots // step_slots
        beyond = (arrivals < state.drawn_slots) & (arrivals // step_slots >= first)
        expected = np.zeros((len(state.drawn.tokens), len(table.sources)), np.int64)
        if len(table.sources) > 1:
            np.add.at(expected, ((arrivals // step_slots)[beyond] - first, sources[beyond]), tokens[beyond])

        assert state.drawn.first == first
        assert state.drawn.tokens.tolist() == expected.tolist()


@examples
@given(asked=plans(), workers=st.integers(2, 4))
def test_any_number_of_workers_draws_the_same(asked, workers):
    table, options = asked
    many = replace(options, workers=workers)

    assert [facts(one) for one in windows_of(table, many)] == [
        facts(one) for one in windows_of(table, options)
    ]


@examples
@given(
    lengths=st.lists(st.lists(st.integers(1, 24), min_size=3, max_size=30), min_size=2, max_size=4),
    weights=st.lists(st.integers(1, 20), min_size=4, max_size=4),
    unit=st.sampled_from(MixtureUnit),
)
def test_no_source_is_further_from_its_share_than_a_few_documents(lengths, weights, unit):
    table = SourcesTable(lengths)
    options = PlanOptions(
        output=Path("plan"), lengths=Path("x.npy"), pack_tokens=PACK_TOKENS, packs_per_step=1,
        pad_multiple=1, balance=Balance.IN_ORDER, steps=STEPS, mixture=Mixture(
            unit=unit,
            sources=tuple(
                MixtureSource(name=source.name, weight=weight, exhausted=Exhausted.REPEAT)
                for source, weight in zip(table.sources, weights, strict=False)
            ),
        ),
    )  # fmt: skip
    packed = [window.packing.packed.pieces for window in windows_of(table, options)]
    sources = table.source_of(np.concatenate([pieces.documents for pieces in packed]))
    amounts = np.concatenate([pieces.lengths for pieces in packed])
    if unit is MixtureUnit.DOCUMENTS:
        amounts = np.ones_like(amounts)
    target = np.array(weights[: len(lengths)]) / sum(weights[: len(lengths)])
    drawn = np.cumsum(np.where(sources[:, None] == np.arange(len(lengths)), amounts[:, None], 0), axis=0)

    # In drawing order, at every document.
    furthest = np.abs(drawn - drawn.sum(axis=1, keepdims=True) * target).max()
    assert furthest <= (len(lengths) - 1) * amounts.max() + 1


@examples
@given(asked=plans())
def test_tokens_per_source_are_what_the_pieces_come_to(asked):
    table, options = asked
    for window in windows_of(table, options):
        rows, _ = window_rows(window, table, options)
        if not len(rows.steps):
            continue
        assert rows.tokens is not None
        packs = np.repeat(np.arange(len(rows.steps)), np.diff(rows.offsets))
        counted = np.zeros_like(rows.tokens)
        np.add.at(counted, (packs, table.source_of(rows.pieces.documents)), rows.pieces.lengths)
        assert np.array_equal(counted, rows.tokens)


@examples
@given(asked=plans())
def test_a_curriculum_holds_but_for_what_is_counted_as_early(asked):
    table, options = asked
    mixture = options.mixture
    assume(mixture.limits)
    recipe = draw_rules(table, options)[0].mixture
    lengths = table.lengths(np.arange(table.num_documents))
    early = sum(window.losses.num_early for window in windows_of(table, options))
    beyond = 0
    for window in windows_of(table, options):
        for pieces in (window.packing.packed, window.packing.carried):
            slots_before = pieces.arrivals - window.start.planned_slots
            steps = window.start.first_step + slots_before // (options.packs_per_step * PACK_TOKENS)
            new = pieces.arrivals >= window.start.drawn_slots
            for i in np.flatnonzero(new & (pieces.pieces.starts == 0)).tolist():
                limit = recipe.limit_at(int(steps[i]))
                size = pieces.pieces.lengths[i]
                if mixture.long_documents is LongDocuments.DEFER:
                    size = lengths[pieces.pieces.documents[i]]
                beyond += limit is not None and size > limit

    if mixture.long_documents is LongDocuments.CUT:
        assert (beyond, early) == (0, 0)
    else:
        assert beyond == early


def web_code_books():
    rng = np.random.default_rng(0)
    medians = ((600, 60_000), (300, 30_000), (4000, 3_000))
    lengths = [np.clip(rng.lognormal(np.log(median), 1.2, count), 1, 8192) for median, count in medians]
    return lengths, (0.6, 0.3, 0.1), 8192


def whole_packs_and_crumbs():
    """One source of which each document is nearly a pack, one of halves, one of tiny ones."""
    rng = np.random.default_rng(0)
    lengths = [rng.integers(low, high, 20_000) for low, high in ((3900, 4097), (2049, 4097), (1, 400))]
    return lengths, (0.3, 0.3, 0.4), 4096


@pytest.mark.parametrize("schedule", ["spread", "homogeneous"])
@pytest.mark.parametrize("corpora", [web_code_books, whole_packs_and_crumbs])
def test_shares_hold_over_any_thousand_steps_of_a_plan(corpora, schedule):
    (lengths, weights, pack_tokens), steps = corpora(), 1400
    table = SourcesTable(lengths)
    options = PlanOptions(
        output=Path("plan"), lengths=Path("x.npy"), pack_tokens=pack_tokens, packs_per_step=8, slate_size=4,
        window=8, pad_multiple=16, seed=1, steps=steps, schedule=schedule, mixture=Mixture(
            sources=tuple(
                MixtureSource(name=source.name, weight=weight, exhausted=Exhausted.REPEAT)
                for source, weight in zip(table.sources, weights, strict=True)
            ),
        ),
    )  # fmt: skip
    tokens = np.zeros((2 * steps, 3), np.int64)
    for window in plan_windows(table, options, start=WindowStart.beginning()):
        rows, _ = window_rows(window, table, options)
        assert rows.tokens is not None
        np.add.at(tokens, rows.steps, rows.tokens)
        if window.after.first_step >= steps:
            break
    ends = np.cumsum(tokens[:steps], axis=0)
    thousands = ends[1000:] - ends[:-1000]

    shares = thousands / thousands.sum(axis=1, keepdims=True)
    assert np.abs(shares - weights).max() <= 0.001


def test_a_source_without_a_token_is_refused_not_drawn_for_ever():
    table = SourcesTable([[5, 6], [0, 0]])
    options = PlanOptions(
        output=Path("plan"), lengths=Path("x.npy"), pack_tokens=24, packs_per_step=1, pad_multiple=1,
        steps=5, mixture=Mixture(
            sources=(
                MixtureSource(name="s0", weight=1, exhausted=Exhausted.REPEAT),
                MixtureSource(name="s1", weight=1, exhausted=Exhausted.REPEAT),
            ),
        ),
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"source 's1' has no document with a token that may be kept"):
        list(plan_windows(table, options, start=WindowStart.beginning()))
