"""Ask the builders of a roster for blocks, whoever of them is alive: with fail-over and retries.

In:   rosters (``workers/roster.py``), a way to call a builder (``workers/builder_calls.py``)
Out:  a ``BlockSupply`` (``pipeline/block_fetcher.py``), for feeders and for ranks on the object store

A block is a pure function of its request, so a request that failed goes to the next builder as it is. The
pool keeps nothing that a restart would lose. It knows no Ray: how builders are called is a seam.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING, Any, TypeVar

from ringfeed.pipeline.feed_facts import FeedFacts
from ringfeed.pipeline.step_block import EncodedBlock
from ringfeed.workers.builder_calls import BuilderLostError
from ringfeed.workers.builder_choice import BuilderChoice
from ringfeed.workers.pool_patience import PoolPatience, Tries

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfeed.pipeline.feed_request import BlockRequest
    from ringfeed.workers.builder_calls import BuilderCalls
    from ringfeed.workers.roster import BuilderMember, Roster

__all__ = ["BuilderPool"]

_LOG = logging.getLogger("ringfeed.builders")
# Between two looks at the roster after failures, whatever number of threads met them.
_LOOK_SECONDS = 0.2
# Between two questions how far a plan has grown, and for an answer: builders may be busy, ranks wait for it.
_FACTS_SECONDS = 0.3
_FACTS_REPLY_SECONDS = 5.0
Answer = TypeVar("Answer")


class BuilderPool:
    """A ``BlockSupply`` over many builders. Any number of threads may ask at once."""

    def __init__(
        self,
        roster: Callable[[], Roster],
        calls: BuilderCalls,
        *,
        node_id: str | None = None,
        patience: PoolPatience | None = None,
    ) -> None:
        """Ask nobody yet.

        Args:
            roster: gives the newest roster; ConnectionError if it cannot be had now.
            calls: how builders are called.
            node_id: of this process; builders there come first.
            patience: how long to try.
        """
        self._get_roster = roster
        self._calls = calls
        self._patience = patience or PoolPatience()
        self._choice = BuilderChoice(node_id=node_id)
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._looked = float("-inf")
        self._roster: Roster | None = None
        self._facts: FeedFacts | None = None
        self._asking_facts = threading.Lock()
        self._asked_facts = float("-inf")
        self._stop = threading.Event()
        self._asked = "nobody yet"
        self._trouble = ""
        self._no_news = ""
        """Why the roster could not be had, the last time."""
        self.num_retries = 0
        """Times that something had to be asked for again."""

    def facts(self) -> FeedFacts:
        """Return what is served now; of a plan that grows, what a builder says.

        Raises:
            ValueError: if it is another run than before.
            ConnectionError: if nobody can be asked and nothing is known.
        """
        self._look(_LOOK_SECONDS if self._facts is None else self._patience.roster_seconds)
        if self._facts is not None and not self._facts.is_growing:
            return self._facts
        if self._facts is None:
            return self._ask_facts(within=self._patience.open_seconds)
        # A directory is asked by many ranks again and again: one thread asks, now and then.
        if self._asking_facts.acquire(blocking=False):
            try:
                if time.monotonic() - self._asked_facts >= _FACTS_SECONDS:
                    return self._ask_facts(within=0.0)
            except ConnectionError as error:
                # What is known stays right. Whoever waits for more asks again, and tells how long it took.
                _LOG.info("no news of the plan: %s", error)
            finally:
                self._asking_facts.release()
        return self._facts

    def block(self, request: BlockRequest) -> EncodedBlock:
        """Return the block that ``request`` asks for, with its columns alone.

        Raises:
            ValueError: if the request does not fit the run, or the service serves another one now.
            CorruptDataError: if the data behind the block is damaged.
            ConnectionError: if no builder answers as long as patience lasts, or the pool is closed.
        """
        data = request.to_json()

        def call(builder: BuilderMember, *, seconds: float, stop: threading.Event) -> Any:
            return self._calls.block(builder, data, seconds=seconds, stop=stop)

        batch = self._ask(request.share_key, call, within=self._patience.retry_seconds)
        return EncodedBlock.from_batch(batch)

    def status(self) -> str:
        """Return who was asked last and how it went, for a human. Never waits."""
        retries = (
            f", asked again {self.num_retries} times, the last: {self._trouble}" if self._trouble else ""
        )
        return f"{self._asked}{retries}"

    def close(self) -> None:
        """End all that waits in here."""
        self._stop.set()

    def _ask_facts(self, *, within: float) -> FeedFacts:
        # Each process asks another builder.
        key = ("facts", os.getpid())

        def call(builder: BuilderMember, *, seconds: float, stop: threading.Event) -> bytes:
            return self._calls.facts(builder, seconds=min(seconds, _FACTS_REPLY_SECONDS), stop=stop)

        try:
            return self._take_facts(self._ask(key, call, within=within))
        finally:
            self._asked_facts = time.monotonic()

    def _ask(self, key: tuple[object, ...], call: Callable[..., Answer], *, within: float) -> Answer:
        """Return the answer of the first builder that gives one."""
        tries = Tries(self._patience)
        self._look(self._patience.roster_seconds)
        while not self._stop.is_set():
            builder = self._next(key)
            error = BuilderLostError(self._no_news or "the service has no builder now")
            if builder is not None:
                try:
                    answer = call(builder, seconds=tries.reply_seconds, stop=self._stop)
                except BuilderLostError as lost:
                    error = lost
                    self._choice.failed(builder.name, now=time.monotonic())
                else:
                    self._choice.forgive(builder.name)
                    return answer
            if self._stop.is_set():
                break
            tries.add(error)
            self._note(error)
            if tries.are_final or tries.seconds > within:
                raise ConnectionError(f"{error}; tried {tries.count} times in {tries.seconds:.0f} s")
            self._look(_LOOK_SECONDS)
            self._pause(key, tries)
        raise ConnectionError("the pool of builders is closed")

    def _next(self, key: tuple[object, ...]) -> BuilderMember | None:
        builders = () if self._roster is None else self._roster.builders
        order = self._choice.order(builders, key, now=time.monotonic())
        if not order:
            return None
        self._asked = f"{order[0].name} on node {order[0].node_id}"
        return order[0]

    def _pause(self, key: tuple[object, ...], tries: Tries) -> None:
        """Wait a little, unless there is a builder that has not failed just now."""
        builder = self._next(key)
        if builder is None or self._choice.is_resting(builder.name, now=time.monotonic()):
            self._stop.wait(tries.wait_seconds)

    def _note(self, error: BuilderLostError) -> None:
        _LOG.info("asking again: %s", error)
        with self._lock:
            self.num_retries += 1
            self._trouble = str(error)

    def _look(self, seconds: float) -> None:
        """Take over the newest roster, if the last look is longer than ``seconds`` ago."""
        if time.monotonic() - self._looked < seconds:
            return
        # One looks, the others go on with what there is; without any they wait for it.
        if not self._looking.acquire(blocking=self._roster is None):
            return
        try:
            if time.monotonic() - self._looked >= seconds:
                self._take(self._get_roster())
                self._no_news = ""
                self._looked = time.monotonic()
        except ConnectionError as error:
            _LOG.info("no news of the builders: %s", error)
            self._no_news = str(error)
            self._looked = time.monotonic()
        finally:
            self._looking.release()

    def _take(self, roster: Roster) -> None:
        if roster.facts_json:
            self._take_facts(roster.facts_json)
        known = {} if self._roster is None else {one.name: one.actor for one in self._roster.builders}
        for builder in roster.builders:
            if known.get(builder.name) != builder.actor:
                self._choice.forgive(builder.name)
        self._roster = roster

    def _take_facts(self, data: bytes) -> FeedFacts:
        facts = FeedFacts.from_json(data)
        with self._lock:
            known = self._facts
            if known is not None and known.fingerprint != facts.fingerprint:
                raise ValueError(
                    f"the service serves run {facts.fingerprint} now, before it was {known.fingerprint}; "
                    "start a service of the same plan, layout and skip list again"
                )
            # A roster may be older than what a builder has said since.
            if known is None or _age(facts) >= _age(known):
                self._facts = facts
            return self._facts or facts


def _age(facts: FeedFacts) -> tuple[int, bool]:
    return facts.num_steps, not facts.is_growing
