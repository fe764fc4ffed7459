"""``convert_feed``: BSHD batches converted as they come, and served to the ranks of one trainer.

In:   any iterable, DataLoader or Ray Dataset of batches, read once
Out:  a ``ConvertFeed``, whose URL ``Loader`` takes

    batches -> actors (``convert_stream.py``) -> thread -> held steps -> Flight server -> ranks

Each batch is a step, each of its rows a pack, laid out by the pad rule as those of a plan. All but the actors
is in this process. A generator cannot be read again, so a feed that ends cannot be resumed.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.bshd import BSHD_FIELDS, thd_from_bshd
from ringfeed.pipeline.conversion import ConvertOptions, numpy_batch
from ringfeed.pipeline.feed_facts import DEFAULT_BLOCK_BYTES
from ringfeed.pipeline.held_steps import HeldSteps
from ringfeed.pipeline.manifest import fingerprint
from ringfeed.pipeline.opening import ViewSpec, check_chunk
from ringfeed.sharding.layouts import read_layout
from ringfeed.workers.convert_feed_supply import ConvertSupply, FeedStoppedError
from ringfeed.workers.convert_input import is_dataset, open_batches
from ringfeed.workers.convert_stream import DEFAULT_WINDOW_BYTES, ConvertRun, convert_batches, store_bytes
from ringfeed.workers.flight_options import ServerOptions
from ringfeed.workers.flight_server import FlightServer
from ringfeed.workers.ray_session import ray_session

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator
    from types import TracebackType
    from typing import Self

    from ringfeed.pipeline.views import RankView
    from ringfeed.sharding.layouts import Layout

__all__ = ["DEFAULT_HOLD_BYTES", "ConvertFeed", "convert_feed"]

DEFAULT_HOLD_BYTES = 256 << 20
_POLL_SECONDS = 0.05
_SECONDS_TO_END = 15.0


def convert_feed(  # noqa: PLR0913  (all are by keyword, and all but two have a default)
    batches: Iterable[Any],
    *,
    cp_size: int,
    layout: Layout | str,
    dp_size: int = 1,
    pad_id: int = 0,
    pack_tokens: int | None = None,
    workers: int | None = None,
    window_bytes: int = DEFAULT_WINDOW_BYTES,
    hold_bytes: int = DEFAULT_HOLD_BYTES,
    block_bytes: int = DEFAULT_BLOCK_BYTES,
    server: ServerOptions | None = None,
) -> ConvertFeed:
    """Serve batches as they are converted; ranks open ``Loader(feed.url, packs_per_chunk=..., ...)``.

    A step is a batch, a pack one of its rows; ``packs_per_chunk`` of the loaders is the number of rows in a
    micro-batch. Rows are laid out anew by the pad rule: sequences, labels and positions are those of the
    batch, as from the shards of ``ringfeed convert``. Further columns are left out.

    Args:
        batches: as for ``convert``; each has the rows of the first one, or fewer.
        cp_size: context-parallel ranks.
        layout: who holds what; a name stands for that layout with its default options.
        dp_size: data-parallel ranks. A step is held until all dp x cp ranks were given it.
        pad_id: token written into padding.
        pack_tokens: slots of every row; by default what the first batch needs, S at least.
        workers: actors; by default one a CPU.
        window_bytes: for batches that were read and are not converted yet, and their views.
        hold_bytes: for steps that are held for ranks. The input waits when they are full.
        block_bytes: ids and labels that one rank gets in a block.
        server: where to listen, for whom; by default on this machine, without a token.

    Raises:
        ValueError: for wrong arguments, an empty input, or a first batch that cannot be converted.
        JobFailedError: if Ray cannot be started or reached.
    """
    run = ConvertRun(workers=workers, window_bytes=window_bytes)
    options = ConvertOptions(
        layout=read_layout(layout), cp_size=cp_size, pad_id=pad_id, num_chunks=None, pack_slots=pack_tokens
    )
    server = server or ServerOptions()
    for name, value in {"dp_size": dp_size, "hold_bytes": hold_bytes, "block_bytes": block_bytes}.items():
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    with ExitStack() as stack:
        # Here, not in the thread: Ray is started, and stopped, by who calls.
        stack.enter_context(ray_session(num_cpus=workers, object_store_bytes=store_bytes(run)))
        source = _named_only(open_batches(batches, num_chunks=1))
        first = next(source, None)
        if first is None:
            raise ValueError("there is no batch to convert: the input is empty")
        try:
            spec, num_rows = _open(first, options)
        except ValueError as error:
            raise ValueError(f"batch 0: {error}") from None
        held = HeldSteps(
            spec,
            recipe_fingerprint=fingerprint({"convert": options.facts(), "run": secrets.token_hex(16)}),
            packs_per_step=num_rows,
            name="convert",
        )
        supply = ConvertSupply(
            held,
            dp_size=dp_size,
            hold_bytes=hold_bytes,
            block_bytes=block_bytes,
            # Got ready, being written, and in the connection.
            under_way=server.blocks_ahead + 2,
        )
        made = convert_batches(
            chain([first], source),
            replace(options, pack_slots=spec.pack_slots),
            run,
            needs_cpus=is_dataset(batches),
        )
        return ConvertFeed(supply, made, FlightServer(supply, server), stack.pop_all())


class ConvertFeed:
    """A feed that is running. ``stop`` ends it; so does ``with``."""

    def __init__(
        self,
        supply: ConvertSupply,
        made: Generator[list[list[RankView]], None, None],
        server: FlightServer,
        stack: ExitStack,
    ) -> None:
        """Use ``convert_feed``."""
        self._supply = supply
        self._server = server
        self._stack = stack
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(made,), name="ringfeed-convert", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """What ranks pass to ``Loader``."""
        return self._server.url

    def wait(self) -> None:
        """Wait until the input has ended, every rank was given all of it, and all have left.

        Raises:
            Exception: what the input raised, or its conversion.
        """
        while not (self._supply.is_served and not self._server.num_streams):
            if self._error is not None:
                raise self._error
            time.sleep(_POLL_SECONDS)

    def stop(self) -> None:
        """End server and actors, whatever ranks still wait for. A second call does nothing."""
        self._supply.stop()
        self._server.stop()
        self._thread.join(_SECONDS_TO_END)
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self, made: Generator[list[list[RankView]], None, None]) -> None:
        try:
            for rows in made:
                self._supply.put(rows)
            self._supply.end()
        except FeedStoppedError:
            pass
        except Exception as error:
            self._error = error
            self._supply.end(error)
        finally:
            made.close()


def _named_only(batches: Iterator[Any]) -> Iterator[Any]:
    """Leave out what a feed does not carry; what is no batch is refused later."""
    for batch in batches:
        is_batch = hasattr(batch, "items")
        yield {name: batch[name] for name in BSHD_FIELDS if name in batch} if is_batch else batch


def _open(first: Any, options: ConvertOptions) -> tuple[ViewSpec, int]:
    """Return how all rows become views, and the rows of a step, from the first batch."""
    arrays = numpy_batch(first)
    layout, cp_size = options.layout, options.cp_size
    pack_slots = options.pack_slots
    if pack_slots is None:
        chunks = thd_from_bshd(arrays, layout=layout, cp_size=cp_size, pad_id=options.pad_id, num_chunks=None)
        pack_slots = len(chunks[0].tokens)
    spec = ViewSpec(
        layout=layout,
        cp_size=cp_size,
        pack_slots=pack_slots,
        multiple=layout.length_multiple(cp_size),
        pad_id=options.pad_id,
    )
    check_chunk(spec)
    return spec, len(arrays["input_ids"])
