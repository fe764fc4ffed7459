"""Context-parallel attention that gathers all keys and values: any layout, any index map.

In:   a chunk's offsets and index maps (``sharding/layouts.py``); a rank's q, k, v [L, ...]
Out:  the rank's attention output [L, H, Dv], equal to attention over whole documents

    context = allgather_context(cu_seqlens, cu_seqlens_padded, index_maps, cp_rank)  # per chunk
    out = allgather_attention(q, k, v, context=context, group=cp_group)              # per layer
    out = allgather_attention(q, k, v, context=context.with_window((4095, 0)), ...)  # sliding window

Ring attention moves keys around while it computes and wants a matching layout. This gathers
them first (``gather.py``), sorts them into chunk order, and attends under a mask made from
lengths: simpler, right for every layout, more memory. What attends is a kernel (``kernels.py``),
FlexAttention or SDPA. Layers may differ in their window: a mask is made when a layer first asks
for it and kept with the chunk.

Shapes: T slots in the chunk, L local tokens, N slots' count, R cp ranks.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from ringfeed.sharding.attention.block_attention import SdpaBlocks
from ringfeed.sharding.attention.chunk_context import AllGatherContext, allgather_context
from ringfeed.sharding.attention.flex_blocks import TRAINING_DEVICES, FlexBlocks
from ringfeed.sharding.attention.gather import gather_rows
from ringfeed.sharding.attention.kernels import AttentionKernel

__all__ = ["AllGatherContext", "allgather_attention", "allgather_context", "kernel_for"]


def allgather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    context: AllGatherContext,
    group: dist.ProcessGroup | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attend within each document under the context's window, over the keys of all ranks of ``group``.

    Args:
        q: [L, H, D].
        k: [L, Hkv, D], Hkv divides H.
        v: [L, Hkv, Dv].
        context: from ``allgather_context``, on the device of ``q``.
        group: the cp ranks in cp order; not needed where nothing is gathered.
        scale: factor on the scores; None is 1/sqrt(D).

    Returns:
        [L, H, Dv]. Padding rows are zero and give no gradient. Differentiable once.

    Raises:
        ValueError: if shapes, context and group do not belong together, or the context has a kernel
            that cannot attend to such tensors.
    """
    _check_shapes(q, k, v, context.num_local)
    kernel = context.kernel or kernel_for(q, k, v)
    obstacle = kernel.obstacle(q, k, v)
    if obstacle is not None:
        raise ValueError(
            f"kernel {kernel.name!r} cannot attend to these tensors: {obstacle}; leave the choice open "
            "(with_kernel(None)), or use SdpaBlocks()"
        )
    if context.num_parts > 1:
        k, v = _gather_keys(k, v, context, _checked(group, context))
    elif context.key_order is not None:
        k, v = k.index_select(0, context.key_order), v.index_select(0, context.key_order)
    return kernel.attend(q, k, v, mask=context.mask(kernel), scale=scale)


def kernel_for(q: Tensor, k: Tensor, v: Tensor) -> AttentionKernel:
    """Return FlexAttention where the device trains with it and the tensors fit, and SDPA everywhere else."""
    flex = FlexBlocks()
    # On other devices there is a forward pass at most, and it has to be compiled on the spot.
    if q.device.type in TRAINING_DEVICES and flex.obstacle(q, k, v) is None:
        return flex
    return SdpaBlocks()


def _gather_keys(
    k: Tensor, v: Tensor, context: AllGatherContext, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor]:
    """Return k and v of the whole chunk, in chunk order."""
    # One collective for both: small messages are bound by latency.
    both = torch.cat([k.flatten(1), v.flatten(1)], dim=1)
    gathered = gather_rows(both, part_length=context.part_length, group=group)
    if context.key_order is not None:
        gathered = gathered.index_select(0, context.key_order)
    keys, values = torch.split(gathered, [k[0].numel(), v[0].numel()], dim=1)
    return keys.reshape(-1, *k.shape[1:]), values.reshape(-1, *v.shape[1:])


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, num_local: int) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 3:
        raise ValueError(f"q, k and v are [tokens, heads, width], got {shapes}")
    if not len(q) == len(k) == len(v) == num_local:
        raise ValueError(f"the context describes {num_local} local tokens, got {shapes}")
    if q.shape[2] != k.shape[2] or k.shape[1] != v.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"heads of k and v divide those of q, q and k have one width: {shapes}")


def _checked(group: dist.ProcessGroup | None, context: AllGatherContext) -> dist.ProcessGroup:
    if group is None:
        raise ValueError(
            f"the chunk is cut into {context.num_parts} parts: pass group=, the cp process group"
        )
    if group.size() != context.num_parts or group.rank() != context.cp_rank:
        raise ValueError(
            f"the context is for cp rank {context.cp_rank} of {context.num_parts}, "
            f"this process is rank {group.rank()} of {group.size()} in the group"
        )
    return group
