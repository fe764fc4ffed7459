"""Streams share few blocks: what was sent is let go of at once, also by a stream that asks for no more."""

from ringfeed.pipeline.step_block import EncodedBlock
from ringfeed.workers.block_gate import BlockGate
from ringfeed.workers.flight_options import ServerOptions


class Elsewhere:
    """A builder that keeps none of the blocks that it gives, as one in another process."""

    def __init__(self, builder):
        self.builder = builder
        self.facts = builder.facts

    def block(self, request):
        return EncodedBlock.from_batch(self.builder.block(request).to_batch())


def test_more_streams_than_blocks_all_get_theirs(plan, serve, make_builder, load, assert_same_batches):
    gate = BlockGate(Elsewhere(make_builder()), most_blocks=2, wait_seconds=5)
    server = serve(ServerOptions(shared_bytes=0), supply=gate)
    places = [{"cp": (cp, 2), "dp": (dp, 4)} for cp in range(2) for dp in range(4)]
    loaders = [load(server.url, prefetch_bytes=8192, **place) for place in places]
    for loader, place in zip(loaders, places, strict=True):
        # Those before have all they asked for, and stay connected.
        assert_same_batches(loader, load(plan, layout="te", **place))
    assert server.num_streams == len(places)
    for loader in loaders:
        loader.close()
