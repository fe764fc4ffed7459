"""A batch owns its tensors: what is written into them reaches no other rank, file, cache or later batch."""

import pytest

from ringfeed.pipeline.local_fetcher import LocalFetcher
from ringfeed.pipeline.shm_files import SHARED_MEMORY
from ringfeed.workers.flight_options import ServerOptions


@pytest.fixture(params=["file", "stream", "local"])
def feed(request, serve, make_builder):
    """Return a function that gives a source over one builder, and a function for the files that ranks map."""
    builder = make_builder()
    if request.param == "local":
        return lambda: LocalFetcher(builder), lambda: {}
    server = serve(ServerOptions(shared_bytes=1 << 20 if request.param == "file" else 0), supply=builder)
    return lambda: server.url, lambda: contents(server)


def contents(server):
    folder = server._folder
    if folder is None:
        return {}
    files = {path.name: path.read_bytes() for path in (SHARED_MEMORY / folder.name).glob("block-*")}
    # By generation: the feeder itself may write one again at any moment.
    return {(name, content[:24]): content for name, content in files.items() if any(content[:24])}


@pytest.mark.parametrize("whole_steps", [False, True])
def test_what_is_written_into_every_tensor_changes_nothing_else(feed, plan, load, whole_steps):
    source, files = feed
    expected = list(batches(load(plan, layout="te"), whole_steps))
    with load(source(), prefetch_bytes=20_000) as writing, load(source(), prefetch_bytes=20_000) as reading:
        others = batches(reading, whole_steps)
        for number, batch in enumerate(batches(writing, whole_steps)):
            # What comes later was fetched before this is written, and so was the other rank's next batch.
            assert same(batch, expected[number])
            before = files()
            for tensor in batch.tensors.values():
                tensor.fill_(1)
            after = files()
            assert all(after[key] == content for key, content in before.items() if key in after)
            assert same(next(others), expected[number])
        # From the builder's cache, and from files that were written again.
        assert all(map(same, batches(load(source()), whole_steps), expected))


def test_tensors_of_two_batches_never_share_memory(feed, load):
    source, _ = feed
    with load(source()) as loader:
        batches = list(loader)
    kept = [tensor for batch in batches for tensor in batch.tensors.values()]
    assert len({tensor.untyped_storage().data_ptr() for tensor in kept}) == len(kept)
    assert all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in kept)


def batches(loader, whole_steps):
    return loader.steps() if whole_steps else iter(loader)


def same(batch, other):
    tensors = batch.tensors.items()
    return batch.info == other.info and all(tensor.equal(other.tensors[name]) for name, tensor in tensors)
