"""What each attention backend wants to know of a micro-batch, in that backend's words.

In:   a ``Batch`` of one micro-batch (``pipeline/batch.py``)
Out:  keyword arguments, made in ``batch_kwargs_varlen.py`` (sequences by offsets) and
      ``batch_kwargs_masks.py`` (masks)

A new backend is one function there and one entry in ``_BACKENDS`` here.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline import batch_kwargs_masks as masks
from ringfeed.pipeline import batch_kwargs_varlen as varlen
from ringfeed.sharding.attention.te_limits import boundary_warning

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ringfeed.pipeline.batch import Batch, BatchInfo

__all__ = ["PadsChoice", "attention_kwargs", "backends_for_packs"]

_PADS = ("attend", "exact")


class PadsChoice:
    """How TE treats padding between sequences: chosen once for a run, then fixed.

    TE picks its kernels by this flag, so a change in the middle would change the numbers.
    """

    __slots__ = ("_has_warned", "_pads")

    def __init__(self) -> None:
        self._pads: str | None = None
        self._has_warned = False

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

    def warn_of_boundaries(self, num_boundaries: int) -> None:
        """Warn once in a run if a chunk has more boundaries than TE's kernels hold."""
        told = boundary_warning(num_boundaries)
        if told is not None and not self._has_warned:
            self._has_warned = True
            warnings.warn(told, RuntimeWarning, stacklevel=4)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Backend:
    by_pads: Mapping[str, Callable[[Batch], dict[str, Any]]]
    """What makes the arguments, for each choice of ``pads`` that the backend has."""
    layouts: tuple[str, ...] | None
    """Layouts that fit at every cp size; None: all."""
    any_layout_at_cp_1: bool = False
    """Whether all layouts fit where there is one rank, whose order is the chunk's."""
    max_documents: int | None = None
    """Real documents that one chunk may hold; None: any number."""

    @classmethod
    def without_choice(
        cls,
        make: Callable[[Batch], dict[str, Any]],
        layouts: tuple[str, ...] | None,
        *,
        any_layout_at_cp_1: bool = False,
        max_documents: int | None = None,
    ) -> _Backend:
        return cls(
            by_pads={"attend": make},
            layouts=layouts,
            any_layout_at_cp_1=any_layout_at_cp_1,
            max_documents=max_documents,
        )

    def fits(self, layout: str, cp_size: int) -> bool:
        is_free = self.layouts is None or (cp_size == 1 and self.any_layout_at_cp_1)
        return is_free or layout in (self.layouts or ())

    def takes(self, info: BatchInfo) -> bool:
        """Whether the chunk holds no more documents than the backend can tell apart."""
        # A whole step has a count for each of its micro-batches.
        counts = info.num_documents if isinstance(info.num_documents, tuple) else (info.num_documents,)
        return self.max_documents is None or max(counts) <= self.max_documents

    @property
    def wants(self) -> str:
        """Which layouts and cp sizes fit, for an error message."""
        if self.layouts is None:
            return "any layout"
        named = " or ".join(repr(layout) for layout in self.layouts)
        options = [f"layout {named}"] if named else []
        return ", or ".join([*options, *["cp 1 with any layout"] * self.any_layout_at_cp_1])


def backends_for_packs(layout: str, *, cp_size: int) -> list[str]:
    """Return the backends that take packs of many documents in ``layout`` at ``cp_size``."""
    return [
        name
        for name, backend in _BACKENDS.items()
        if backend.fits(layout, cp_size) and backend.max_documents is None
    ]


def attention_kwargs(batch: Batch, backend: str, *, pads: str) -> dict[str, Any]:
    """Return the keyword arguments of ``backend``; ``Batch.kwargs`` has the contract."""
    if not isinstance(backend, str) or backend not in _BACKENDS:
        raise ValueError(f"backend={backend!r} is not supported; supported: {', '.join(_BACKENDS)}")
    if pads not in _PADS:
        raise ValueError(f"pads={pads!r} must be one of {', '.join(_PADS)}")
    chosen = _BACKENDS[backend]
    if pads not in chosen.by_pads:
        having = " and ".join(repr(name) for name, other in _BACKENDS.items() if pads in other.by_pads)
        raise ValueError(f"pads={pads!r} is a choice of backends {having}; leave it out for {backend!r}")
    _check_fit(batch.info, backend)
    kwargs = chosen.by_pads[pads](batch)
    if len(chosen.by_pads) > 1:
        batch.pads.settle(pads)
        batch.pads.warn_of_boundaries(len(kwargs["cu_seqlens_q_padded"]))
    return kwargs


def _check_fit(info: BatchInfo, backend: str) -> None:
    chosen = _BACKENDS[backend]
    if not chosen.fits(info.layout, info.cp_size):
        raise ValueError(
            f"layout {info.layout!r} at cp {info.cp_size} does not fit backend {backend!r}, which wants "
            f"{chosen.wants}; {_fitting(info)}"
        )
    if not chosen.takes(info):
        raise ValueError(
            f"the chunk has {info.num_documents} real documents, backend {backend!r} attends over "
            f"{chosen.max_documents}: plan packs of one document, or use a backend that takes documents; "
            f"{_fitting(info)}"
        )


def _fitting(info: BatchInfo) -> str:
    names = [
        name
        for name, backend in _BACKENDS.items()
        if backend.fits(info.layout, info.cp_size) and backend.takes(info)
    ]
    return f"backends that fit this chunk and its layout: {', '.join(names)}"


_BACKENDS = {
    "te": _Backend(
        by_pads={pads: partial(varlen.te, pads=pads) for pads in _PADS},
        layouts=("te",),
        any_layout_at_cp_1=True,
    ),
    "megatron": _Backend(
        by_pads={pads: partial(varlen.megatron, pads=pads) for pads in _PADS},
        layouts=("te",),
        any_layout_at_cp_1=True,
    ),
    "hf-flash": _Backend.without_choice(varlen.hf_flash, (), any_layout_at_cp_1=True),
    "hf": _Backend.without_choice(masks.hf, None),
    "allgather": _Backend.without_choice(masks.allgather, None),
    "flex": _Backend.without_choice(masks.flex, None),
    "flex-cp": _Backend.without_choice(masks.flex_cp, ("head_tail", "contiguous", "ptrr")),
    "ring-flash": _Backend.without_choice(varlen.ring_flash, ("te",), any_layout_at_cp_1=True),
    "magi": _Backend.without_choice(masks.magi, ("magi",)),
    "torch-cp": _Backend.without_choice(
        masks.torch_cp, ("head_tail",), any_layout_at_cp_1=True, max_documents=1
    ),
}
