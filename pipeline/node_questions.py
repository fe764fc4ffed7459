"""What members of a node group ask beside blocks, put to the leader's fetcher in a thread of its own.

In:   ``Say.RUN`` and ``Say.COMPARE`` (``pipeline/node_wire.py``)
Out:  what the service serves now, what other ranks train on; or the error that a member raises
"""

from __future__ import annotations

import queue
import threading
from typing import TYPE_CHECKING, TypeAlias

from ringfeed.pipeline.block_fetcher import DigestComparer
from ringfeed.pipeline.digest_report import DigestReport
from ringfeed.pipeline.node_wire import Reply, Say, trouble_body

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfeed.pipeline.block_fetcher import BlockFetcher

    Tell: TypeAlias = Callable[[Reply, bytes], None]

__all__ = ["NodeQuestions"]


class NodeQuestions:
    """One question after the other; a service that is slow to answer holds up no block."""

    def __init__(self, fetcher: BlockFetcher) -> None:
        """Start the thread; ``close`` ends it."""
        self._fetcher = fetcher
        self._asked: queue.SimpleQueue[tuple[int, bytes, Tell] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="ringfeed-node", daemon=True).start()

    def put(self, kind: int, body: bytes, tell: Tell) -> None:
        """Ask; ``tell`` is called with the answer."""
        self._asked.put((kind, body, tell))

    def close(self) -> None:
        """End after what was asked."""
        self._asked.put(None)

    def _run(self) -> None:
        while (question := self._asked.get()) is not None:
            kind, body, tell = question
            try:
                answer = self._answer(kind, body)
            except Exception as error:
                answer = Reply.ERROR, trouble_body(error)
            tell(*answer)

    def _answer(self, kind: int, body: bytes) -> tuple[Reply, bytes]:
        if kind == Say.RUN:
            return Reply.RUN, self._fetcher.facts().to_json()
        comparer = self._fetcher if isinstance(self._fetcher, DigestComparer) else None
        if comparer is None:
            raise ValueError("what this node group loads from does not compare ranks")
        other = comparer.compare(DigestReport.from_json(body))
        return Reply.COMPARED, b"" if other is None else other.to_json()
