"""The conversion's plain state: who gets what, what comes out when, and what a death costs."""

import numpy as np
import pytest

from ringfeed.pipeline.executor import JobFailedError
from ringfeed.workers.convert_queue import ConvertQueue, QueueLimits
from ringfeed.workers.convert_starts import StartRules, WorkerStarts


def queue(**changes):
    limits = {"window_bytes": 1000, "window_batches": 8, "batches_per_worker": 2, "max_deaths": 3}
    return ConvertQueue(QueueLimits(**{**limits, **changes}))


def take_in(made, count, num_bytes=1):
    for _ in range(count):
        made.put(f"batch {made.num_taken_in}", num_bytes=num_bytes)


def assign_all(made):
    return list(iter(made.assign, None))


def test_batches_go_to_who_has_the_least_and_no_worker_gets_more_than_its_share():
    made = queue()
    take_in(made, 6)
    assert made.assign() is None
    made.add_worker("a")
    made.add_worker("b")

    tries = assign_all(made)

    assert [(task.index, task.worker) for task in tries] == [(0, "a"), (1, "b"), (2, "a"), (3, "b")]
    assert tries[2].batch == "batch 2"


def test_results_come_out_in_input_order():
    made = queue()
    take_in(made, 3)
    made.end()
    made.add_worker("a")
    made.add_worker("b")
    first, second, third = assign_all(made)

    made.finish(third, "result 2")
    made.finish(second, "result 1")
    assert made.peek() == []
    made.finish(first, "result 0")
    for expected in ("result 0", "result 1", "result 2"):
        assert made.peek() == [expected]
        made.pop()
    assert made.is_drained


def test_the_window_is_bounded_in_batches_and_in_bytes():
    made = queue(window_batches=3)
    take_in(made, 3)
    assert not made.has_room

    made = queue(window_bytes=100)
    take_in(made, 1, num_bytes=99)
    assert made.has_room
    take_in(made, 1, num_bytes=5000)
    assert not made.has_room
    assert made.bytes_held == 5099


def test_what_a_lost_worker_had_is_given_to_others_first():
    made = queue()
    take_in(made, 5)
    made.add_worker("a")
    made.add_worker("b")
    tries = assign_all(made)
    made.lose_worker("a", reason="killed")
    made.finish(tries[0], "from the dead")
    assert made.peek() == []

    made.add_worker("c")

    assert [(task.index, task.worker, task.attempt) for task in assign_all(made)] == [
        (0, "c", 2),
        (2, "c", 2),
    ]


def test_a_batch_that_kills_worker_after_worker_is_an_error_that_names_it():
    made = queue()
    take_in(made, 2)
    for number in range(3):
        made.add_worker(f"worker {number}")
        assert [task.index for task in assign_all(made)] == [0, 1]
        made.lose_worker(f"worker {number}", reason="out of memory")

    with pytest.raises(JobFailedError, match=r"batch 0: 3 workers in a row died over it \(out of memory\)"):
        made.peek()


def test_a_bad_batch_is_told_at_its_place():
    made = queue()
    take_in(made, 1)
    made.put_error(ValueError("batch 1: no seq_lens"))
    take_in(made, 1)
    made.add_worker("a")
    first, third = assign_all(made)
    made.fail(third, ValueError("batch 2: damaged"))
    made.finish(first, "result")

    assert made.peek() == ["result"]
    made.pop()
    with pytest.raises(ValueError, match="batch 1: no seq_lens"):
        made.peek()


def test_an_error_of_the_input_comes_after_all_results():
    made = queue()
    take_in(made, 1)
    made.end(OSError("disk"))
    made.add_worker("a")
    made.finish(made.assign(), "result")

    assert made.peek() == ["result"]
    assert not made.has_room
    made.pop()
    with pytest.raises(OSError, match="disk"):
        made.peek()


def test_a_lost_result_is_made_again_and_not_for_ever():
    made = queue()
    take_in(made, 1)
    made.add_worker("a")
    for _ in range(2):
        made.finish(made.assign(), "result")
        made.redo()
        assert made.peek() == []
    made.finish(made.assign(), "result")
    made.redo()
    with pytest.raises(JobFailedError, match="its result was lost 3 times"):
        made.peek()


@pytest.mark.parametrize("seed", range(20))
def test_nothing_is_lost_or_doubled_whoever_dies(seed):
    dice = np.random.default_rng(seed)
    made = queue(window_batches=5, max_deaths=50)
    alive: list[str] = []
    out, running, names = [], [], 0
    for _ in range(10_000):
        if made.is_drained:
            break
        if made.has_room:
            made.end() if made.num_taken_in == 40 else take_in(made, 1)
        if len(alive) < 3 and dice.random() < 0.5:
            names += 1
            alive.append(f"worker {names}")
            made.add_worker(alive[-1])
        running += assign_all(made)
        if alive and dice.random() < 0.1:
            made.lose_worker(alive.pop(dice.integers(len(alive))), reason="killed")
        if running:
            done = running.pop(dice.integers(len(running)))
            made.finish(done, done.batch.replace("batch", "result"))
        for result in made.peek():
            out.append(result)
            made.pop()

    assert out == [f"result {i}" for i in range(40)]


@pytest.mark.parametrize("field", ["window_bytes", "window_batches", "batches_per_worker", "max_deaths"])
def test_a_limit_below_one_is_refused(field):
    with pytest.raises(ValueError, match=f"{field}=0 must be at least 1"):
        queue(**{field: 0})


def start_all(starts, now):
    for _ in range(count := starts.due(now)):
        starts.started()
    return count


def test_dead_workers_are_replaced_after_delays_that_grow():
    starts = WorkerStarts(StartRules(num_workers=2, first_delay=1.0, longest_delay=3.0))
    assert start_all(starts, 0.0) == 2
    assert starts.seconds_to_wait(0.0) is None

    now = 10.0
    delays: list[float] = []
    for _ in range(4):
        starts.died(now, was_ready=True, reason="killed")
        delays.append(starts.seconds_to_wait(now) or 0.0)
        assert starts.due(now + delays[-1] - 0.01) == 0
        now += delays[-1]
        assert start_all(starts, now) == 1
    assert delays == [1.0, 2.0, 3.0, 3.0]
    assert starts.num_restarts == 4


def test_a_calm_while_makes_the_next_death_a_first_one():
    starts = WorkerStarts(StartRules(num_workers=1, first_delay=1.0, calm_seconds=10.0))
    start_all(starts, 0.0)
    for now in (0.0, 5.0):
        starts.died(now, was_ready=True, reason="killed")
        start_all(starts, now + 4.0)
    starts.died(100.0, was_ready=True, reason="killed")

    assert starts.seconds_to_wait(100.0) == 1.0


def test_workers_that_are_never_ready_are_an_error():
    starts = WorkerStarts(StartRules(num_workers=1, max_failed_starts=2))
    start_all(starts, 0.0)
    starts.died(1.0, was_ready=False, reason="no module")
    start_all(starts, 9.0)
    starts.became_ready()
    starts.died(10.0, was_ready=True, reason="killed")
    start_all(starts, 20.0)
    starts.died(21.0, was_ready=False, reason="no module")
    start_all(starts, 30.0)
    with pytest.raises(JobFailedError, match="2 workers in a row died before they were ready: no module"):
        starts.died(31.0, was_ready=False, reason="no module")
