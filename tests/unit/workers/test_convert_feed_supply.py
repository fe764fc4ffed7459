"""Held steps as a supply of blocks: right tensors, bounded memory, what was let go is refused."""

import threading
import time

import numpy as np
import pytest

from ringfeed.pipeline.conversion import ConvertOptions, convert_batch
from ringfeed.pipeline.feed_request import BlockRequest
from ringfeed.pipeline.feed_source import FeedSource
from ringfeed.pipeline.held_steps import HeldSteps
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.local_fetcher import LocalFetcher
from ringfeed.pipeline.opening import ViewSpec
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers import convert_feed_supply
from ringfeed.workers.block_builder import BlockBuilder
from ringfeed.workers.convert_feed_supply import ConvertSupply, FeedStoppedError

T, ROWS = 24, 2
STEP_BYTES = ROWS * T * 8


def batch(index, num_rows=ROWS):
    rng = np.random.default_rng(index)
    return {
        "input_ids": rng.integers(1, 100, (num_rows, T)),
        "seq_lens": rng.integers(1, 5, (num_rows, 3)),
    }


def options(layout="te"):
    return ConvertOptions(layout=make_layout(layout), cp_size=2, pad_id=9, num_chunks=None, pack_slots=T)


def supply(hold_steps=100, dp_size=1, layout="te", under_way=0):
    made = options(layout)
    spec = ViewSpec(
        layout=made.layout,
        cp_size=2,
        pack_slots=T,
        multiple=made.layout.length_multiple(2),
        pad_id=9,
    )
    held = HeldSteps(spec, recipe_fingerprint="ab" * 16, packs_per_step=ROWS, name="convert")
    made_supply = ConvertSupply(
        held, dp_size=dp_size, hold_bytes=hold_steps * STEP_BYTES, block_bytes=1, under_way=under_way
    )
    return made_supply, held


def place(cp_rank=0, *, dp_rank=0, dp_size=1, packs_per_chunk=1):
    return RankPlace(
        dp_rank=dp_rank, dp_size=dp_size, cp_rank=cp_rank, cp_size=2, packs_per_chunk=packs_per_chunk
    )


def ask(made, step, cp_rank=0, micro_batch=0):
    return made.block(
        BlockRequest(
            place=place(cp_rank), first_step=step, first_micro_batch=micro_batch, num_micro_batches=1
        )
    )


def take_step(made, step):
    for cp_rank in range(2):
        for micro_batch in range(ROWS):
            ask(made, step, cp_rank, micro_batch)


@pytest.mark.parametrize("layout", ["te", "contiguous", "identity"])
def test_a_rank_reads_the_views_of_the_conversion(layout):
    made, _ = supply(layout=layout)
    expected = [convert_batch(batch(i, 1 if i == 2 else ROWS), options(layout)) for i in range(3)]
    for rows in expected:
        made.put(rows)
    made.end()

    source = FeedSource(LocalFetcher(made), place=place(1))
    for step, rows in enumerate(expected):
        share = source.step_share(step, place(1))
        assert share.packs.reshape(-1).tolist()[: len(rows)] == list(range(len(rows)))
        for pack, views in enumerate(rows):
            found = source.rank_view(step, pack, cp_rank=1)
            for name, array in views[1].tensors.items():
                assert found.tensors[name].tolist() == array.tolist()
        assert int(share.supervised.sum()) == sum(
            view.local_supervised for views in rows for view in (views[:1] if layout == "identity" else views)
        )
    assert not source.has_step(3)
    source.close()


def test_the_input_waits_for_the_slowest_rank_and_steps_are_let_go():
    made, held = supply(hold_steps=3)
    added = []

    def put_all():
        for index in range(8):
            made.put(convert_batch(batch(index), options()))
            added.append(index)

    thread = threading.Thread(target=put_all, daemon=True)
    thread.start()
    time.sleep(0.3)
    assert added == [0, 1, 2]
    for micro_batch in range(ROWS):
        ask(made, 0, 0, micro_batch)
    time.sleep(0.2)
    assert added == [0, 1, 2]
    take_step(made, 0)
    until(lambda: len(added) == 4)
    assert held.first_step == 1
    assert held.bytes_held == 3 * STEP_BYTES
    for step in range(1, 8):
        until(lambda step=step: held.num_steps > step)
        take_step(made, step)
    thread.join(10)
    assert held.num_steps == 8
    assert not made.is_served
    made.end()
    assert made.is_served


def test_blocks_that_a_broken_stream_may_have_lost_are_held_though_there_is_no_room():
    made, held = supply(hold_steps=6, under_way=4)
    for index in range(6):
        made.put(convert_batch(batch(index), options()))
    for step in range(3):
        take_step(made, step)

    def put_two():
        for index in (6, 7):
            made.put(convert_batch(batch(index), options()))

    thread = threading.Thread(target=put_two, daemon=True)
    thread.start()
    until(lambda: held.num_steps == 7)
    time.sleep(0.2)
    # The last four blocks of each rank were on their way when its stream broke.
    assert (held.first_step, held.num_steps) == (1, 7)
    for step in (1, 2):
        take_step(made, step)
    for step in (3, 4):
        take_step(made, step)
    thread.join(10)
    assert (held.first_step, held.num_steps) == (2, 8)


def test_a_full_hold_that_every_rank_was_given_takes_in_more():
    made, held = supply(hold_steps=2, under_way=4)
    for index in range(6):
        made.put(convert_batch(batch(index), options()))
        take_step(made, index)
    assert (held.first_step, held.num_steps) == (4, 6)


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_was_let_go_is_refused_with_the_first_step_that_is_held():
    made, _ = supply(hold_steps=1)
    made.put(convert_batch(batch(0), options()))
    take_step(made, 0)
    made.put(convert_batch(batch(1), options()))
    take_step(made, 1)
    made.put(convert_batch(batch(2), options()))

    assert ask(made, 2).rows.num_rows == 1
    with pytest.raises(ValueError, match="step 0 is not held: the first one that is, is 2, of 3 so far"):
        ask(made, 0)


def test_steps_stay_while_there_is_room():
    made, held = supply(hold_steps=3)
    for index in range(3):
        made.put(convert_batch(batch(index), options()))
        take_step(made, index)

    assert held.first_step == 0


def test_a_loader_goes_on_from_its_state_while_the_steps_are_held():
    made, _ = supply()
    for index in range(4):
        made.put(convert_batch(batch(index), options()))
    made.end()

    def load():
        return Loader(LocalFetcher(made), dp_rank=0, dp_size=1, cp_rank=0, cp_size=2)

    with load() as whole:
        expected = [b.info.digest for b in whole]
    with load() as first:
        for _, _ in zip(range(3), first, strict=False):
            pass
        state = first.state_dict()
    with load() as again:
        again.load_state_dict(state)
        assert [b.info.digest for b in again] == expected[3:]
    other, _ = supply()
    other.put(convert_batch(batch(9), options()))
    other.put(convert_batch(batch(1), options()))
    other.end()
    stranger = Loader(LocalFetcher(other), dp_rank=0, dp_size=1, cp_rank=0, cp_size=2)
    with stranger, pytest.raises(ValueError, match="chain"):
        stranger.load_state_dict(state)


def test_who_the_input_waits_for_is_told(monkeypatch, caplog):
    monkeypatch.setattr(convert_feed_supply, "_SECONDS_TO_TELL", 0.05)
    made, _ = supply(hold_steps=2)
    made.put(convert_batch(batch(0), options()))
    made.put(convert_batch(batch(1), options()))
    ask(made, 0, 0, 0)
    thread = threading.Thread(target=lambda: made.put(convert_batch(batch(2), options())), daemon=True)
    thread.start()
    until(lambda: caplog.messages)
    for step in range(2):
        take_step(made, step)
    thread.join(10)

    assert caplog.messages[0] == (
        f"the input waits: {2 * STEP_BYTES} bytes in steps 0 to 1 are held for dp rank 0, cp rank 1, which "
        f"was given all before step 0 (hold_bytes={2 * STEP_BYTES})"
    )


def test_a_stopped_feed_takes_no_more():
    made, _ = supply(hold_steps=1)
    made.put(convert_batch(batch(0), options()))
    failed = []

    def put():
        try:
            made.put(convert_batch(batch(1), options()))
        except FeedStoppedError:
            failed.append(True)

    thread = threading.Thread(target=put, daemon=True)
    thread.start()
    time.sleep(0.1)
    made.stop()
    thread.join(10)

    assert failed == [True]


def test_facts_grow_and_tell_a_failure():
    made, _ = supply()
    before = made.facts()
    made.put(convert_batch(batch(0), options()))
    after = made.facts()

    assert (before.num_steps, after.num_steps, after.is_growing) == (0, 1, True)
    assert before.fingerprint == after.fingerprint
    made.end(ValueError("batch 1: no seq_lens"))
    with pytest.raises(ValueError, match="the conversion behind this feed ended: batch 1: no seq_lens"):
        made.facts()


class EndsWhileItIsAsked(HeldSteps):
    """Gets its last step, and ends, between two questions of who looks."""

    last: list | None = None

    @property
    def num_steps(self):
        found = super().num_steps
        if self.last is not None:
            last, self.last = self.last, None
            self.add(last)
            self.end()
        return found


def test_a_last_step_that_comes_during_a_look_is_not_missed():
    _, held = supply()
    held.__class__ = EndsWhileItIsAsked
    held.last = convert_batch(batch(0), options())
    builder = BlockBuilder(lambda: held, block_bytes=1)
    assert builder.facts().is_growing
    builder._look()
    assert (builder.facts().num_steps, builder.facts().is_growing) == (1, False)

    _, held = supply()
    builder = BlockBuilder(lambda: held, block_bytes=1)
    held.__class__ = EndsWhileItIsAsked
    held.last = convert_batch(batch(0), options())
    builder._look()
    assert builder.facts().is_growing
    builder._look()
    assert (builder.facts().num_steps, builder.facts().is_growing) == (1, False)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (batch(0, 3), "batch 0 has 3 rows, a step has 2"),
        ({"input_ids": np.ones((1, T), int), "seq_lens": np.ones((1, 3), int)}, "batch 0 has no supervised"),
    ],
)
def test_batches_that_make_no_step_are_refused(rows, message):
    made, _ = supply()
    with pytest.raises(ValueError, match=message):
        made.put(convert_batch(rows, options()))


def test_another_dp_size_is_refused():
    made, _ = supply()
    made.put(convert_batch(batch(0), options()))
    request = BlockRequest(place=place(dp_size=2), first_step=0, first_micro_batch=0, num_micro_batches=1)
    with pytest.raises(ValueError, match="dp_size=2: this feed holds steps for dp_size=1"):
        made.block(request)


def test_rows_are_laid_out_for_one_length_and_positions_must_restart():
    with pytest.raises(
        ValueError, match=r"row 1: its sequences, each padded to a multiple of 4, take 28 slots"
    ):
        convert_batch({"input_ids": np.ones((2, 30), int), "seq_lens": [[4], [25]]}, options())
    good = {**batch(0), "position_ids": np.zeros((ROWS, T), int)}
    for row, lengths in enumerate(good["seq_lens"].tolist()):
        good["position_ids"][row, : sum(lengths)] = np.concatenate([np.arange(n) for n in lengths])
    assert len(convert_batch(good, options())) == ROWS
    good["position_ids"][1] += 1
    with pytest.raises(ValueError, match="row 1: its position_ids do not restart"):
        convert_batch(good, options())
