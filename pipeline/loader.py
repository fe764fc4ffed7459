"""Hand one trainer rank its batches, in step order, prefetched and resumable.

In:   a plan with its corpora, a folder of pre-sharded files, or a service (``pipeline/loader_source.py``)
Out:  ``Batch`` after ``Batch`` (``pipeline/batch.py``), or whole steps

The parts: ``batch_builder.py`` makes any batch, ``loader_node.py`` makes them ahead and in order,
``loader_state.py`` says where a run stands. Here they are put together and arguments are checked.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch

from ringfeed.pipeline.batch_builder import BatchBuilder
from ringfeed.pipeline.batch_kwargs import PadsChoice
from ringfeed.pipeline.block_fetcher import TlsFiles
from ringfeed.pipeline.device import make_placer
from ringfeed.pipeline.digest_check import DigestCheck
from ringfeed.pipeline.loader_arguments import check_counts, checked_columns
from ringfeed.pipeline.loader_metrics import NoMetrics
from ringfeed.pipeline.loader_node import LoaderNode, Position
from ringfeed.pipeline.loader_source import SourceOptions, open_source
from ringfeed.pipeline.pack_lengths import PackShape
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.service_check import make_service_check
from ringfeed.pipeline.step_batch import stack_step

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType
    from typing import Self

    from torch.distributed import ProcessGroup

    from ringfeed.pipeline.batch import Batch
    from ringfeed.pipeline.block_fetcher import BlockFetcher
    from ringfeed.pipeline.loader_metrics import LoaderMetrics
    from ringfeed.sharding.layouts import Layout

__all__ = ["DEFAULT_PREFETCH_BYTES", "Loader"]

DEFAULT_PREFETCH_BYTES = 256 << 20
"""Enough for a step or two of any usual size, small beside a rank's share of host memory."""


class Loader:
    """One rank's batches of a run: iterate for micro-batches, or ``steps()`` for whole steps.

    A plan is the whole run: its epochs are in it. Iteration goes on from the last batch that was
    handed out, also after a ``break``, and at the plan's end it stops and stays stopped.
    ``load_state_dict`` moves it. Batches are built ahead in a thread, which ends when the iteration
    ends or is dropped. Keep one iteration at a time: an earlier one raises once a later one began.
    """

    def __init__(  # noqa: PLR0913 - one call with all that shapes a rank's share
        self,
        source: str | Path | BlockFetcher,
        *,
        dp_rank: int,
        dp_size: int,
        cp_rank: int,
        cp_size: int,
        layout: str | Layout | None = None,
        corpus: str | Path | Sequence[str | Path] | None = None,
        packs_per_chunk: int = 1,
        slot_budget: int | None = None,
        tp_size: int = 1,
        unit: int = 1,
        skip: str | Path | None = None,
        device: torch.device | str | int | None = None,
        columns: Sequence[str] | None = None,
        prefetch_bytes: int = DEFAULT_PREFETCH_BYTES,
        token_dtype: torch.dtype = torch.int64,
        max_documents: int | None = None,
        node_group: ProcessGroup | None = None,
        cp_group: ProcessGroup | None = None,
        token: str | None = None,
        tls: TlsFiles | str | Path | Mapping[str, str | Path] | None = None,
        metrics: LoaderMetrics | None = None,
    ) -> None:
        """Open ``source`` for one rank. Nothing is read ahead before the first iteration.

        Args:
            source: folder of a plan (also of one that is still being made) or of shards, URL of a service,
                or a fetcher (closed with the loader).
            dp_rank: this rank's data-parallel coordinate; the ranks of one dp rank share its packs.
            dp_size: data-parallel ranks; dp_size * packs_per_chunk divides the plan's packs_per_step.
            cp_rank: this rank's context-parallel coordinate: which part of its packs it holds.
            cp_size: context-parallel ranks.
            layout: name or object; needed for a plan. None takes the shards' or the service's own.
            corpus: corpora of the plan in command order, where they are not where the plan says.
            packs_per_chunk: packs laid end to end in a micro-batch; layouts te and identity only.
            slot_budget: T of a pack (the most of a variable one) instead of the plan's pack_tokens, for
                layouts that pad more.
            tp_size: tensor-parallel ranks that split the local tokens again; T must allow it.
            unit: FP8 unit of the local length; T must allow it.
            skip: file of document ids to leave out. None takes the shards' or the service's own list.
            device: None for the CPU, or a CUDA device that tensors are copied to on a side stream.
            columns: names of the tensors wanted; None is all six. A service sends no other tokens.
            prefetch_bytes: memory for what is ahead of the trainer: batches that are built, at least one, and
                with a service, half of it, for blocks that are here or under way, at least one.
            token_dtype: int64, or int32 to keep ids, labels and positions as they are stored.
            max_documents: N of every chunk of ``steps()``, tail slots included; None takes the plan's
                largest.
            node_group: process group (or one-dimensional ``DeviceMesh``) of the tp / pp ranks of this rank's
                dp_rank and cp_rank on this node: its first rank fetches from a service, the others map
                the same files under ``/dev/shm``. All of them open alike; ``columns`` may differ. A folder
                is read by each: its pages are shared already.
            cp_group: process group (or one-dimensional ``DeviceMesh``) of the ranks of this dp rank: they
                compare step digests at the first batch of an iteration and every 64 steps. All of them
                iterate alike. None: ranks of a service compare through it, which finds other packs at the
                same step, not ranks at different steps.
            token: bearer token for a URL. None takes what its transport finds in the environment.
            tls: PEM file of the CA for an encrypted URL, or a mapping of ``ca``, and for mTLS ``cert`` and
                ``key``, to files.
            metrics: told of tokens, bytes and waits; ``rank_metrics.RankMetrics`` shows them to Prometheus.

        Raises:
            ValueError: for each argument that does not fit the source, with what would.
            ConnectionError: if no service answers at a URL, or it refuses token or certificate.
            CorruptDataError: if the source is damaged.
        """
        place = RankPlace(
            dp_rank=dp_rank,
            dp_size=dp_size,
            cp_rank=cp_rank,
            cp_size=cp_size,
            packs_per_chunk=packs_per_chunk,
        )
        placer = make_placer(device, token_dtype=token_dtype)
        wanted = checked_columns(columns)
        check_counts(prefetch_bytes=prefetch_bytes, max_documents=max_documents)
        options = SourceOptions(
            place=place,
            layout=layout,
            corpus=corpus,
            slot_budget=slot_budget,
            tp_size=tp_size,
            unit=unit,
            skip=skip,
            columns=wanted,
            window_bytes=prefetch_bytes // 2,
            token=token,
            tls=None if tls is None else TlsFiles.of(tls),
            metrics=metrics or NoMetrics(),
            node_group=node_group,
        )
        group_check = None if cp_group is None else DigestCheck(cp_group)
        self._metrics = options.metrics
        self._source = open_source(source, options)
        self._check = group_check or make_service_check(self._source.comparer, place)
        self._builder = BatchBuilder(
            self._source, place=place, placer=placer, columns=wanted, pads=PadsChoice()
        )
        built_bytes = max(0, prefetch_bytes - self._source.window_bytes)
        self._prefetch = max(1, built_bytes // self._builder.batch_bytes(token_dtype.itemsize))
        self._max_documents = max_documents
        self._position = Position(self._builder)
        self._iteration: weakref.ref[LoaderNode] | None = None

    @property
    def num_steps(self) -> int:
        """Steps of the plan; those so far, while a service is still planning."""
        return self._source.num_steps

    @property
    def num_micro_batches(self) -> int:
        """M, the same in every step and on every rank."""
        return self._builder.num_micro_batches

    def __iter__(self) -> Iterator[Batch]:
        """Return an iterator that goes on from the last batch that was handed out.

        Its ``next`` raises CorruptDataError for damaged data, TimeoutError if a service stays silent,
        RankMismatchError if ranks that share packs disagree, and RuntimeError once overtaken.
        """
        batches: Iterator[Batch] = self._start()
        return batches

    def steps(self) -> Iterator[Batch]:
        """Return an iterator over whole steps, from a step border on.

        Raises:
            ValueError: inside a step, if packs vary in length (``pack_shape: variable``), or later for a
                micro-batch of more slots than ``max_documents``.
        """
        if self._source.spec.pack_shape is PackShape.VARIABLE:
            raise ValueError(
                "steps() stacks the micro-batches of a step, and this plan has pack_shape=variable: each is "
                "as long as its packs; iterate over the loader, or plan with --pack-shape fixed"
            )
        if self._position.micro_batch:
            raise ValueError(
                f"the loader stands inside step {self._position.step} (micro-batch "
                f"{self._position.micro_batch}), whole steps begin at a border; finish the step micro-batch "
                "by micro-batch first"
            )
        return _whole_steps(self._start(), self._position, self.num_micro_batches, self._largest_num_slots())

    def node(self) -> LoaderNode:
        """Return a ``torchdata.nodes`` node over the same data, with a position of its own.

        ``reset()`` begins at the plan's first batch, ``reset(state)`` where a state of this or any
        other rank's loader stands.
        """
        return self._node(Position(self._builder))

    def state_dict(self) -> dict[str, Any]:
        """Return where the run stands, JSON-able and the same on every rank.

        It counts batches that were handed out, not those built ahead.
        """
        return self._position.save()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where ``state``, saved by any rank, stands; ends an iteration that is under way.

        Another cp size, layout, source or token dtype is fine anywhere. dp_size, packs_per_chunk and
        the skip list may change at step borders only.

        Raises:
            ValueError: if this run cannot continue from it, with where it could.
        """
        self._position.load(state)
        self._end_iteration()

    def close(self) -> None:
        """End an iteration that is under way and give back files and buffers."""
        self._end_iteration()
        self._builder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _start(self) -> LoaderNode:
        self._end_iteration()
        node = self._node(self._position)
        node.start()
        # Weak: an iteration that is dropped takes its thread and its batches with it.
        self._iteration = weakref.ref(node)
        return node

    def _node(self, position: Position) -> LoaderNode:
        return LoaderNode(
            self._builder, position, prefetch=self._prefetch, check=self._check, metrics=self._metrics
        )

    def _end_iteration(self) -> None:
        self._position.ticket += 1
        node = self._iteration() if self._iteration is not None else None
        if node is not None:
            node.close()

    def _largest_num_slots(self) -> int:
        if self._max_documents is not None:
            return self._max_documents
        if self._source.is_growing:
            raise ValueError(
                "the plan is still growing, so its largest number of documents in a chunk is not known; pass "
                "max_documents= to Loader"
            )
        return self._source.max_slots() * self._builder.place.packs_per_chunk


def _whole_steps(
    node: LoaderNode, position: Position, num_micro_batches: int, max_slots: int
) -> Iterator[Batch]:
    while True:
        built = []
        for _ in range(num_micro_batches):
            try:
                built.append(node.take())
            except StopIteration:
                # Every step has M micro-batches, so this is the end of the plan.
                return
        step = stack_step([item.batch for item in built], max_slots=max_slots)
        position.move_past(built[-1])
        del built
        yield step
