"""One rank of ``test_torch_ring_cuda.py``: ring and FlexAttention CP against attention over the whole.

Usage: SCRIPT FOLDER NUM_RANKS RANK
"""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ringfeed.sharding.attention.flex_cp import (
    document_block_mask,
    flex_cp_attention,
    load_balancer,
    shard_block_mask,
)
from ringfeed.sharding.attention.sdpa_hooks import attach_context_parallel_hooks, attach_cp_sdpa_hooks
from ringfeed.sharding.attention.torch_cp import (
    create_context_parallel_ctx,
    get_train_context,
    shard_grad_buffer_for_cp,
)
from ringfeed.sharding.layouts import make_layout

NUM_TOKENS = 1024


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(64, 192)

    def forward(self, x, attention_mask=None, is_causal=None):
        q, k, v = (y.unflatten(-1, (2, 32)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask, is_causal=bool(is_causal))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()

    def forward(self, x, attention_mask=None):
        return self.self_attn(x, attention_mask=attention_mask)


def check_ring(mesh, *, compiled, rotate):
    torch.manual_seed(1)
    layer = Layer().cuda()
    x = torch.randn(2, NUM_TOKENS, 64, device="cuda")
    weight = torch.randn(2, 2, NUM_TOKENS, 32, device="cuda")
    q, k, v = (y.unflatten(-1, (2, 32)).transpose(1, 2) for y in layer.self_attn.qkv(x).chunk(3, -1))
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    (expected_grad,) = torch.autograd.grad((expected * weight).sum(), layer.self_attn.qkv.weight)

    attach_context_parallel_hooks(layer)
    if compiled:
        attach_cp_sdpa_hooks(layer, mesh)
        layer.compile()
    buffers = [x.clone(), weight.clone()]
    ring = create_context_parallel_ctx(mesh, buffers, [1, 2], set(), cp_rotate_method=rotate)
    train_context = get_train_context(
        enable_loss_parallel=False, enable_compiled_autograd=False, cp_context=ring
    )
    for _ in range(2):
        layer.zero_grad()
        with train_context():
            out = layer(buffers[0], attention_mask=torch.ones(1, device="cuda"))
            (out * buffers[1]).sum().backward()
        found = shard_grad_buffer_for_cp(expected, 2, mesh)
        torch.testing.assert_close(out, found, rtol=1e-3, atol=1e-3)
        grad = layer.self_attn.qkv.weight.grad
        dist.all_reduce(grad)
        torch.testing.assert_close(grad, expected_grad, rtol=2e-3, atol=2e-2)


def check_flex(mesh, layout_name):
    offsets = torch.tensor([0, 300, 301, 700, NUM_TOKENS])
    maps = make_layout(layout_name).index_maps(offsets, cp_size=mesh.size(), cu_seqlens=offsets)
    index_map = maps[mesh.get_local_rank()]
    generator = torch.Generator("cuda").manual_seed(2)
    q, k, v, weight = torch.randn(4, 1, 2, NUM_TOKENS, 32, device="cuda", generator=generator).unbind()
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    parts = [
        F.scaled_dot_product_attention(
            q[:, :, start:stop], k[:, :, start:stop], v[:, :, start:stop], is_causal=True
        )
        for start, stop in zip(offsets.tolist(), offsets[1:].tolist(), strict=False)
    ]
    expected = torch.cat(parts, 2)
    grads = torch.autograd.grad((expected * weight).sum(), (q, k, v))

    mask = document_block_mask(offsets, offsets, device="cuda")
    balancer = load_balancer(layout_name, maps, device="cuda")
    local = shard_block_mask(mesh, block_mask=mask, load_balancer=balancer)
    mine = [index_map.take(x.detach(), 2).requires_grad_() for x in (q, k, v)]
    attend = torch.compile(flex_cp_attention)
    out = attend(*mine, block_mask=local, cp_mesh=mesh)
    found = torch.autograd.grad((out * index_map.take(weight, 2)).sum(), mine)

    torch.testing.assert_close(out, index_map.take(expected, 2), rtol=1e-3, atol=5e-3)
    for actual, grad in zip(found, grads, strict=True):
        torch.testing.assert_close(actual, index_map.take(grad, 2), rtol=1e-3, atol=2e-2)


def main(folder: Path, num_ranks: int, rank: int) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method=f"file://{folder}/rendezvous",
        world_size=num_ranks,
        rank=rank,
        timeout=timedelta(seconds=60),
        device_id=torch.device("cuda", rank),
    )
    mesh = init_device_mesh("cuda", (num_ranks,), mesh_dim_names=("cp",))
    for rotate in ("allgather", "alltoall"):
        check_ring(mesh, compiled=False, rotate=rotate)
    check_ring(mesh, compiled=True, rotate="allgather")
    for layout_name in ("head_tail", "contiguous", "ptrr"):
        check_flex(mesh, layout_name)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
