"""A source that keeps a rank waiting: saving, moving on and closing do not wait with it."""

import gc
import threading
import time
from itertools import islice

import pytest

LAST_READY = 2
"""Steps before this one come at once, the others never."""


class Stuck:
    """A real source of views whose later steps never come."""

    def __init__(self, source):
        self._source = source
        self.waits = threading.Semaphore(0)

    def __getattr__(self, name):
        return getattr(self._source, name)

    def wait_for(self, step, micro_batch, *, stop):
        if step < LAST_READY:
            return self._source.wait_for(step, micro_batch, stop=stop)
        self.waits.release()
        stop.wait()
        return False


@pytest.fixture
def stuck(run):
    """A loader whose later steps never come."""
    with run.load() as loader:
        loader._builder.source = Stuck(loader._builder.source)
        yield loader


def iterate(loader):
    """Return an iterator whose thread waits, and the batches before that."""
    batches = iter(loader)
    handed_out = list(islice(batches, LAST_READY * loader.num_micro_batches))
    assert loader._builder.source.waits.acquire(timeout=10)
    return batches, handed_out


def in_time(what):
    """Do ``what``, and fail if it takes longer than a machine that is merely busy."""
    begin = time.monotonic()
    result = what()
    assert time.monotonic() - begin < 5
    return result


def test_saving_does_not_wait_and_asks_the_source_nothing(stuck, run):
    _batches, _ = iterate(stuck)
    stuck._builder.source.chain = None

    state = in_time(stuck.state_dict)

    assert (state["step"], state["micro_batch"]) == (LAST_READY, 0)
    with run.load() as other:
        other.load_state_dict(state)
        assert next(iter(other)).info.step == LAST_READY


def test_a_state_can_be_loaded_and_iterated_meanwhile(stuck, run):
    _batches, handed_out = iterate(stuck)
    with run.load() as other:
        list(islice(other, other.num_micro_batches))
        state = other.state_dict()

    in_time(lambda: stuck.load_state_dict(state))

    again = in_time(lambda: next(iter(stuck)))
    assert again.info.digest == handed_out[stuck.num_micro_batches].info.digest


def test_closing_ends_the_wait(stuck):
    batches, _ = iterate(stuck)

    in_time(stuck.close)

    with pytest.raises((StopIteration, RuntimeError)):
        next(batches)


def test_a_dropped_iteration_ends_its_wait(stuck):
    before = set(threading.enumerate())
    batches, _ = iterate(stuck)
    waiting = set(threading.enumerate()) - before
    assert waiting

    del batches
    gc.collect()

    for thread in waiting:
        thread.join(timeout=5)
        assert not thread.is_alive()
