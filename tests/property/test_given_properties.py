"""What must hold for plans that keep rows as they were packed: nothing is split, joined, moved or lost."""

from itertools import pairwise
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfeed.pipeline.corpus import Corpus
from ringfeed.pipeline.ingest import run_ingest
from ringfeed.pipeline.ingest_options import IngestOptions
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.documents import LengthsTable
from ringfeed.pipeline.planner.options import Balance, BlockLimits, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.planner.windows import WindowStart, plan_windows
from ringfeed.pipeline.progress import SilentProgress
from ringfeed.pipeline.recipe import SourceRef
from ringfeed.pipeline.verify import verify

PACK_TOKENS = 24

# Up to four documents of up to five tokens: a row fits a pack even where each is padded to 6.
rows_of_lengths = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=4), min_size=1, max_size=40)
recipes = st.fixed_dictionaries(
    {
        "packs_per_step": st.sampled_from([1, 2, 3, 4]),
        "window": st.integers(1, 3),
        "seed": st.one_of(st.none(), st.integers(0, 5)),
        "pad_multiple": st.sampled_from([1, 2, 3, 6]),
        "epochs": st.integers(1, 3),
    }
)


class RowsTable(LengthsTable):
    """Documents of which some were packed together."""

    row_bounds: list[int]

    def row_starts(self):
        return np.array(self.row_bounds, dtype=np.int64)


def table_of(rows):
    lengths = np.array([length for row in rows for length in row])
    source = SourceRef(kind="lengths", name="lengths", fingerprint="", num_documents=len(lengths))
    return _table(lengths, source, np.cumsum([0, *map(len, rows)]).tolist())


def _table(lengths, source, bounds):
    table = RowsTable(Path("lengths.npy"), lengths, (source,))
    object.__setattr__(table, "row_bounds", bounds)
    return table


def windows_of(rows, start=None, **recipe):
    table = table_of(rows)
    options = PlanOptions(
        output=Path("plan"), lengths=table.path, pack_tokens=PACK_TOKENS, balance=Balance.GIVEN, **recipe
    )
    return list(plan_windows(table, options, start=start or WindowStart.beginning()))


def packs_of(windows):
    """The documents of each pack, with its step and epoch."""
    found = []
    for window in windows:
        pieces, offsets = window.packing.packed.pieces, window.packing.offsets
        for k, (low, high) in enumerate(pairwise(offsets.tolist())):
            step = int(np.searchsorted(window.first_packs, k, side="right")) - 1 + window.start.first_step
            (epoch,) = set(pieces.epochs[low:high].tolist())
            assert not pieces.starts[low:high].any()
            found.append((step, epoch, tuple(pieces.documents[low:high].tolist())))
    return found


@settings(max_examples=80)
@given(rows=rows_of_lengths, recipe=recipes)
def test_each_pack_is_a_row_and_each_row_is_a_pack_once_an_epoch(rows, recipe):
    packs = packs_of(windows_of(rows, **recipe))

    bounds = np.cumsum([0, *map(len, rows)]).tolist()
    expected = [tuple(range(low, high)) for low, high in pairwise(bounds)]
    for epoch in range(recipe["epochs"]):
        own = [documents for _, at, documents in packs if at == epoch]
        assert sorted(own) == expected
        if recipe["seed"] is None:
            assert own == expected
    assert [at for _, at, _ in packs] == sorted(at for _, at, _ in packs)


@settings(max_examples=80)
@given(rows=rows_of_lengths, recipe=recipes)
def test_steps_are_full_but_for_the_last_and_go_on_from_any_window(rows, recipe):
    windows = windows_of(rows, **recipe)
    steps = [step for step, _, _ in packs_of(windows)]

    size = recipe["packs_per_step"]
    assert steps == [i // size for i in range(len(rows) * recipe["epochs"])]
    for i, window in enumerate(windows):
        again = windows_of(rows, start=window.start, **recipe)
        assert packs_of(again) == packs_of(windows[i:])


@settings(max_examples=80)
@given(rows=rows_of_lengths, recipe=recipes)
def test_more_epochs_change_no_step_but_the_last(rows, recipe):
    short = packs_of(windows_of(rows, **recipe))
    long = packs_of(windows_of(rows, **{**recipe, "epochs": recipe["epochs"] + 1}))

    assert long[: len(short)] == short


@settings(max_examples=8)
@given(
    rows=st.lists(st.lists(st.integers(2, 6), min_size=1, max_size=4), min_size=1, max_size=12),
    seed=st.one_of(st.none(), st.integers(0, 5)),
    epochs=st.integers(1, 2),
    data=st.data(),
)
def test_a_plan_of_packed_rows_verifies_and_holds_their_tokens(tmp_path_factory, rows, seed, epochs, data):
    folder = tmp_path_factory.mktemp("given")
    packed = [list(range(100 * i, 100 * i + sum(row))) for i, row in enumerate(rows)]
    padded = [row + [0] * data.draw(st.integers(0, 3)) for row in packed]
    lines = [f'{{"ids": {ids}, "n": {lengths}}}\n' for ids, lengths in zip(padded, rows, strict=True)]
    (folder / "rows.jsonl").write_text("".join(lines))
    ingest = IngestOptions(
        sources=(folder / "rows.jsonl",), output=folder / "corpus", tokens_column="ids", lengths_column="n"
    )
    run_ingest(ingest, progress=SilentProgress())
    plan = PlanOptions(
        corpora=(folder / "corpus",),
        output=folder / "plan",
        pack_tokens=PACK_TOKENS,
        packs_per_step=2,
        pad_multiple=2,
        balance=Balance.GIVEN,
        seed=seed,
        epochs=epochs,
        block_limits=BlockLimits(steps=3),
    )
    run_plan(plan)

    assert verify(folder / "plan").findings == ()
    corpus, made = Corpus.open(folder / "corpus"), Plan.open(folder / "plan")
    found = []
    for step in range(made.num_steps):
        for documents in made.step(step).column("documents").to_pylist():
            found.append([token for document in documents for token in corpus.document(document).tolist()])
    assert sorted(found) == sorted(packed * epochs)
    if seed is None:
        assert found == packed * epochs
