"""The context in which SDPA is torch's ring and tensors are cut in place.

In:   whole tensors [..., T, ...] and the mesh of the R ranks (``torch_cp.py`` has the contract)
Out:  the same tensor objects as [..., L, ...] while the context is entered
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from ringfeed.sharding.attention.dispatcher import beneath_ring, kept_options
from ringfeed.sharding.layouts import HeadTailLayout

__all__ = ["RingContext", "checked_dim"]

_ROTATE_METHODS = ("allgather", "alltoall")


class RingContext(AbstractContextManager[None]):
    """What ``create_context_parallel_ctx`` returns: torch's ``context_parallel``, any number of times."""

    def __init__(
        self,
        cp_mesh: Any,
        buffers: Sequence[Tensor],
        seq_dims: Sequence[int],
        no_restore: Iterable[Tensor] | None,
        rotate_method: str | None,
    ) -> None:
        if rotate_method is not None and rotate_method not in _ROTATE_METHODS:
            valid = ", ".join(map(repr, _ROTATE_METHODS))
            raise ValueError(f"cp_rotate_method={rotate_method!r} must be one of {valid}, or None")
        self._mesh, self._rotate_method = cp_mesh, rotate_method
        self._buffers = list(buffers)
        self._seq_dims = _checked_dims(self._buffers, seq_dims)
        kept = {id(buffer) for buffer in no_restore or ()}
        if not kept <= {id(buffer) for buffer in self._buffers}:
            raise ValueError("cp_no_restore_buffers holds a tensor that is not one of cp_buffers")
        self._stays_cut = [id(buffer) in kept for buffer in self._buffers]
        self._cut_length: int | None = None
        """L of the last time, when the no-restore buffers were cut."""
        self._active: ExitStack | None = None
        _check_memory(self._buffers)
        self._check_lengths(range(len(self._buffers)))

    def __enter__(self) -> None:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.distributed.tensor.experimental._attention import set_rotate_method

        if self._active is not None or beneath_ring(F.scaled_dot_product_attention) is not None:
            raise ValueError(
                "torch's ring is on already: its contexts do not nest; leave the one before entering another"
            )
        with ExitStack() as stack:
            options = stack.enter_context(kept_options())
            # With the flag off, torch cuts into plain runs; torch's FlexAttention CP turns it off.
            options.enable_load_balance = True
            if self._rotate_method is not None:
                set_rotate_method(self._rotate_method)
            whole = self._whole_buffers()
            num_tokens = self._check_lengths(whole)
            buffers, dims = [self._buffers[i] for i in whole], [self._seq_dims[i] for i in whole]
            if not buffers:
                # Torch takes device and length from the first buffer.
                buffers, dims = [torch.zeros(2 * self._mesh.size(), device=self._buffers[0].device)], [0]
            no_restore = {self._buffers[i] for i in whole if self._stays_cut[i]}
            stack.enter_context(
                context_parallel(
                    self._mesh, buffers=buffers, buffer_seq_dims=dims, no_restore_buffers=no_restore
                )
            )
            if whole:
                self._cut_length = num_tokens // self._mesh.size()
            self._active = stack.pop_all()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        active, self._active = self._active, None
        return active.__exit__(kind, error, traceback) if active is not None else None

    def _length(self, i: int) -> int:
        return self._buffers[i].shape[self._seq_dims[i]]

    def _whole_buffers(self) -> list[int]:
        """Return the buffers that are not this rank's part from the last time."""
        return [
            i
            for i in range(len(self._buffers))
            if not (self._stays_cut[i] and self._length(i) == self._cut_length)
        ]

    def _check_lengths(self, whole: Sequence[int]) -> int:
        """Return T, which all buffers of ``whole`` agree on and those that are cut already fit."""
        if not whole:
            return 0
        num_tokens, size = self._length(whole[0]), self._mesh.size()
        for i in range(len(self._buffers)):
            length = self._length(i) if i in whole else self._length(i) * size
            if length != num_tokens:
                raise ValueError(
                    f"cp_buffers[{i}] has {length} tokens in dim {self._seq_dims[i]}, "
                    f"cp_buffers[{whole[0]}] has {num_tokens}: they are cut as one sequence"
                )
        if size > 1:
            # Refuses what torch would cut into plain runs, for which its causal ring is not balanced.
            HeadTailLayout().index_map([0, num_tokens], cp_size=size, cp_rank=0)
        return num_tokens


def _checked_dims(buffers: Sequence[Tensor], seq_dims: Sequence[int]) -> list[int]:
    if not buffers:
        raise ValueError("cp_buffers is empty: the ring takes the sequence length from a buffer, give one")
    if len(buffers) != len(seq_dims):
        raise ValueError(f"cp_seq_dims has {len(seq_dims)} entries for {len(buffers)} cp_buffers")
    return [
        checked_dim(buffer, dim, name=f"cp_buffers[{i}]")
        for i, (buffer, dim) in enumerate(zip(buffers, seq_dims, strict=True))
    ]


def checked_dim(tensor: Tensor, dim: int, *, name: str) -> int:
    """Return ``dim`` counted from the front.

    Raises:
        ValueError: if ``tensor`` has no such dim.
    """
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ValueError(f"{name} has {tensor.ndim} dimensions, so no dim {dim}")
    return dim % tensor.ndim


def _check_memory(buffers: Sequence[Tensor]) -> None:
    """Refuse buffers that cannot be cut in place, or cannot without changing another one."""
    owners: dict[int, tuple[int, Tensor]] = {}
    for i, buffer in enumerate(buffers):
        if buffer.requires_grad:
            raise ValueError(
                f"cp_buffers[{i}] requires gradient and cannot be cut in place; "
                "cut it with _shard_grad_buffer_for_cp and leave it out"
            )
        first, owner = owners.setdefault(buffer.untyped_storage().data_ptr(), (i, buffer))
        if owner is not buffer and buffer.numel():
            raise ValueError(
                f"cp_buffers[{i}] shares memory with cp_buffers[{first}], and each is cut in place: "
                "give clone()s"
            )
