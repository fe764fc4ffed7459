"""Torch's load-balanced ring over SDPA: its contexts, and the tensors that go in and come out.

In:   a cp mesh and tensors of a whole sequence, or of one rank's part of it
Out:  contexts in which SDPA is the ring and the tensors are this rank's part; whole tensors again

The ring is causal over the whole sequence and knows of no documents: it is right for one document per
sequence, at its start (``require_one_document``). Its order is layout ``head_tail``.

Shapes: T tokens of the sequence, L = T/R local tokens, R cp ranks.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ContextDecorator, ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ringfeed.sharding.attention.gather import gather_rows
from ringfeed.sharding.attention.ring_context import RingContext, checked_dim
from ringfeed.sharding.index_map import merge
from ringfeed.sharding.layouts import HeadTailLayout
from ringfeed.sharding.offsets import as_offsets, as_real_offsets

__all__ = [
    "create_context_parallel_ctx",
    "get_train_context",
    "require_one_document",
    "shard_grad_buffer_for_cp",
    "unshard_context_parallel_tensor",
]


def require_one_document(cu_seqlens: Any, cu_seqlens_padded: Any) -> None:
    """Refuse a chunk over which torch's ring would attend wrongly: it sees one causal sequence.

    Counts slots that hold real tokens. None is legal, all is padding then; so is one at the start, whose
    pads come after it. Any other sequence would let a token see what is not its document's.

    Args:
        cu_seqlens: real offsets of the chunk, 1-D integers [N + 1].
        cu_seqlens_padded: slot offsets of the chunk, 1-D integers [N + 1].

    Raises:
        ValueError: if there is more than one real document, or the one does not begin the chunk.
    """
    slots = as_offsets(cu_seqlens_padded)
    real = np.flatnonzero(np.diff(as_real_offsets(cu_seqlens, slots)))
    if len(real) > 1:
        raise ValueError(
            f"the chunk has {len(real)} real documents, but torch's SDPA ring attends over a chunk as one "
            "document: plan packs of one document, or use a backend that takes documents ('allgather' and "
            "'flex' do with any layout)"
        )
    if len(real) and slots[real[0]]:
        raise ValueError(
            f"the chunk's document begins at token {slots[real[0]]}, after padding (an empty or skipped "
            "slot), which torch's SDPA ring would let it see: it must begin at token 0"
        )


def create_context_parallel_ctx(
    cp_mesh: Any,
    cp_buffers: list[Tensor],
    cp_seq_dims: list[int],
    cp_no_restore_buffers: set[Tensor],
    cp_rotate_method: str | None = None,
) -> AbstractContextManager[None]:
    """Return a context in which SDPA is torch's ring and the buffers are this rank's part.

    Entering cuts the buffers in place, T -> L; leaving makes them whole again, but for those of
    ``cp_no_restore_buffers``. The context may be entered again once it has been left: a buffer that was
    not restored is this rank's part then and stays as it is, unless it was filled with T tokens anew.

    Differs from the original: checks (below) come first, where torch cuts without balance, or at the wrong
    places; negative dims work; the rotate method is what it was after leaving, and is set on entering
    (the original sets it for the process, when called); the context can be entered more than once.

    Args:
        cp_mesh: one-dimensional mesh of R ranks. Asked for its size only, until the context is entered.
        cp_buffers: tensors [..., T, ...] without gradient, not sharing memory.
        cp_seq_dims: the dimension of T, for each buffer.
        cp_no_restore_buffers: those of the buffers that may stay cut.
        cp_rotate_method: ``"allgather"`` or ``"alltoall"``; None leaves it as it is.

    Raises:
        ValueError: if there is no buffer, dims or no-restore buffers do not belong to the buffers, a buffer
            requires gradient or shares memory with another, lengths differ, T is no multiple of 2R
            (R > 1), or there is no such rotate method; on entering, if a ring is on already.
    """
    return RingContext(cp_mesh, cp_buffers, cp_seq_dims, cp_no_restore_buffers, cp_rotate_method)


def get_train_context(
    enable_loss_parallel: bool,  # noqa: FBT001
    enable_compiled_autograd: bool,  # noqa: FBT001
    cp_context: AbstractContextManager[Any] | None = None,
) -> Callable[[], AbstractContextManager[None]]:
    """Return a factory of contexts for one forward and backward pass.

    With a ``cp_context``, SDPA may choose the flash and the memory-efficient kernel and no other: the ring
    has none else, and the math kernel would attend over the local part in silence.

    Differs from the original: with a ``cp_context``, too, the factory works any number of times, one
    context after the other. That holds for a context of ``create_context_parallel_ctx`` and for torch's
    own ``context_parallel``.

    Args:
        enable_loss_parallel: compute the loss over logits that are sharded by vocabulary.
        enable_compiled_autograd: compile the backward pass.
        cp_context: from ``create_context_parallel_ctx``; entered with each context.

    Raises:
        ValueError: on entering, if ``cp_context`` can be entered once only and has been.
    """

    @contextmanager
    def context() -> Iterator[None]:
        with ExitStack() as stack:
            if enable_loss_parallel:
                from torch.distributed.tensor.parallel import loss_parallel

                stack.enter_context(loss_parallel())
            if enable_compiled_autograd:
                from torch._dynamo.utils import maybe_enable_compiled_autograd

                stack.enter_context(maybe_enable_compiled_autograd(True))  # noqa: FBT003
            if cp_context is not None:
                from torch.nn.attention import SDPBackend, sdpa_kernel

                kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]
                stack.enter_context(sdpa_kernel(kernels))
                stack.enter_context(_fresh(cp_context))
            yield

    return context


def _fresh(context: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
    """Return a context that can be entered, and leave ``context`` unused where it works once only."""
    if not isinstance(context, ContextDecorator):
        return context
    try:
        # What lets a generator's context decorate a function that is called many times.
        return context._recreate_cm()
    except AttributeError as error:
        raise ValueError(
            f"cp_context={context!r} can be entered once and has been; make it with "
            "create_context_parallel_ctx, or leave it to the train context to enter it"
        ) from error


def shard_grad_buffer_for_cp(buffer: Tensor, seq_dim: int, cp_mesh: Any) -> Tensor:
    """Return a copy of this rank's part, pieces r and 2R - 1 - r of 2R: [..., T, ...] -> [..., L, ...].

    For a tensor that needs its gradient, which torch's context cannot cut in place. The gradient flows
    back to the rows that were taken.

    Raises:
        ValueError: if T is no multiple of 2R, or there is no such dim.
    """
    dim = checked_dim(buffer, seq_dim, name="buffer")
    size, rank = cp_mesh.size(), cp_mesh.get_local_rank()
    index_map = HeadTailLayout().index_map([0, buffer.shape[dim]], cp_size=size, cp_rank=rank)
    return index_map.take(buffer, dim)


@torch.no_grad()
def unshard_context_parallel_tensor(cp_mesh: Any, tensor: Tensor, *, seq_dim: int) -> Tensor:
    """Return the whole tensor on every rank: [..., L, ...] -> [..., T, ...]. No gradient flows back.

    Differs from the original: an odd L is refused, which no load-balanced tensor has and for which torch
    puts the parts together in plain order; dim 0 and negative dims work; torch's process-wide
    balancing flag has no say.

    Args:
        cp_mesh: one-dimensional mesh of R ranks; R = 1 returns ``tensor`` itself.
        tensor: this rank's part, in layout ``head_tail``; of the same shape on every rank.
        seq_dim: the dimension of L.

    Raises:
        ValueError: if L is odd, or there is no such dim.
    """
    size = cp_mesh.size()
    if size <= 1:
        return tensor
    dim = checked_dim(tensor, seq_dim, name="tensor")
    num_local = tensor.shape[dim]
    index_maps = HeadTailLayout().index_maps([0, num_local * size], cp_size=size)
    rows = gather_rows(tensor.movedim(dim, 0), part_length=num_local, group=cp_mesh.get_group())
    whole = merge(index_maps, torch.tensor_split(rows, size))
    return whole.movedim(0, dim).contiguous()
