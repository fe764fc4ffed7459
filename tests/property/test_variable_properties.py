"""What must hold for variable packs of like work, whatever the documents are."""

from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfeed.pipeline.pack_lengths import LengthBuckets, PackShape
from ringfeed.pipeline.planner.cost import QuadraticCost
from ringfeed.pipeline.planner.documents import LengthsTable
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.rows import window_rows
from ringfeed.pipeline.planner.windows import WindowStart, plan_windows
from ringfeed.pipeline.ranks import MISSING, assign_packs
from ringfeed.pipeline.recipe import SourceRef

PACK_TOKENS = 32
COSTS = QuadraticCost(linear_tokens=8)

examples = settings(max_examples=25)
lengths_lists = st.lists(
    st.one_of(st.integers(0, 6), st.integers(0, 40), st.sampled_from([16, 17, 24, 31, 32, 33])),
    min_size=1,
    max_size=150,
)


@st.composite
def recipes(draw):
    """Options of a plan whose numbers fit each other."""
    slate_size, rows = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    window = draw(st.integers(1, 5))
    multiple = draw(st.sampled_from([1, 2, 4, 8]))
    piece = draw(st.sampled_from([PACK_TOKENS, PACK_TOKENS // 2]))
    least = int(COSTS.piece_costs(np.array([piece]))[0])
    return {
        "packs_per_step": slate_size * rows,
        "slate_size": slate_size,
        "window": window,
        "max_delay": draw(st.integers(0, window - 1)),
        "pad_multiple": multiple,
        "piece_tokens": piece,
        "mean_tokens": draw(st.sampled_from([PACK_TOKENS // 2, 28, PACK_TOKENS])),
        "work_budget": draw(st.sampled_from([None, least, 2 * least])),
        "length_buckets": draw(st.sampled_from(list(LengthBuckets))),
        "seed": draw(st.sampled_from([None, 3])),
        "epochs": draw(st.integers(1, 3)),
    }


def table_of(lengths):
    source = SourceRef(kind="lengths", name="lengths", fingerprint="", num_documents=len(lengths))
    return LengthsTable(Path("lengths.npy"), np.array(lengths), (source,))


def options_of(recipe):
    return PlanOptions(
        output=Path("plan"),
        lengths=Path("lengths.npy"),
        pack_tokens=PACK_TOKENS,
        pack_shape=PackShape.VARIABLE,
        cost_model=COSTS,
        **recipe,
    )


def windows_of(lengths, recipe):
    table, options = table_of(lengths), options_of(recipe)
    for window in plan_windows(table, options, start=WindowStart.beginning()):
        yield window, *window_rows(window, table, options)


def packs_of(lengths, recipe):
    """Per pack of the plan its step, its cost, its slate and its pieces (document, start, length, epoch)."""
    packs = []
    for _, rows, _ in windows_of(lengths, recipe):
        for k, step in enumerate(rows.steps.tolist()):
            pieces = rows.pieces.slice(*rows.offsets[k : k + 2].tolist())
            columns = (pieces.documents, pieces.starts, pieces.lengths, pieces.epochs)
            listed = list(zip(*(column.tolist() for column in columns), strict=True))
            packs.append((step, int(rows.costs[k]), int(rows.slates[k]), listed))
    return packs


@examples
@given(lengths=lengths_lists, recipe=recipes())
def test_every_token_is_planned_once_an_epoch(lengths, recipe):
    pieces = [piece for *_, pack in packs_of(lengths, recipe) for piece in pack]

    assert sorted((e, d, t) for d, start, n, e in pieces for t in range(start, start + n)) == [
        (e, d, t) for e in range(recipe["epochs"]) for d, length in enumerate(lengths) for t in range(length)
    ]
    assert max((n for _, _, n, _ in pieces), default=0) <= recipe["piece_tokens"]


@examples
@given(lengths=lengths_lists, recipe=recipes())
def test_no_pack_is_over_its_cap_or_its_budget_and_none_is_empty(lengths, recipe):
    m = recipe["pad_multiple"]
    for _, cost, _, pack in packs_of(lengths, recipe):
        assert 0 < sum(-(-piece[2] // m) * m for piece in pack) <= PACK_TOKENS
        assert cost == sum(n + n * n // 8 for _, _, n, _ in pack)
        assert recipe["work_budget"] is None or cost <= recipe["work_budget"]


@examples
@given(lengths=lengths_lists, recipe=recipes())
def test_steps_count_up_and_all_but_the_last_are_full(lengths, recipe):
    steps = [step for step, *_ in packs_of(lengths, recipe)]

    assert steps == [k // recipe["packs_per_step"] for k in range(len(steps))]


@examples
@given(lengths=lengths_lists, recipe=recipes())
def test_no_piece_is_later_than_it_may_be(lengths, recipe):
    for window, rows, _ in windows_of(lengths, recipe):
        packed = window.packing.packed
        late = np.repeat(rows.steps, np.diff(rows.offsets)) - packed.arrival_steps
        assert late.max(initial=0) <= recipe["max_delay"]


@examples
@given(lengths=lengths_lists, recipe=recipes())
def test_nothing_is_drawn_out_of_turn_but_what_waits(lengths, recipe):
    pieces = [p for *_, pack in packs_of(lengths, {**recipe, "max_delay": 0, "seed": None}) for p in pack]
    steps = [s for s, *_, pack in packs_of(lengths, {**recipe, "max_delay": 0, "seed": None}) for _ in pack]
    in_order = sorted(
        zip(pieces, steps, strict=True), key=lambda entry: (entry[0][3], entry[0][0], entry[0][1])
    )

    assert [step for _, step in in_order] == sorted(steps)


@examples
@given(lengths=lengths_lists, recipe=recipes())
def test_more_epochs_change_only_the_flush(lengths, recipe):
    flush = [window for window, *_ in windows_of(lengths, recipe)][-1].start.first_step
    kept = [pack for pack in packs_of(lengths, recipe) if pack[0] < flush]
    longer = packs_of(lengths, {**recipe, "epochs": recipe["epochs"] + 1})

    assert longer[: len(kept)] == kept


@examples
@given(lengths=lengths_lists, recipe=recipes())
def test_planning_goes_on_from_any_window(lengths, recipe):
    table, options = table_of(lengths), options_of(recipe)
    whole = list(plan_windows(table, options, start=WindowStart.beginning()))
    for i, window in enumerate(whole):
        again = list(plan_windows(table, options, start=window.start))
        assert [facts(w) for w in again] == [facts(w) for w in whole[i:]]


def facts(window):
    packed = window.packing.packed
    columns = (packed.pieces.documents, packed.arrival_steps, window.first_packs, window.packing.slates)
    return [column.tolist() for column in columns]


@examples
@given(lengths=lengths_lists, recipe=recipes())
def test_slates_give_every_pack_a_rank(lengths, recipe):
    k, r = recipe["packs_per_step"], recipe["slate_size"]
    packs = packs_of(lengths, recipe)
    for step in range(packs[-1][0] + 1 if packs else 0):
        own = [pack for pack in packs if pack[0] == step]
        table = assign_packs(
            np.array([cost for _, cost, _, _ in own]),
            np.array([slate for _, _, slate, _ in own], dtype=np.int32),
            packs_per_step=k,
            slate_size=r,
            dp_size=r,
        )
        assert sorted(table[table != MISSING].tolist()) == list(range(len(own)))
        assert table.shape == (k // r, r, 1)
