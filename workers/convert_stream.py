"""``convert``: BSHD batches in, THD views of every cp rank out, in order; actors do the work.

In:   any iterable, DataLoader or Ray Dataset of batches (``workers/convert_input.py``)
Out:  per chunk a list of ``RankView``s, in input order, as an iterator in this process

The input is read only as far ahead as the window allows, in the thread that iterates. A killed actor's
batches are converted again, so the output is the same whatever dies.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.conversion import ConvertOptions, batch_bytes, numpy_batch
from ringfeed.sharding.layouts import read_layout
from ringfeed.workers.convert_input import is_dataset, open_batches
from ringfeed.workers.convert_queue import ConvertQueue, QueueLimits
from ringfeed.workers.ray_session import ray_session

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator

    from ringfeed.pipeline.views import RankView
    from ringfeed.sharding.layouts import Layout
    from ringfeed.workers.convert_pool import BatchQueue, ConvertPool
    from ringfeed.workers.ray_session import RaySession

__all__ = ["DEFAULT_WINDOW_BYTES", "ConvertRun", "convert", "convert_batches", "store_bytes"]

DEFAULT_WINDOW_BYTES = 64 << 20
_BATCHES_PER_WORKER = 4
_SECONDS_TO_FREE, _POLL_SECONDS = 1.0, 0.05
# Beside the window: what Ray itself keeps there, and room for pieces of free memory.
_SPARE_STORE_BYTES = 96 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertRun:
    """What one conversion may take.

    Raises:
        ValueError: if a number is below 1.
    """

    workers: int | None = None
    """Actors at most; None: one for each CPU that is free, less one where a Ray Dataset needs CPUs, too."""
    window_bytes: int = DEFAULT_WINDOW_BYTES
    """Batches that were read and not handed out, with their views."""

    def __post_init__(self) -> None:
        for name in ("workers", "window_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} must be at least 1")


def convert(  # noqa: PLR0913  (all are by keyword, and all but two have a default)
    batches: Iterable[Any],
    *,
    cp_size: int,
    layout: Layout | str,
    pad_id: int = 0,
    num_chunks: int = 1,
    workers: int | None = None,
    window_bytes: int = DEFAULT_WINDOW_BYTES,
) -> Generator[list[RankView], None, None]:
    """Convert BSHD batches to THD views on Ray, in input order.

    A Ray that runs in this process is used; otherwise that of ``RAY_ADDRESS``, or a local one for as long as
    the iterator lives. Nothing starts before the first item is asked for. ``close()``, or dropping the
    iterator, ends the actors.

    Args:
        batches: any iterable (a DataLoader is one) of dicts of tensors or arrays: ``input_ids`` [B, S],
            ``seq_lens`` [B, K] and what else ``bshd.thd_from_bshd`` takes; NeMo's packed rows as they are.
            Or a Ray Dataset of such dicts, or of single rows (then ``num_chunks`` rows are a batch).
        cp_size: context-parallel ranks.
        layout: who holds what; a name stands for that layout with its default options.
        pad_id: token written into padding.
        num_chunks: chunks made of each batch, B / num_chunks rows each, in order.
        workers: actors at most; by default one for each CPU that is free.
        window_bytes: for batches that were read and not handed out yet, and their views.

    Yields:
        Per chunk the views of all cp ranks; ``.tensors`` are numpy arrays that nobody else has.

    Raises:
        ValueError: at once for wrong arguments; at its place in the output, naming its index, for a batch
            that cannot be converted.
        JobFailedError: if Ray cannot be started or reached, or one batch kills too many workers.
    """
    options = ConvertOptions(
        layout=read_layout(layout), cp_size=cp_size, pad_id=pad_id, num_chunks=num_chunks
    )
    run = ConvertRun(workers=workers, window_bytes=window_bytes)
    source = open_batches(batches, num_chunks=num_chunks)
    return _flatten(convert_batches(source, options, run, needs_cpus=is_dataset(batches)))


def convert_batches(
    batches: Iterator[Any], options: ConvertOptions, run: ConvertRun, *, needs_cpus: bool
) -> Generator[list[list[RankView]], None, None]:
    """Yield the chunks of one batch after the other; see ``convert``.

    Args:
        batches: from ``open_batches``.
        options: what they are converted to.
        run: what that may take.
        needs_cpus: does reading the batches take CPUs of the cluster?
    """
    with ray_session(num_cpus=run.workers, object_store_bytes=store_bytes(run)) as session:
        # Imports ray, whose settings the session has just made.
        from ringfeed.workers.convert_pool import ConvertPool

        num_workers, num_cpus = _share_of(session, run, num_reserved=int(needs_cpus))
        limits = QueueLimits(
            window_bytes=run.window_bytes,
            window_batches=2 * _BATCHES_PER_WORKER * num_workers,
            batches_per_worker=_BATCHES_PER_WORKER,
        )
        queue: BatchQueue = ConvertQueue(limits)
        pool = ConvertPool(queue, options, num_workers=num_workers, num_cpus=num_cpus)
        try:
            yield from _work(batches, queue, pool, options)
        finally:
            pool.close()


def store_bytes(run: ConvertRun) -> int:
    """Return the object store that a local Ray needs for ``run``."""
    return 2 * run.window_bytes + _SPARE_STORE_BYTES


def _work(
    source: Iterator[Any], queue: BatchQueue, pool: ConvertPool, options: ConvertOptions
) -> Generator[list[list[RankView]], None, None]:
    while not queue.is_drained:
        # One in for one out: the window is full when workers are slow, and small when the consumer is.
        if queue.has_room:
            _take_in(source, queue, options)
        pool.work()
        if not queue.has_room and not queue.peek():
            pool.wait_for_news()
            pool.work()
        for reference in queue.peek():
            chunks = pool.collect(reference)
            if chunks is not None:
                queue.pop()
                yield chunks


def _take_in(source: Iterator[Any], queue: BatchQueue, options: ConvertOptions) -> None:
    import ray

    try:
        batch = next(source)
    except StopIteration:
        queue.end()
        return
    except Exception as error:
        # The input's own: raised when all before it is out.
        queue.end(error)
        return
    try:
        arrays = numpy_batch(batch)
        num_bytes = batch_bytes(arrays, options)
    except ValueError as error:
        queue.put_error(ValueError(f"batch {queue.num_taken_in}: {error}"))
        return
    # Owned by this process: it stays whichever worker dies.
    queue.put(ray.put(arrays), num_bytes=num_bytes)


def _share_of(session: RaySession, run: ConvertRun, *, num_reserved: int) -> tuple[int, float]:
    """Return how many actors, and the CPUs that each takes of the cluster's.

    Where none is free (a trainer has them all, or another conversion), they go without: they must not wait
    for those who may be waiting for them.

    Args:
        session: the Ray that is connected.
        run: what was asked for.
        num_reserved: CPUs to leave free.
    """
    most = session.num_cpus - num_reserved
    wanted = min(run.workers or most, most)
    deadline = time.monotonic() + _SECONDS_TO_FREE
    while True:
        free = max(0, _free_cpus() - num_reserved)
        # What ended a moment ago gives its CPUs back with a delay.
        if free >= wanted or time.monotonic() > deadline:
            break
        time.sleep(_POLL_SECONDS)
    count = run.workers or free or 1
    if num_reserved:
        # More would take what is reserved. Without, those that wait for a CPU tell a cluster to grow.
        count = min(count, max(1, free))
    return count, 1.0 if free else 0.0


def _free_cpus() -> int:
    import ray

    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return int(free.get("CPU", 0))


def _flatten(batches: Generator[list[list[RankView]], None, None]) -> Generator[list[RankView], None, None]:
    try:
        for chunks in batches:
            yield from chunks
    finally:
        batches.close()
