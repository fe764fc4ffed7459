"""How batches come: ahead but bounded, from a thread that ends, with errors as themselves."""

import gc
import threading
import time
from itertools import islice
from pathlib import Path

import pytest
import torchdata.nodes

from ringfeed.pipeline.manifest import CorruptDataError


def places(batches):
    return [(batch.info.step, batch.info.micro_batch) for batch in batches]


def num_threads_after(seconds=3.0, *, at_most):
    """Wait until at most so many threads are left, and return how many are."""
    end = time.monotonic() + seconds
    while threading.active_count() > at_most and time.monotonic() < end:
        time.sleep(0.01)
    return threading.active_count()


class Counting:
    """A real source of views that counts what it was asked for."""

    def __init__(self, source):
        self._source = source
        self.num_views = 0

    def __getattr__(self, name):
        return getattr(self._source, name)

    def rank_view(self, step, pack, *, cp_rank):
        self.num_views += 1
        return self._source.rank_view(step, pack, cp_rank=cp_rank)


def counted(loader):
    counting = Counting(loader._builder.source)
    loader._builder.source = counting
    return counting


@pytest.mark.parametrize("budget", [1, 3, 5])
def test_never_builds_further_ahead_than_the_budget(run, budget):
    view_bytes = run.load()._builder.batch_bytes(8)
    loader = run.load(prefetch_bytes=budget * view_bytes + 7)
    counting = counted(loader)

    batches = iter(loader)
    for handed_out in range(4):
        end = time.monotonic() + 2
        while counting.num_views < handed_out + budget and time.monotonic() < end:
            time.sleep(0.005)
        time.sleep(0.03)
        assert counting.num_views == handed_out + budget
        next(batches)


def test_one_batch_is_built_ahead_whatever_the_budget(run):
    assert places(run.load(prefetch_bytes=0)) == places(run.load())


def test_batch_bytes_bound_what_a_batch_holds(run):
    for columns in (None, ["input_ids", "padding_mask", "cu_seqlens"]):
        loader = run.load(columns=columns, cp_size=2, packs_per_chunk=2)
        bound = loader._builder.batch_bytes(8)
        held = [sum(tensor.nbytes for tensor in batch.tensors.values()) for batch in loader]
        assert bound * 0.8 < max(held) <= bound


@pytest.mark.parametrize("end", ["break", "drop", "steps", "finish", "load", "close"])
def test_the_thread_ends_with_the_iteration(run, end):
    gc.collect()
    before = threading.active_count()
    loader = run.load(dp_size=2)

    if end == "break":
        for _ in loader:
            assert threading.active_count() == before + 1
            break
    elif end == "drop":
        batches = iter(loader)
        next(batches)
        del batches
    elif end == "steps":
        for _ in loader.steps():
            break
    elif end == "finish":
        list(loader)
    else:
        batches = iter(loader)
        next(batches)
        loader.close() if end == "close" else loader.load_state_dict(loader.state_dict())

    assert num_threads_after(at_most=before) == before


def test_iteration_goes_on_after_a_break(run):
    loader = run.load(dp_size=2)
    first = places(islice(loader, 3))

    assert first + places(loader) == places(run.load(dp_size=2))
    assert list(loader) == []


def test_an_overtaken_iteration_says_so(run):
    loader = run.load(dp_size=2)
    early = iter(loader)
    next(early)
    late = iter(loader)

    assert places([next(late)]) == [(0, 1)]
    with pytest.raises(RuntimeError, match="this iteration was overtaken"):
        next(early)
    assert places([next(late)]) == [(0, 2)]


def test_a_loaded_state_overtakes_the_iteration(run):
    loader = run.load(dp_size=2)
    state = loader.state_dict()
    batches = iter(loader)
    next(batches)

    loader.load_state_dict(state)

    with pytest.raises(RuntimeError, match="a state was loaded"):
        next(batches)
    assert places(islice(loader, 1)) == [(0, 0)]


def test_a_closed_loader_gives_nothing_more(run):
    with run.load() as loader:
        next(iter(loader))
    with pytest.raises(ValueError, match="the loader is closed; open a new one"):
        next(iter(loader))
    loader.close()


def test_a_dropped_loader_gives_its_files_back(run, shards):
    def num_open():
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    before = num_open()
    for source in (shards(), run.plan):
        batches = iter(run.load(source=source, cp_size=2))
        next(batches)
        # The iteration lives on without the loader that it came from.
        gc.collect()
        next(batches)
        del batches
        end = time.monotonic() + 3
        while num_open() > before and time.monotonic() < end:
            time.sleep(0.01)
        assert num_open() == before


def test_errors_reach_the_consumer_as_themselves(run):
    loader = run.load(dp_size=2)
    counting = counted(loader)
    error = CorruptDataError("tokens-00000.arrow is damaged")

    def broken(step, pack, *, cp_rank):
        if step == 1:
            raise error
        return counting._source.rank_view(step, pack, cp_rank=cp_rank)

    counting.rank_view = broken
    got = []
    with pytest.raises(CorruptDataError) as caught:
        got.extend(loader)

    assert caught.value is error
    assert loader.state_dict()["step"] == 1
    # The loader stands before the damage and meets it again: it never passes over it.
    with pytest.raises(CorruptDataError):
        next(iter(loader))


def test_is_a_node_of_a_torchdata_graph(run):
    everything = places(run.load(dp_size=2))
    graph = torchdata.nodes.Loader(
        torchdata.nodes.Batcher(run.load(dp_size=2).node(), batch_size=2), restart_on_stop_iteration=False
    )

    got = [places(pair) for pair in graph]

    assert got == [everything[i : i + 2] for i in range(0, len(everything), 2)]


def test_a_graph_resumes_from_its_state(run):
    everything = places(run.load(dp_size=2))

    def graph():
        return torchdata.nodes.Loader(run.load(dp_size=2).node(), restart_on_stop_iteration=False)

    first = graph()
    got = places(islice(first, 6))
    second = graph()
    second.load_state_dict(first.state_dict())

    assert got + places(second) == everything
    # A graph without a state starts over, as torchdata's nodes do.
    assert places(second) == everything


def test_a_node_moves_no_loader(run):
    loader = run.load(dp_size=2)
    node = loader.node()
    places(islice(node, 3))

    assert loader.state_dict()["micro_batch"] == 0
    loader.load_state_dict(node.state_dict())
    assert places(islice(loader, 1)) == [(0, 3)]
