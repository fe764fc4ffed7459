"""Put a batch's columns where the trainer wants them, with one copy on the host.

In:   int32 and bool columns of a view, valid only for a moment (``pipeline/view_source.py``)
Out:  tensors that a ``Batch`` owns (``pipeline/batch.py``), on the CPU or on a CUDA device

On the CPU the copy out of the source's staging buffer also widens int32 to the token dtype. With
CUDA the copy goes to pinned memory, a side stream carries int32 over and widens it there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from torch import Tensor

__all__ = ["MASK_COLUMN", "Buffers", "Placed", "Placer", "make_placer"]

MASK_COLUMN = "padding_mask"
"""The only column that is bool; all others hold tokens, labels or positions."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Placed:
    """Tensors that may still be under way to their device."""

    tensors: dict[str, Tensor]
    arrival: torch.cuda.Event | None
    """Recorded behind the copies; None if nothing is under way."""

    def wait(self) -> None:
        """Make the caller's current stream wait for the tensors, without stopping the CPU."""
        if self.arrival is None:
            return
        for tensor in self.tensors.values():
            stream = torch.cuda.current_stream(tensor.device)
            stream.wait_event(self.arrival)
            # They were allocated on the side stream; their memory must outlive the trainer's use.
            tensor.record_stream(stream)


class Buffers(Protocol):
    """Memory for one batch."""

    def write(self, name: str, start: int, values: npt.NDArray[Any]) -> None:
        """Copy ``values`` into column ``name`` from local token ``start`` on."""
        ...

    def finish(self, offsets: Mapping[str, npt.NDArray[np.int32]]) -> Placed:
        """Add the offsets, int32 [N + 1] each, and return all tensors."""
        ...


class Placer(Protocol):
    """Knows one device."""

    def open(self, columns: Sequence[str], num_local: int) -> Buffers:
        """Return memory for ``columns`` of ``num_local`` tokens, L."""
        ...


def make_placer(device: torch.device | str | int | None, *, token_dtype: torch.dtype) -> Placer:
    """Return the placer for ``device``; None is the CPU.

    Raises:
        ValueError: if the dtype is not int64 or int32, or the device is not there or not supported.
    """
    if token_dtype not in (torch.int64, torch.int32):
        raise ValueError(f"token_dtype={token_dtype} is not supported; take torch.int64 or torch.int32")
    try:
        place = torch.device("cpu" if device is None else device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device={device!r} is no torch device; take 'cpu', 'cuda' or 'cuda:N'") from error
    if place.type == "cpu":
        return _CpuPlacer(token_dtype)
    if place.type != "cuda":
        raise ValueError(f"device={str(place)!r} is not supported; take 'cpu', 'cuda' or 'cuda:N'")
    if not torch.cuda.is_available():
        raise ValueError(f"device={str(place)!r}: this torch sees no CUDA device; take device=None")
    count = torch.cuda.device_count()
    if place.index is not None and place.index >= count:
        raise ValueError(f"device={str(place)!r}: there are {count} CUDA devices, 0 to {count - 1}")
    return _CudaPlacer(place, token_dtype)


class _HostBuffers:
    """Columns in host memory, of any dtypes."""

    def __init__(self, columns: Mapping[str, torch.dtype], num_local: int, *, pinned: bool) -> None:
        self.tensors = {
            name: torch.empty(num_local, dtype=dtype, pin_memory=pinned) for name, dtype in columns.items()
        }
        self._arrays = {name: tensor.numpy() for name, tensor in self.tensors.items()}

    def write(self, name: str, start: int, values: npt.NDArray[Any]) -> None:
        # The one copy on the host: out of the source's staging buffer, widened on the way.
        np.copyto(self._arrays[name][start : start + len(values)], values)

    def finish(self, offsets: Mapping[str, npt.NDArray[np.int32]]) -> Placed:
        small = {name: torch.from_numpy(values.copy()) for name, values in offsets.items()}
        return Placed(tensors={**self.tensors, **small}, arrival=None)


class _CpuPlacer:
    def __init__(self, token_dtype: torch.dtype) -> None:
        self._token_dtype = token_dtype

    def open(self, columns: Sequence[str], num_local: int) -> Buffers:
        dtypes = {name: torch.bool if name == MASK_COLUMN else self._token_dtype for name in columns}
        return _HostBuffers(dtypes, num_local, pinned=False)


class _CudaPlacer:
    def __init__(self, device: torch.device, token_dtype: torch.dtype) -> None:
        self._device = device
        self._token_dtype = token_dtype
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def open(self, columns: Sequence[str], num_local: int) -> Buffers:
        # torch's host allocator caches pinned blocks, and gives one out again only when the copies
        # from it are done: this is a reused staging buffer without bookkeeping of our own.
        dtypes = {name: torch.bool if name == MASK_COLUMN else torch.int32 for name in columns}
        return _CudaBuffers(
            _HostBuffers(dtypes, num_local, pinned=True), self._device, self._token_dtype, self._stream
        )


class _CudaBuffers:
    def __init__(
        self, host: _HostBuffers, device: torch.device, token_dtype: torch.dtype, stream: torch.cuda.Stream
    ) -> None:
        self._host = host
        self._device = device
        self._token_dtype = token_dtype
        self._stream = stream

    def write(self, name: str, start: int, values: npt.NDArray[Any]) -> None:
        self._host.write(name, start, values)

    def finish(self, offsets: Mapping[str, npt.NDArray[np.int32]]) -> Placed:
        tensors = {}
        with torch.cuda.stream(self._stream):
            for name, tensor in self._host.tensors.items():
                moved = tensor.to(self._device, non_blocking=True)
                tensors[name] = moved if name == MASK_COLUMN else moved.to(self._token_dtype)
            for name, values in offsets.items():
                pinned = torch.from_numpy(values.copy()).pin_memory()
                tensors[name] = pinned.to(self._device, non_blocking=True)
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record(self._stream)
        return Placed(tensors=tensors, arrival=arrival)
