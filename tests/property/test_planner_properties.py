"""What must hold for a plan of any documents, whatever the strategy."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ringfeed.pipeline.planner.documents import LengthsTable
from ringfeed.pipeline.planner.options import Overflow, PlanOptions
from ringfeed.pipeline.planner.rows import window_rows
from ringfeed.pipeline.planner.tally import BlockTally
from ringfeed.pipeline.planner.windows import WindowStart, plan_windows
from ringfeed.pipeline.recipe import SourceRef

PACK_TOKENS = 24

every_strategy = pytest.mark.parametrize("balance", ["work", "best_fit", "in_order", "concat"])
examples = settings(max_examples=60)
lengths_lists = st.lists(
    st.one_of(st.integers(0, 12), st.integers(0, 70), st.sampled_from([23, 24, 25, 48])),
    min_size=1,
    max_size=60,
)
sizes = st.sampled_from(
    [(packs, slate) for packs in (1, 2, 3, 4, 8) for slate in (1, 2, 3, 4) if packs % slate == 0]
)
others = st.fixed_dictionaries(
    {
        "window": st.integers(1, 4),
        "seed": st.one_of(st.none(), st.integers(0, 5)),
        "pad_multiple": st.sampled_from([1, 2, 3, 4, 8, 24]),
        "epochs": st.integers(1, 3),
    }
)
recipes = st.builds(
    lambda size, other: {"packs_per_step": size[0], "slate_size": size[1], **other}, sizes, others
)
# Tiny documents beside those of one length: what is left at the end seldom fits what it comes to.
two_kinds = st.builds(
    lambda length, seed, count: np.where(np.random.default_rng(seed).random(count) < 0.5, 1, length).tolist(),
    st.sampled_from([3, 7, 11, 13, 17, 21, 23, PACK_TOKENS]),
    st.sampled_from(range(100)),
    st.sampled_from([30, 60, 100, 150]),
)
slate_recipes = st.builds(
    lambda size, other, asked: {
        "packs_per_step": size[0],
        "slate_size": size[1],
        **other,
        **asked,
        "balance": "work",
    },
    st.sampled_from([(1, 1), (2, 2), (4, 1), (4, 2), (6, 3), (8, 1), (8, 2), (12, 2)]),
    others,
    st.fixed_dictionaries(
        {
            "pad_multiple": st.sampled_from([1, 2]),
            "window": st.sampled_from([1, 2, 5, 16]),
            "schedule": st.sampled_from(["spread", "homogeneous"]),
            "long_tokens": st.sampled_from([None, 2, 9, 13, 16, 20, PACK_TOKENS]),
        }
    ),
)


def windows_of(lengths, **asked):
    """All windows with their rows and sums, in memory."""
    source = SourceRef(kind="lengths", name="lengths", fingerprint="", num_documents=len(lengths))
    table = LengthsTable(Path("lengths.npy"), np.array(lengths), (source,))
    options = PlanOptions(output=Path("plan"), lengths=table.path, pack_tokens=PACK_TOKENS, **asked)
    for window in plan_windows(table, options, start=WindowStart.beginning()):
        yield window, *window_rows(window, table, options)


def packs_of(lengths, **asked):
    """Per pack of the plan its step and its pieces (document, start, length, epoch)."""
    packs = []
    for _, rows, _ in windows_of(lengths, **asked):
        for k, step in enumerate(rows.steps.tolist()):
            pieces = rows.pieces.slice(*rows.offsets[k : k + 2].tolist())
            columns = (pieces.documents, pieces.starts, pieces.lengths, pieces.epochs)
            packs.append((step, list(zip(*(column.tolist() for column in columns), strict=True))))
    return packs


def pieces_of(packs):
    return [piece for _, pack in packs for piece in pack]


@every_strategy
@examples
@given(lengths=lengths_lists, recipe=recipes)
def test_every_token_is_planned_once_an_epoch(balance, lengths, recipe):
    pieces = pieces_of(packs_of(lengths, balance=balance, overflow="split", **recipe))
    tokens = sorted((e, d, t) for d, start, n, e in pieces for t in range(start, start + n))

    assert tokens == [
        (e, d, t) for e in range(recipe["epochs"]) for d, length in enumerate(lengths) for t in range(length)
    ]


@every_strategy
@pytest.mark.parametrize("overflow", ["truncate", "drop"])
@examples
@given(lengths=lengths_lists, recipe=recipes)
def test_lost_tokens_are_counted_to_the_last_one(balance, overflow, lengths, recipe):
    windows = list(windows_of(lengths, balance=balance, overflow=overflow, **recipe))
    planned = sum(int(rows.pieces.lengths.sum()) for _, rows, _ in windows)
    lost = BlockTally.sum_of(
        BlockTally.of_losses(window.losses, Overflow(overflow)) for window, _, _ in windows
    )
    num_long = sum(n > PACK_TOKENS for n in lengths) * recipe["epochs"]

    assert planned + lost.dropped_tokens + lost.truncated_tokens == sum(lengths) * recipe["epochs"]
    assert (lost.dropped, lost.truncated)[overflow == "truncate"] == num_long
    assert lost.empty == lengths.count(0) * recipe["epochs"]


@every_strategy
@examples
@given(lengths=lengths_lists, recipe=recipes)
def test_every_cut_document_is_counted_once(balance, lengths, recipe):
    windows = list(windows_of(lengths, balance=balance, **recipe))
    pieces = pieces_of(packs_of(lengths, balance=balance, **recipe))
    num_pieces: dict[tuple[int, int], int] = {}
    for document, _, _, epoch in pieces:
        num_pieces[document, epoch] = num_pieces.get((document, epoch), 0) + 1

    assert sum(int(tally.split.sum()) for _, _, tally in windows) == sum(n > 1 for n in num_pieces.values())


@every_strategy
@examples
@given(lengths=lengths_lists, recipe=recipes)
def test_no_pack_is_over_the_budget_and_none_is_empty(balance, lengths, recipe):
    m = recipe["pad_multiple"]
    packs = packs_of(lengths, balance=balance, **recipe)
    sizes = [sum(-(-piece[2] // m) * m for piece in pack) for _, pack in packs]

    assert all(0 < size <= PACK_TOKENS for size in sizes)


@every_strategy
@examples
@given(lengths=lengths_lists, recipe=recipes)
def test_steps_count_up_and_all_but_the_last_are_full(balance, lengths, recipe):
    steps = [step for step, _ in packs_of(lengths, balance=balance, **recipe)]

    assert steps == [k // recipe["packs_per_step"] for k in range(len(steps))]


@every_strategy
@examples
@given(lengths=lengths_lists, recipe=recipes)
def test_more_epochs_change_only_the_flush(balance, lengths, recipe):
    windows = list(windows_of(lengths, balance=balance, **recipe))
    flush = windows[-1][0].start.first_step
    short = packs_of(lengths, balance=balance, **recipe)
    long = packs_of(lengths, balance=balance, **{**recipe, "epochs": recipe["epochs"] + 1})

    kept = [pack for pack in short if pack[0] < flush]
    assert long[: len(kept)] == kept
    # What is flushed was less than one window's pool.
    flushed = sum(int(window.packing.packed.slots.sum()) for window, _, _ in windows[-1:])
    assert flushed < (recipe["window"] * recipe["packs_per_step"] + 1) * PACK_TOKENS


@every_strategy
@examples
@given(lengths=lengths_lists, recipe=recipes)
def test_planning_goes_on_from_any_window(balance, lengths, recipe):
    source = SourceRef(kind="lengths", name="lengths", fingerprint="", num_documents=len(lengths))
    table = LengthsTable(Path("lengths.npy"), np.array(lengths), (source,))
    options = PlanOptions(
        output=Path("plan"), lengths=table.path, pack_tokens=PACK_TOKENS, balance=balance, **recipe
    )
    whole = list(plan_windows(table, options, start=WindowStart.beginning()))
    for i, window in enumerate(whole):
        again = list(plan_windows(table, options, start=window.start))
        assert [documents(w) for w in again] == [documents(w) for w in whole[i:]]


def documents(window):
    packed = window.packing.packed
    return packed.pieces.documents.tolist(), packed.arrival_steps.tolist(), window.first_packs.tolist()


@settings(max_examples=150)
@example(
    lengths=[7] * 10,
    recipe={
        "packs_per_step": 4,
        "slate_size": 2,
        "balance": "work",
        "window": 1,
        "long_tokens": 13,
        "pad_multiple": 1,
    },
)
@given(lengths=st.one_of(two_kinds, lengths_lists), recipe=slate_recipes)
def test_no_slate_has_more_packs_than_ranks_and_full_steps_have_all_of_them(lengths, recipe):
    size, num_packs = recipe["slate_size"], recipe["packs_per_step"]
    slates: dict[int, list[int]] = {}
    for _, rows, _ in windows_of(lengths, **recipe):
        for step, slate in zip(rows.steps.tolist(), rows.slates.tolist(), strict=True):
            slates.setdefault(step, []).append(slate)
    counts = {step: np.bincount(own, minlength=num_packs // size) for step, own in slates.items()}
    last = counts.pop(max(counts), np.zeros(1)) if counts else np.zeros(1)

    assert all((own == size).all() for own in counts.values())
    assert last.max() <= size
    assert len(last) <= num_packs // size


@examples
@given(lengths=st.one_of(lengths_lists, two_kinds), recipe=slate_recipes)
def test_every_token_is_in_a_slate_once_an_epoch(lengths, recipe):
    pieces = pieces_of(packs_of(lengths, **recipe))
    tokens = sorted((e, d, t) for d, start, n, e in pieces for t in range(start, start + n))

    assert tokens == [
        (e, d, t) for e in range(recipe["epochs"]) for d, length in enumerate(lengths) for t in range(length)
    ]


@examples
@given(lengths=lengths_lists, recipe=recipes)
def test_in_order_keeps_documents_in_drawing_order(lengths, recipe):
    pieces = pieces_of(packs_of(lengths, balance="in_order", **{**recipe, "seed": None}))

    assert pieces == sorted(pieces, key=lambda piece: (piece[3], piece[0], piece[1]))


@examples
@given(lengths=lengths_lists, recipe=recipes)
def test_concat_leaves_no_slot_free_before_the_last_pack(lengths, recipe):
    m = recipe["pad_multiple"]
    packs = packs_of(lengths, balance="concat", **recipe)

    assert all(sum(-(-piece[2] // m) * m for piece in pack) == PACK_TOKENS for _, pack in packs[:-1])


@examples
@given(lengths=lengths_lists, recipe=recipes)
def test_best_fit_starves_nothing(lengths, recipe):
    tallies = [tally for _, _, tally in windows_of(lengths, balance="best_fit", **recipe)]
    furthest = max(int(tally.displacement_max.max(initial=0)) for tally in tallies)

    # A pool is a window and a pack; at its emptiest, packs are half full.
    assert furthest <= 2 * (recipe["window"] + 1)
