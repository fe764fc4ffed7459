"""MagiAttention itself, where it is built: its deal is the layout's, and one rank attends as torch does."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

from ringfeed.sharding.attention import magi
from ringfeed.sharding.attention.magi_package import is_magi_available
from ringfeed.sharding.magi.layout import MagiLayout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="MagiAttention's kernels need a CUDA device"),
    pytest.mark.skipif(not is_magi_available(), reason="needs MagiAttention, built from source"),
]

HEADS = magi.MagiHeads(num_heads_q=4, num_heads_kv=2, head_dim=64)
OFFSETS = [0, 300, 301, 1001]


@pytest.fixture
def group(tmp_path):
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_one_rank_attends_as_torch_does(group):
    layout = MagiLayout(chunk_size=64)
    key = magi.build_key(layout, layout.slices(OFFSETS), OFFSETS[-1], heads=HEADS, group=group)
    magi.verify(layout, key)
    num_tokens = OFFSETS[-1] + key.pad_size
    made = torch.Generator("cuda").manual_seed(0)
    query, keys, values = (
        torch.randn(num_tokens, heads, 64, device="cuda", dtype=torch.bfloat16, generator=made)
        for heads in (4, 2, 2)
    )
    module = torch.nn.Identity()
    module.cp_group, module.magi_key = group, key

    out = magi.undispatch(magi.magi_attention(module, query, keys, values), key)

    for start, stop in pairwise(OFFSETS):
        q, k, v = (operand[start:stop].transpose(0, 1).float() for operand in (query, keys, values))
        wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        torch.testing.assert_close(out[start:stop].float(), wanted.transpose(0, 1), atol=2e-2, rtol=2e-2)
