"""A fetcher in this process: the shortest way from a builder to a rank, and the reference for all others.

In:   a ``BlockSupply`` in this process, such as ``workers/block_builder.py``
Out:  its blocks, made in one thread of their own (``pipeline/block_fetcher.py``)

Use it to build ahead beside a training loop, in the same process: ``Loader(LocalFetcher(builder), ...)``.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from ringfeed.pipeline.block_fetcher import FetcherStatus

if TYPE_CHECKING:
    from ringfeed.pipeline.block_fetcher import BlockSupply
    from ringfeed.pipeline.feed_facts import FeedFacts
    from ringfeed.pipeline.feed_request import BlockRequest
    from ringfeed.pipeline.step_block import EncodedBlock

__all__ = ["LocalFetcher"]


class LocalFetcher:
    """A ``BlockFetcher`` for one rank. Several may share a supply that takes calls from any thread."""

    def __init__(self, supply: BlockSupply) -> None:
        """Start no thread yet. ``close`` does not close the supply."""
        self._supply = supply
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ringfeed-build")

    def facts(self) -> FeedFacts:
        return self._supply.facts()

    def fetch(self, request: BlockRequest) -> Future[EncodedBlock]:
        return self._thread.submit(self._supply.block, request)

    def status(self) -> FetcherStatus:
        return FetcherStatus(asked="the builder in this process", bytes_held={})

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
