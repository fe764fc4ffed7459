"""Conversion on a real Ray: same bytes in the same order, whoever dies, in bounded memory."""

import hashlib
import os
import signal
import threading
import time
from contextlib import suppress
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch
from ray.exceptions import RayError

from ringfeed.pipeline.config import ConvertConfig
from ringfeed.pipeline.conversion import ConvertOptions, convert_batch, numpy_batch
from ringfeed.pipeline.executor import JobFailedError
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.progress import SilentProgress
from ringfeed.pipeline.verify import verify
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers import convert, convert_feed, convert_pool
from ringfeed.workers.convert_actor import ConvertActor
from ringfeed.workers.convert_files import run_convert
from ringfeed.workers.ray_session import ray_session

pytestmark = pytest.mark.ray

WIDTH = 64


@pytest.fixture(scope="module", autouse=True)
def local_ray():
    with ray_session(num_cpus=2, object_store_bytes=256 << 20) as session:
        yield session


@pytest.fixture
def pools(monkeypatch):
    """The pools that conversions make, so that a test can find the actors to kill."""
    made = []

    class Noted(convert_pool.ConvertPool):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            made.append(self)

    monkeypatch.setattr(convert_pool, "ConvertPool", Noted)
    return made


def batch(index, num_rows=4, width=WIDTH):
    rng = np.random.default_rng(index)
    lengths = rng.integers(1, width // 3 + 1, (num_rows, 3))
    return {
        "input_ids": torch.from_numpy(rng.integers(0, 1000, (num_rows, width))),
        "seq_lens": torch.from_numpy(lengths),
    }


def batches(count, pulled=None, **shape):
    for index in range(count):
        if pulled is not None:
            pulled.append(index)
        yield batch(index, **shape)


def serially(given, *, layout="te", **options):
    made = ConvertOptions(**{"layout": make_layout(layout), "cp_size": 2, **options})
    return [views for entry in given for views in convert_batch(numpy_batch(entry), made)]


def digest(views):
    hasher = hashlib.sha256()
    for view in views:
        for name, array in view.tensors.items():
            hasher.update(f"{name} {array.dtype} {array.shape}".encode())
            hasher.update(array.tobytes())
        hasher.update(view.documents.tobytes())
    return hasher.hexdigest()


def digests(chunks):
    return [digest(views) for views in chunks]


def test_500_batches_with_their_actors_killed_come_out_as_if_nothing_had_happened(pools):
    expected = digests(serially(batches(500), num_chunks=2))
    found, kills = [], 0
    for views in convert(batches(500), cp_size=2, layout="te", num_chunks=2, workers=2):
        found.append(digest(views))
        (pool,) = pools
        if kills < 6 and len(found) >= 120 * (kills + 1) and pool.actors:
            kill(pool.actors[0], by_signal=kills % 2 == 0)
            kills += 1

    assert found == expected
    # The last ones may have died too late for another to be needed.
    assert kills == 6


def kill(actor, *, by_signal):
    if by_signal:
        os.kill(ray.get(actor.pid.remote()), signal.SIGKILL)
    else:
        ray.kill(actor)


def test_another_layout_gives_the_bytes_of_one_process():
    layout = "magi"
    chunks = convert(batches(3, width=1024), cp_size=2, layout=layout, num_chunks=4, pad_id=7)

    assert digests(chunks) == digests(serially(batches(3, width=1024), layout=layout, num_chunks=4, pad_id=7))


def test_views_are_the_users_own():
    (first, second), (third, _) = convert(batches(2, width=1 << 16), cp_size=2, layout="te")
    before = digest([second, third])

    for array in first.tensors.values():
        array[:] = 77 if array.dtype != bool else True

    assert digest([second, third]) == before
    assert digests(convert(batches(1, width=1 << 16), cp_size=2, layout="te")) == digests(
        serially(batches(1, width=1 << 16))
    )


def test_two_conversions_at_once_do_not_wait_for_each_other():
    left = convert(batches(8), cp_size=2, layout="te")
    right = convert(batches(8), cp_size=2, layout="te", pad_id=5)

    pairs = list(zip(left, right, strict=True))
    assert digests(pair[0] for pair in pairs) == digests(serially(batches(8)))
    assert digests(pair[1] for pair in pairs) == digests(serially(batches(8), pad_id=5))


def test_a_data_loader_is_an_iterable():
    loader: Any = torch.utils.data.DataLoader(
        [{name: tensor[0] for name, tensor in batch(i).items()} for i in range(6)],  # type: ignore[arg-type]
        batch_size=3,
    )

    assert digests(convert(loader, cp_size=2, layout="te")) == digests(serially(loader))


# Ray warns of options of its own that nobody set.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_ray_dataset_of_batches_and_one_of_rows():
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    given = [numpy_batch(batch(i)) for i in range(6)]
    whole = ray.data.from_items(given, override_num_blocks=3)
    rows = ray.data.from_items(
        [{name: array[row] for name, array in entry.items()} for entry in given for row in range(4)],
        override_num_blocks=2,
    )

    def late_first(row):
        time.sleep(2 * bool((row["input_ids"] == given[0]["input_ids"]).all()))
        return row

    expected = digests(serially(given, num_chunks=2))
    assert digests(convert(whole.map(late_first), cp_size=2, layout="te", num_chunks=2)) == expected
    pairs = [{name: array[i : i + 2] for name, array in entry.items()} for entry in given for i in (0, 2)]
    expected = digests(serially(pairs, num_chunks=2))
    assert digests(convert(rows, cp_size=2, layout="te", num_chunks=2)) == expected
    assert not rows.context.execution_options.preserve_order


def test_a_slow_consumer_stops_the_input():
    pulled: list[int] = []
    window = 4 << 20
    shape = {"num_rows": 1, "width": 1 << 15}
    chunks = convert(batches(200, pulled, **shape), cp_size=2, layout="te", window_bytes=window, workers=2)
    size = (8 + 13) * (1 << 15)
    for taken in range(1, 40):
        next(chunks)
        if taken % 10 == 0:
            time.sleep(0.3)
        assert (len(pulled) - taken) * size <= window + size
    chunks.close()

    assert len(pulled) < 60


def test_dropping_the_iterator_ends_the_actors(pools):
    chunks = convert(batches(1000), cp_size=2, layout="te", workers=2)
    next(chunks)
    pids = [ray.get(actor.pid.remote()) for actor in pools[0].actors]
    assert pids
    del chunks

    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert pools[0].actors == []


def is_alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_bad_batch_is_told_by_its_index_after_those_before_it():
    def some_bad():
        yield batch(0)
        yield {**batch(1), "seq_lens": torch.full((4, 3), WIDTH)}

    chunks = convert(some_bad(), cp_size=2, layout="te")
    assert digest(next(chunks)) == digest(serially([batch(0)])[0])
    with pytest.raises(ValueError, match=r"^batch 1: row 0: seq_lens sums to 192, input_ids has 64"):
        next(chunks)
    with pytest.raises(ValueError, match=r"^batch 0: the batch has no input_ids"):
        next(convert([{"tokens": [1]}], cp_size=2, layout="te"))


def test_an_error_of_the_input_is_raised_as_it_is():
    def broken():
        yield batch(0)
        raise OSError("the disk is gone")

    chunks = convert(broken(), cp_size=2, layout="te")
    next(chunks)
    with pytest.raises(OSError, match="the disk is gone"):
        next(chunks)


def test_a_batch_that_ends_every_process_it_meets_is_an_error(monkeypatch):
    class DeadlyActor(ConvertActor):
        def convert(self, batch):
            if batch["input_ids"].shape[1] == 2 * WIDTH:
                os._exit(1)
            return super().convert(batch)

    monkeypatch.setattr(convert_pool, "ConvertActor", DeadlyActor)
    given = [batch(0), batch(1, width=2 * WIDTH), batch(2)]
    chunks = convert(given, cp_size=2, layout="te", workers=1)

    assert digest(next(chunks)) == digest(serially(given)[0])
    with pytest.raises(JobFailedError, match=r"batch 1: 5 workers in a row died over it"):
        next(chunks)


def test_files_of_rows_become_shards_that_hold_the_same_views(tmp_path):
    rows = [
        {name: array[row].tolist() for name, array in filled(i).items()} for i in range(3) for row in (0, 1)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    asked = {"sources": (tmp_path / "rows.parquet",), "output": tmp_path / "out"}
    config = ConvertConfig(**{**asked, "cp": 2, "layout": "te", "pad_id": 7})

    report = run_convert(config, progress=SilentProgress())

    assert (report.num_rows, report.pack_tokens, report.shards.num_steps) == (6, WIDTH, 6)
    assert verify(tmp_path / "out").findings == ()
    whole = {name: np.concatenate([filled(i)[name] for i in range(3)]) for name in filled(0)}
    expected = serially([whole], num_chunks=6, pad_id=7)
    for rank in range(2):
        loader = Loader(tmp_path / "out", dp_rank=0, dp_size=1, cp_rank=rank, cp_size=2)
        for found, views in zip(loader, expected, strict=True):
            for name, array in views[rank].tensors.items():
                assert found.tensors[name].tolist() == array.tolist()
    again = run_convert(config, progress=SilentProgress())
    assert again.shards.num_folders_written == 0


def filled(index):
    """Two rows whose slots fill them, as NeMo packs; some labels are left out."""
    rng = np.random.default_rng(index)
    ids = rng.integers(1, 1000, (2, WIDTH))
    slots = np.array([[24, 32, 8], [16, 24, 24]])
    lengths = slots - rng.integers(0, 4, slots.shape)
    labels = np.full((2, WIDTH), -100)
    for row in range(2):
        starts = np.cumsum(slots[row]) - slots[row]
        for start, length in zip(starts.tolist(), lengths[row].tolist(), strict=True):
            labels[row, start : start + length - 1] = ids[row, start + 1 : start + length]
    labels[:, ::5] = -100
    return {"input_ids": ids, "labels": labels, "seq_lens": lengths, "seq_lens_padded": slots}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "nothing"}, "nothing"),
        ({"num_chunks": 0}, "num_chunks=0"),
        ({"workers": 0}, "workers=0"),
        ({"window_bytes": 0}, "window_bytes=0"),
    ],
)
def test_wrong_arguments_are_told_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        convert([], **{"cp_size": 2, "layout": "te", **options})


def test_what_is_no_iterable_is_told_at_once():
    with pytest.raises(TypeError):
        convert(3, cp_size=2, layout="te")  # type: ignore[arg-type]


def ranks_of(feed, *, dp_size=1, **options):
    """What each rank of a feed reads: (step, micro-batch, tensors), by (dp rank, cp rank)."""
    found: dict[tuple[int, int], list[Any]] = {}

    def read(dp_rank, cp_rank):
        place = {"dp_rank": dp_rank, "dp_size": dp_size, "cp_rank": cp_rank, "cp_size": 2}
        loader = Loader(feed.url, **place, **options)
        found[dp_rank, cp_rank] = [
            (b.info.step, b.info.micro_batch, {name: t.tolist() for name, t in b.tensors.items()})
            for b in loader
        ]
        loader.close()

    threads = [threading.Thread(target=read, args=(d, c)) for d in range(dp_size) for c in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


def test_ranks_of_a_feed_get_what_the_conversion_gives_though_actors_die(pools):
    killed: list[bool] = []

    def kill_some():
        """The input, between whose batches actors are killed: it hits a run, however fast that is."""
        for index, entry in enumerate(batches(120)):
            if index >= 20 * len(killed) + 10 and pools[0].actors:
                # Whoever is dead already, and not missed yet, cannot be asked for its pid.
                with suppress(RayError):
                    kill(pools[0].actors[-1], by_signal=len(killed) % 2 == 0)
                    killed.append(True)
            yield entry

    with convert_feed(
        kill_some(),
        cp_size=2,
        layout="te",
        pad_id=7,
        pack_tokens=80,
        workers=2,
        hold_bytes=60_000,
        block_bytes=2048,
    ) as feed:
        found = ranks_of(feed, packs_per_chunk=2)
        feed.wait()

    assert len(killed) >= 3
    assert sorted(found) == [(0, 0), (0, 1)]
    for step in range(120):
        rows = serially([batch(step)], num_chunks=None, pad_id=7, pack_slots=80)
        for rank in range(2):
            for half in range(2):
                at, micro_batch, tensors = found[0, rank][2 * step + half]
                assert (at, micro_batch) == (step, half)
                for name in ("input_ids", "labels", "position_ids", "padding_mask"):
                    own = [rows[2 * half + i][rank].tensors[name].tolist() for i in range(2)]
                    assert tensors[name] == own[0] + own[1]


def test_a_feed_for_two_dp_ranks_deals_every_row_once():
    with convert_feed(batches(6), cp_size=2, layout="te", dp_size=2, pack_tokens=80, workers=1) as feed:
        found = ranks_of(feed, dp_size=2)
        feed.wait()

    for step in range(6):
        rows = [
            views[0].input_ids.tolist() for views in serially([batch(step)], num_chunks=None, pack_slots=80)
        ]
        dealt = [tensors["input_ids"] for d in range(2) for at, _, tensors in found[d, 0] if at == step]
        assert sorted(dealt) == sorted(rows)


def test_what_ends_a_feed_is_told_to_its_ranks_and_its_owner():
    def broken():
        yield batch(0)
        raise OSError("the disk is gone")

    with convert_feed(broken(), cp_size=2, layout="te", workers=1) as feed:
        with pytest.raises(ValueError, match="the conversion behind this feed ended: the disk is gone"):
            list(Loader(feed.url, dp_rank=0, dp_size=1, cp_rank=0, cp_size=2))
        with pytest.raises(OSError, match="the disk is gone"):
            feed.wait()
    with pytest.raises(ValueError, match="the input is empty"):
        convert_feed([], cp_size=2, layout="te")
    with pytest.raises(ValueError, match="batch 0: the batch has no input_ids"):
        convert_feed([{"tokens": [1]}], cp_size=2, layout="te")
    with pytest.raises(ValueError, match="dp_size=0 must be at least 1"):
        convert_feed([], cp_size=2, layout="te", dp_size=0)
