"""A rank that is slow, or that leaves without a word, costs what was agreed and no more."""

import subprocess
import sys
import time
from typing import Any

import pytest

from ringfeed.workers.flight_options import ServerOptions

LEAVE = """
import sys
from ringfeed.pipeline.loader import Loader
loader = Loader(sys.argv[1], dp_rank=0, dp_size=2, cp_rank=0, cp_size=2)
next(iter(loader))
"""


@pytest.mark.parametrize("shared_bytes", [0, 1 << 20])
def test_a_slow_rank_holds_no_more_than_its_budget(serve, plan, load, assert_same_batches, shared_bytes):
    server = serve(ServerOptions(shared_bytes=shared_bytes))
    found: list[Any] = []
    held, in_files = [0], [0]
    with load(server.url, prefetch_bytes=10_000) as loader:
        for batch in loader:
            found.append(batch)
            time.sleep(0.01)
            held.append(loader._source.bytes_held)
            in_files.append(server._folder.bytes_held if server._folder else 0)
    assert 0 < max(held) <= 5_000
    # A file goes with the next message after its block.
    assert max(in_files) <= 10_000
    assert (max(in_files) > 0) == (shared_bytes > 0)
    assert_same_batches(found, load(plan, layout="te"))


def test_a_rank_that_ends_without_closing_ends_well(serve, eventually):
    server = serve()
    ended = subprocess.run(
        [sys.executable, "-c", LEAVE, server.url], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    eventually(lambda: not server.num_streams)
    assert server._folder.bytes_held == 0
