"""Draw blocks by key, made when asked for, or ahead of that by threads.

In:   ``BlockMaker`` (``drawn_blocks.py``) and a number of workers
Out:  the same blocks whatever that number is: a block depends on its key alone
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from ringfeed.pipeline.planner.drawn_blocks import BlockKey, BlockMaker, DrawnBlock

__all__ = ["BlockFeed"]


class BlockFeed:
    """Hands out draw blocks to one thread. Close it, or use it as a context manager."""

    def __init__(self, maker: BlockMaker, *, workers: int = 1) -> None:
        """Take the maker and how many threads make blocks; 1 makes them in the caller's, when asked for."""
        self.maker = maker
        self._workers = workers
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="draw") if workers > 1 else None
        self._ahead: dict[BlockKey, Future[DrawnBlock]] = {}

    def __enter__(self) -> "BlockFeed":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def num_blocks(self, source: int) -> int:
        """Return the draw blocks in an epoch of ``source``."""
        return self.maker.order.num_blocks(source)

    def get(self, key: BlockKey) -> DrawnBlock:
        """Return one block, and begin with those that come after it in its lane. Errors as ``make``."""
        if self._pool is None:
            return self.maker.make(key)
        made = self._ahead.pop(key, None)
        wanted = self._after(key)
        for other in [other for other in self._ahead if _same_lane(other, key) and other not in wanted]:
            # Its pieces would be cut by a limit that no longer holds.
            self._ahead.pop(other).cancel()
        block = self.maker.make(key) if made is None else made.result()
        for other in wanted:
            if other not in self._ahead:
                self._ahead[other] = self._pool.submit(self.maker.make, other)
        return block

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._ahead.clear()

    def _after(self, key: BlockKey) -> list[BlockKey]:
        """Return the keys of the blocks to make ahead: all threads on one lane, or one for each of many."""
        num_blocks = self.num_blocks(key.source)
        num_lanes = len(self.maker.order.spans) * self.maker.order.num_lanes
        keys = []
        for _ in range(max(1, self._workers // num_lanes)):
            block, epoch = key.block + 1, key.epoch
            if block == num_blocks:
                block, epoch = 0, epoch + 1
            key = replace(key, block=block, epoch=epoch)
            keys.append(key)
        return keys


def _same_lane(one: BlockKey, other: BlockKey) -> bool:
    return (one.source, one.lane) == (other.source, other.lane)
