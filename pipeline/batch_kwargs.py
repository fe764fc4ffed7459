"""What each attention backend wants to know of a micro-batch, in that backend's words.

In:   a ``Batch`` of one micro-batch (``pipeline/batch.py``)
Out:  keyword arguments: TransformerEngine's attention, a Hugging Face model, or ringfeed's own
      ``sharding/attention/allgather.py``

A new backend is one function and one line in ``_BACKENDS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from ringfeed.pipeline.batch import Batch, BatchInfo

__all__ = ["PadsChoice", "attention_kwargs"]

_PADS = ("attend", "exact")


class PadsChoice:
    """How TE treats padding between sequences: chosen once for a run, then fixed.

    TE picks its kernels by this flag, so a change in the middle would change the numbers.
    """

    __slots__ = ("_pads",)

    def __init__(self) -> None:
        self._pads: str | None = None

    def settle(self, pads: str) -> None:
        """Choose ``pads``, or confirm the choice.

        Raises:
            ValueError: if the run has chosen another one.
        """
        if self._pads not in (None, pads):
            raise ValueError(
                f"pads={pads!r}: this loader's batches were asked for pads={self._pads!r} before; it is one "
                "choice per run"
            )
        self._pads = pads


class _Maker(Protocol):
    def __call__(self, batch: Batch, *, pads: str) -> dict[str, Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Backend:
    make: _Maker
    fits: Callable[[BatchInfo], bool]
    wants: str
    """Which layouts and cp sizes fit, for the error message."""


def attention_kwargs(batch: Batch, backend: str, *, pads: str) -> dict[str, Any]:
    """Return the keyword arguments of ``backend``; ``Batch.kwargs`` has the contract."""
    if backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is not supported; supported: {', '.join(_BACKENDS)}")
    if pads not in _PADS:
        raise ValueError(f"pads={pads!r} must be one of {', '.join(_PADS)}")
    chosen = _BACKENDS[backend]
    if not chosen.fits(batch.info):
        fitting = [name for name, other in _BACKENDS.items() if other.fits(batch.info)]
        raise ValueError(
            f"layout {batch.info.layout!r} at cp {batch.info.cp_size} does not fit backend {backend!r}, "
            f"which wants {chosen.wants}; backends that fit this layout: {', '.join(fitting)}"
        )
    return chosen.make(batch, pads=pads)


def _te(batch: Batch, *, pads: str) -> dict[str, Any]:
    slots = _tensor(batch, "cu_seqlens_padded")
    # "attend" hands TE the slots as sequences: a document's pads trail it, so under a causal mask no
    # real token sees one, and every kernel stays available.
    real = slots if pads == "attend" else _tensor(batch, "cu_seqlens")
    batch.pads.settle(pads)
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": real,
        "cu_seqlens_kv": real,
        "cu_seqlens_q_padded": slots,
        "cu_seqlens_kv_padded": slots,
        "max_seqlen_q": batch.info.max_seqlen_padded,
        "max_seqlen_kv": batch.info.max_seqlen_padded,
        "pad_between_seqs": pads == "exact",
    }


def _hf_flash(batch: Batch, *, pads: str) -> dict[str, Any]:
    _refuse_exact(pads, "hf-flash")
    slots = _tensor(batch, "cu_seqlens_padded")
    return {
        "input_ids": _tensor(batch, "input_ids")[None],
        "position_ids": _tensor(batch, "position_ids")[None],
        "cu_seq_lens_q": slots,
        "cu_seq_lens_k": slots,
        "max_length_q": batch.info.max_seqlen_padded,
        "max_length_k": batch.info.max_seqlen_padded,
    }


def _allgather(batch: Batch, *, pads: str) -> dict[str, Any]:
    from ringfeed.sharding.attention.allgather import allgather_context

    _refuse_exact(pads, "allgather")
    sharder = batch.sharder
    offsets = sharder.offsets
    context = allgather_context(
        offsets.cu_seqlens, offsets.cu_seqlens_padded, sharder.index_maps, sharder.cp_rank
    )
    device = next(iter(batch.tensors.values())).device
    return {"context": context.to(device)}


def _refuse_exact(pads: str, backend: str) -> None:
    if pads != "attend":
        raise ValueError(f"pads={pads!r} is a choice of backend 'te'; leave it out for {backend!r}")


def _tensor(batch: Batch, name: str) -> Tensor:
    if name not in batch.tensors:
        raise ValueError(f"this needs the tensor {name!r}, which Loader(columns=...) left out; add it there")
    return batch.tensors[name]


_BACKENDS = {
    "te": _Backend(
        make=_te,
        fits=lambda info: info.layout == "te" or info.cp_size == 1,
        wants="layout 'te', or cp 1 with any layout",
    ),
    "hf-flash": _Backend(
        make=_hf_flash,
        fits=lambda info: info.cp_size == 1,
        wants="cp 1, with any layout",
    ),
    "allgather": _Backend(make=_allgather, fits=lambda info: True, wants="any layout"),  # noqa: ARG005
}
