"""Build any micro-batch of one rank from a source of views. No order, no state, no prefetch.

In:   a ``RankSource`` (``pipeline/view_source.py``), the rank's place, a ``Placer`` (``pipeline/device.py``)
Out:  a ``Batch`` on its device (``pipeline/loader_node.py`` asks for them in order)

A chunk is its packs' views end to end. A pack that the step lacks is an all-padding view, so every
rank has the same number of micro-batches in every step.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from ringfeed.pipeline.batch import OFFSET_COLUMNS, TOKEN_COLUMNS, Batch, BatchInfo, Chunk
from ringfeed.pipeline.chunk_sharder import ChunkSharder
from ringfeed.pipeline.device import MASK_COLUMN
from ringfeed.pipeline.ranks import MISSING, num_micro_batches
from ringfeed.pipeline.views import padding_view
from ringfeed.sharding.padding import SlotOffsets, concat_offsets

if TYPE_CHECKING:
    import numpy.typing as npt

    from ringfeed.pipeline.batch_kwargs import PadsChoice
    from ringfeed.pipeline.device import Buffers, Placed, Placer
    from ringfeed.pipeline.ranks import RankPlace
    from ringfeed.pipeline.step_share import StepShare
    from ringfeed.pipeline.view_source import RankSource
    from ringfeed.pipeline.views import RankView

__all__ = ["BatchBuilder", "BuiltBatch"]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BuiltBatch:
    """A batch, and what its consumer still has to do."""

    step: int
    micro_batch: int
    chain: str
    """Hash chain value of ``step``."""
    batch: Batch
    placed: Placed
    """To be waited for where the batch is used."""
    num_tokens: int
    """L: local tokens, padding included."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _StepShare:
    """What is the same for all micro-batches of a step."""

    dealt: StepShare
    global_supervised: int
    supervised_by_source: dict[str, int]
    digest: int


class BatchBuilder:
    """Builds micro-batches of one rank; one at a time, from any thread."""

    def __init__(
        self,
        source: RankSource,
        *,
        place: RankPlace,
        placer: Placer,
        columns: tuple[str, ...],
        pads: PadsChoice,
    ) -> None:
        self.source = source
        self.place = place
        self.columns = columns
        self.num_micro_batches = num_micro_batches(
            packs_per_step=source.packs_per_step,
            dp_size=place.dp_size,
            packs_per_chunk=place.packs_per_chunk,
        )
        self._placer = placer
        self._pads = pads
        self._token_columns = tuple(name for name in TOKEN_COLUMNS if name in columns)
        self._share: _StepShare | None = None
        self.lock = threading.Lock()
        """Held while the source is used: a view is valid until the source is asked for the next one."""
        # Also when it is dropped, by loader and thread alike; not at exit, where a thread may still read.
        self._close_source = weakref.finalize(self, source.close)
        self._close_source.atexit = False
        largest = padding_view(source.spec, cp_rank=place.cp_rank, num_slots=source.spec.pack_slots)
        self.num_local = len(largest.input_ids) * place.packs_per_chunk
        """L of the largest batch; of an all-padding one where shares are uneven."""

    def batch_bytes(self, token_bytes: int) -> int:
        """Return the bytes of the largest batch, if an id, label or position takes ``token_bytes``."""
        per_token = sum(1 if name == MASK_COLUMN else token_bytes for name in self._token_columns)
        num_offsets = self.source.max_slots() * self.place.packs_per_chunk + 1
        per_offset = 4 * sum(name in self.columns for name in OFFSET_COLUMNS)
        return self.num_local * per_token + num_offsets * per_offset

    def build(self, step: int, micro_batch: int) -> BuiltBatch:
        """Return micro-batch ``micro_batch`` of ``step``.

        Raises:
            ValueError: if there is no such step, or the skip list leaves it without supervised tokens.
            CorruptDataError: if the data behind it is damaged.
        """
        with self.lock:
            if not self._close_source.alive:
                raise ValueError("the loader is closed; open a new one")
            return self._build(self._step_share(step), micro_batch)

    def close(self) -> None:
        """Close the source, after the batch that is being built."""
        with self.lock:
            self._close_source()

    def _build(self, share: _StepShare, micro_batch: int) -> BuiltBatch:
        chunk = _ChunkFacts()
        buffers: Buffers | None = None
        step = share.dealt.step
        for pack in share.dealt.packs[micro_batch].tolist():
            view = self._view(step, pack)
            if buffers is None:
                num_local = self._num_local(share, micro_batch, first=view)
                buffers = self._placer.open(self._token_columns, num_local)
            for name in self._token_columns:
                buffers.write(name, chunk.num_local, getattr(view, name))
            chunk.add(view)
        if buffers is None:
            raise ValueError(f"step {step} gave no pack for micro-batch {micro_batch}")
        offsets = chunk.offsets[0] if len(chunk.offsets) == 1 else concat_offsets(chunk.offsets)
        placed = buffers.finish({n: getattr(offsets, n) for n in OFFSET_COLUMNS if n in self.columns})
        info = self._info(share, micro_batch, chunk, offsets)
        sharder = ChunkSharder(
            layout=self.source.spec.layout,
            cp_size=self.place.cp_size,
            cp_rank=self.place.cp_rank,
            packs=chunk.offsets,
        )
        batch = Batch(
            tensors={name: placed.tensors[name] for name in self.columns},
            info=info,
            chunks=(Chunk(info=info, sharder=sharder),),
            pads=self._pads,
        )
        return BuiltBatch(
            step=step,
            micro_batch=micro_batch,
            chain=share.dealt.chain,
            batch=batch,
            placed=placed,
            num_tokens=chunk.num_local,
        )

    def _num_local(self, share: _StepShare, micro_batch: int, *, first: RankView) -> int:
        """Return L of a chunk whose first pack's view is ``first``; the others may be shorter or longer.

        Layouts that take several packs per chunk give a rank the same share of each. Uneven shares (layout
        magi) have another L in every pack, and take one pack per chunk.
        """
        slots: list[int] = share.dealt.slots[micro_batch].tolist()
        return len(first.padding_mask) * sum(slots) // slots[0]

    def _view(self, step: int, pack: int) -> RankView:
        wanted = None if pack == MISSING else pack
        return self.source.rank_view(step, wanted, cp_rank=self.place.cp_rank)

    def _info(
        self, share: _StepShare, micro_batch: int, chunk: _ChunkFacts, offsets: SlotOffsets
    ) -> BatchInfo:
        return BatchInfo(
            step=share.dealt.step,
            micro_batch=micro_batch,
            num_micro_batches=self.num_micro_batches,
            num_documents=len(chunk.documents),
            documents=tuple(chunk.documents),
            digest=chunk.digest,
            step_digest=share.digest,
            local_supervised=chunk.local_supervised,
            global_supervised=share.global_supervised,
            supervised_by_source=dict(share.supervised_by_source),
            cp_rank=self.place.cp_rank,
            cp_size=self.place.cp_size,
            dp_rank=self.place.dp_rank,
            dp_size=self.place.dp_size,
            layout=self.source.spec.layout.name,
            max_seqlen=_widest(offsets.cu_seqlens),
            max_seqlen_padded=_widest(offsets.cu_seqlens_padded),
        )

    def _step_share(self, step: int) -> _StepShare:
        if self._share is not None and self._share.dealt.step == step:
            return self._share
        dealt = self.source.step_share(step, self.place)
        # Summed by name: a corpus that was given twice counts twice.
        by_source = dict.fromkeys(self.source.sources, 0)
        for name, count in zip(self.source.sources, dealt.supervised.tolist(), strict=True):
            by_source[name] += count
        if not sum(by_source.values()):
            raise ValueError(f"step {step} has no supervised token, so no loss; it cannot be trained on")
        self._share = _StepShare(
            dealt=dealt,
            global_supervised=sum(by_source.values()),
            supervised_by_source=by_source,
            digest=dealt.digest(self.source.overlay_digest),
        )
        return self._share


class _ChunkFacts:
    """Gathers what is true of a chunk while its views go by."""

    def __init__(self) -> None:
        self.num_local = 0
        self.local_supervised = 0
        self.documents: list[int] = []
        self.offsets: list[SlotOffsets] = []
        self._hasher = xxhash.xxh3_64()
        self._digest: int | None = None

    @property
    def digest(self) -> int:
        """xxh3_64 of ids and labels, pack by pack."""
        return self._hasher.intdigest() if self._digest is None else self._digest

    def add(self, view: RankView) -> None:
        """Count in the next pack's view; nothing of its memory is kept."""
        self.num_local += len(view.padding_mask)
        self.local_supervised += view.local_supervised
        self.documents += view.documents.tolist()
        self.offsets.append(
            SlotOffsets(cu_seqlens=view.cu_seqlens.copy(), cu_seqlens_padded=view.cu_seqlens_padded.copy())
        )
        if view.chunk_digest is not None:
            self._digest = view.chunk_digest
        for column in (view.input_ids, view.labels):
            self._hasher.update(np.ascontiguousarray(column, dtype="<i4").data)


def _widest(offsets: npt.NDArray[np.int32]) -> int:
    # Half the time of np.diff, in every batch.
    return int((offsets[1:] - offsets[:-1]).max())
