"""Blocks that are ready, over all streams: a budget that is kept, and nobody who starves."""

import threading
import time

from ringfeed.workers.flight_budget import ReadyBudget


def test_a_stream_that_has_nothing_may_always_get_one_and_more_within_the_budget():
    budget = ReadyBudget(100)
    assert budget.enter("a", 60, timeout=0)
    assert not budget.enter("a", 60, timeout=0.01)
    assert budget.enter("a", 40, timeout=0)
    assert budget.enter("b", 1000, timeout=0)
    assert not budget.enter("b", 1, timeout=0.01)
    assert budget.bytes_ready == 1100
    budget.forget("b")
    budget.leave("a")
    assert budget.bytes_ready == 40
    assert budget.enter("a", 60, timeout=0)
    budget.forget("a")
    assert budget.bytes_ready == 0
    budget.leave("a")


def test_whoever_waits_gets_room_as_soon_as_there_is_and_in_turn():
    budget = ReadyBudget(100)
    for stream in ("a", "b", "c"):
        assert budget.enter(stream, 30, timeout=0)
    order: list[str] = []

    def enter(stream, size):
        assert budget.enter(stream, size, timeout=20)
        order.append(stream)

    threads = []
    for stream, size in (("b", 60), ("c", 5)):
        threads.append(threading.Thread(target=enter, args=(stream, size)))
        threads[-1].start()
        until_waiting(budget, len(threads))
    # There is room for the small one, and the large one came first.
    assert order == []
    budget.forget("a")
    time.sleep(0.1)
    assert order == []
    budget.leave("c")
    for thread in threads:
        thread.join(timeout=20)
    assert sorted(order) == ["b", "c"]
    # c had nothing: it did not have to wait for its turn.
    assert budget.bytes_ready == 30 + 60 + 5


def test_a_stream_that_asks_again_keeps_its_place():
    budget = ReadyBudget(100)
    for stream in ("a", "b", "c"):
        assert budget.enter(stream, 30, timeout=0)
    assert not budget.enter("a", 60, timeout=0.01)
    assert not budget.enter("b", 20, timeout=0.01)
    budget.forget("c")
    assert not budget.enter("b", 20, timeout=0.01)
    budget.leave("b")
    assert budget.enter("b", 20, timeout=0)
    budget.forget("b")
    assert budget.enter("a", 60, timeout=0)


def test_a_stream_that_is_over_waits_no_more():
    budget = ReadyBudget(100)
    for stream in ("a", "b"):
        assert budget.enter(stream, 40, timeout=0)
    assert not budget.enter("a", 60, timeout=0.01)
    budget.forget("a")
    assert budget.enter("b", 60, timeout=0)


def until_waiting(budget, count):
    until = time.monotonic() + 60
    while len(budget._waiting) < count:
        assert time.monotonic() < until
        time.sleep(0.001)
