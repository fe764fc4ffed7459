"""Compare the ways from a feeder to a rank with the least that each could cost.

Run:   OMP_NUM_THREADS=1 python benchmarks/bench_flight.py
Read:  one JSON line per case. ``flight``: blocks of 8 MB through ``FlightFetcher``, from a server in a
       process of its own, beside a bare ``DoExchange`` of the same batches from that process: medians of
       both rates over passes that alternate, and one over the other; the goal is 0.85. ``shared``: blocks
       of 16 or 64 MB in files under ``/dev/shm``, opened by their notes and copied into a torch tensor,
       beside a copy of as many bytes from the heap into that tensor; the goal is 0.8. What the feeder does
       before (one copy into the file) is not in it. Blocks hold int32 ids and labels, as a rank with
       ``token_dtype=torch.int32`` keeps them.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pyarrow as pa
import pyarrow.flight as fl
import torch

from ringfeed.pipeline.block_fetcher import FeedQuestion
from ringfeed.pipeline.feed_facts import FeedFacts
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS, BlockRequest
from ringfeed.pipeline.flight_client import open_fetcher
from ringfeed.pipeline.opening import ViewSpec
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.shm_files import BlockFolder
from ringfeed.pipeline.shm_slots import SlotMaps, SlotNote, SlotPool
from ringfeed.pipeline.step_block import TOKEN_COLUMNS, BlockRows, EncodedBlock, encode_block
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.flight_options import ServerOptions
from ringfeed.workers.flight_server import FlightServer

BLOCK_BYTES = 8 << 20
BLOCKS, AHEAD, PASSES = 16, 4, 15
FILES = 4
PLACE = RankPlace(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1)
REQUEST = BlockRequest(place=PLACE, first_step=0, first_micro_batch=0, num_micro_batches=1)


class Prebuilt:
    """Has one block of ``BLOCK_BYTES`` ready, whatever it is asked for."""

    def __init__(self, size: int = BLOCK_BYTES) -> None:
        """Make the block."""
        tokens = size // 8
        spec = ViewSpec(layout=make_layout("te"), cp_size=1, pack_slots=tokens, multiple=1, pad_id=0)
        self._facts = FeedFacts(
            recipe_fingerprint="bench",
            spec=spec,
            overlay_digest="",
            packs_per_step=1,
            slate_size=1,
            sources=("bench",),
            num_documents=1,
            local_tokens=tokens,
            block_bytes=size,
            num_steps=1 << 20,
            max_slots=1,
        )
        ids = np.random.default_rng(0).integers(0, 50_000, tokens, dtype=np.int32)
        one = np.array([0, 1])
        rows = BlockRows(
            piece_offsets=one,
            documents=one[:1],
            starts=one[:1],
            lengths=one[1:] * tokens,
            skipped=np.zeros(1, dtype=np.bool_),
            token_offsets=one * tokens,
            input_ids=ids,
            labels=ids[::-1].copy(),
            local_supervised=one[1:] * tokens,
        )
        self.made = encode_block(REQUEST, rows, shares=(), facts=self._facts)

    def facts(self) -> FeedFacts:
        """Return the facts of a run of one pack a step."""
        return self._facts

    def block(self, request: BlockRequest) -> EncodedBlock:  # noqa: ARG002
        """Return the block."""
        return self.made


class Bare(fl.FlightServerBase):  # type: ignore[misc]
    """Sends a batch for each message that comes: the least that a stream of blocks costs."""

    def __init__(self, batch: pa.RecordBatch) -> None:
        """Listen on a free port."""
        super().__init__("grpc+tcp://127.0.0.1:0")
        self._batch = batch

    def do_exchange(self, context: Any, descriptor: Any, reader: Any, writer: Any) -> None:  # noqa: ARG002
        """Answer until the client has done."""
        writer.begin(self._batch.schema)
        for _ in reader:
            writer.write_batch(self._batch)


def serve() -> None:
    """Child process: both servers, until standard input ends."""
    supply = Prebuilt()
    bare = Bare(supply.made.rows)
    with FlightServer(supply, ServerOptions(shared_bytes=0)) as server:
        print(json.dumps([server.url, bare.port]), flush=True)
        sys.stdin.read()
    os._exit(0)


def bare_seconds(port: int) -> float:
    """Return the time of all blocks over a bare stream, as many asked for ahead as the fetcher has."""
    with fl.FlightClient(f"grpc+tcp://127.0.0.1:{port}") as client:
        writer, reader = client.do_exchange(fl.FlightDescriptor.for_command(b"bare"))
        for _ in range(AHEAD):
            writer.write_metadata(b"next")
        reader.read_chunk()
        began = time.perf_counter()
        for number in range(1, BLOCKS + 1):
            if number <= BLOCKS + 1 - AHEAD:
                writer.write_metadata(b"next")
            assert reader.read_chunk().data.nbytes >= BLOCK_BYTES
        seconds = time.perf_counter() - began
        writer.close()
        return seconds


def fetcher_seconds(url: str) -> float:
    """Return the time of as many blocks through the fetcher."""
    fetcher = open_fetcher(url, FeedQuestion(place=PLACE, columns=BLOCK_COLUMNS))
    waiting = deque(fetcher.fetch(REQUEST) for _ in range(AHEAD))
    waiting.popleft().result()
    began = time.perf_counter()
    for number in range(1, BLOCKS + 1):
        if number <= BLOCKS + 1 - AHEAD:
            waiting.append(fetcher.fetch(REQUEST))
        assert waiting.popleft().result().rows.nbytes >= BLOCK_BYTES
    seconds = time.perf_counter() - began
    fetcher.close()
    return seconds


def measure_flight() -> dict[str, Any]:
    """Alternate between the two ways."""
    child = subprocess.Popen(
        [sys.executable, __file__, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    url, port = json.loads(child.stdout.readline())
    bare_seconds(port)
    fetcher_seconds(url)
    pairs = [(bare_seconds(port), fetcher_seconds(url)) for _ in range(PASSES)]
    child.communicate()
    rates = [[BLOCKS * BLOCK_BYTES / seconds / 1e9 for seconds in side] for side in zip(*pairs, strict=True)]
    return {
        "case": "flight",
        "block_mb": BLOCK_BYTES >> 20,
        "bare_gb_per_s": round(statistics.median(rates[0]), 3),
        "fetcher_gb_per_s": round(statistics.median(rates[1]), 3),
        "of_bare": round(statistics.median(rates[1]) / statistics.median(rates[0]), 3),
        "goal": 0.85,
    }


def measure_shared(size: int) -> dict[str, Any]:
    """Map and copy blocks, beside a copy of as many bytes. CPU time: nothing here waits for anybody.

    Both ways fill one warm torch tensor from ``FILES`` places in turn, together past the last-level cache,
    that were written once before: files of a rank's pool, and arrays on the heap.
    """
    folder = BlockFolder(budget=1 << 30)
    pool, maps = SlotPool(folder), SlotMaps(folder.name)
    block = Prebuilt(size).made
    notes = [note for _ in range(FILES) if (note := pool.write(block)) is not None]
    heap = [[block.rows.column(name).values.to_numpy().copy() for name in TOKEN_COLUMNS] for _ in notes]
    staging = torch.full((2, size // 8), -1, dtype=torch.int32).numpy()
    ratios, rates = [], []
    for number in range(-len(notes), 4 * PASSES):
        began = time.process_time()
        for row, values in enumerate(heap[number % FILES]):
            np.copyto(staging[row], values)
        between = time.process_time()
        copy_mapped(maps, notes[number % FILES], staging)
        ended = time.process_time()
        if number < 0:
            # Checked, and not counted: the first time a file is mapped.
            assert all(np.array_equal(row, values) for row, values in zip(staging, heap[0], strict=True))
            staging[:] = -1
            continue
        ratios.append((between - began) / (ended - between))
        rates.append(size / (ended - between) / 1e9)
    folder.close()
    return {
        "case": "shared",
        "block_mb": size >> 20,
        "gb_per_cpu_s": round(statistics.median(rates), 2),
        "of_memcpy": round(statistics.median(ratios), 3),
        "of_memcpy_min": round(min(ratios), 3),
        "of_memcpy_max": round(max(ratios), 3),
        "goal": 0.8,
    }


def copy_mapped(maps: SlotMaps, note: SlotNote, staging: Any) -> None:
    """Do what a rank does with a note: map the block, copy its tokens, let go of it."""
    rows = maps.open(note, on_release=_nothing).rows
    for row, column in enumerate(TOKEN_COLUMNS):
        np.copyto(staging[row], rows.column(column).values.to_numpy())


def _nothing() -> None:
    """Take no notice."""


def main() -> None:
    """Run all cases."""
    if sys.argv[1:] == ["serve"]:
        serve()
        return
    for report in (measure_flight(), measure_shared(16 << 20), measure_shared(64 << 20)):
        facts = {
            "threads": 1,
            "pyarrow": pa.__version__,
            "machine": platform.processor() or platform.machine(),
        }
        print(json.dumps({**report, **facts}), flush=True)


if __name__ == "__main__":
    main()
