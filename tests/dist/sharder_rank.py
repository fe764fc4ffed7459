"""One cp rank of ``test_chunk_sharder_gather.py``: SCRIPT FOLDER NUM_RANKS RANK."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringfeed.pipeline.chunk_sharder import ChunkSharder
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.padding import slot_offsets


def sharder_of(layout_name, *, cp_size, cp_rank, packs):
    layout = make_layout(layout_name)
    multiple = layout.length_multiple(cp_size)
    offsets = [slot_offsets(lengths, multiple=multiple, total=32) for lengths in packs]
    return ChunkSharder(layout=layout, cp_size=cp_size, cp_rank=cp_rank, packs=offsets)


def check(layout_name, group, *, packs):
    size, rank = group.size(), group.rank()
    sharder = sharder_of(layout_name, cp_size=size, cp_rank=rank, packs=packs)
    whole = torch.arange(sharder.num_tokens * 6, dtype=torch.float64).reshape(2, sharder.num_tokens, 3)
    part = sharder.shard_token_tensor(whole, 1, 0).requires_grad_()

    gathered = sharder.gather_token_tensor(part, 1, group=group)
    assert torch.equal(gathered, whole), layout_name

    # Each rank weighs the gathered tensor by its rank + 1: a part's gradient is the sum over ranks.
    (gathered * (rank + 1)).sum().backward()
    assert part.grad is not None
    assert torch.equal(part.grad, torch.full_like(part, sum(range(1, size + 1)))), layout_name


def main() -> None:
    folder, num_ranks, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{num_ranks}", world_size=num_ranks, rank=rank
    )
    group = dist.group.WORLD
    for name in ("te", "head_tail", "contiguous", "whole_document"):
        check(name, group, packs=[[5, 9, 1]])
    check("te", group, packs=[[5, 9, 1], [], [32]])
    other = sharder_of("te", cp_size=2 * num_ranks, cp_rank=rank, packs=[[5]])
    with pytest.raises(ValueError, match=rf"cp rank {rank} of {2 * num_ranks}, but rank {rank} of"):
        other.gather_token_tensor(torch.zeros(len(other.index_map)), 0, group=group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
