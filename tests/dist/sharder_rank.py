"""One cp rank of ``test_chunk_sharder_gather.py``: SCRIPT FOLDER NUM_RANKS RANK."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringfeed.pipeline.chunk_sharder import ChunkSharder
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.mtp import mtp_labels
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


def check_callers_coordinates(layout_name, group, *, packs):
    """Shard and gather give a caller's own tensor back, and the gradients that one process would have."""
    size, rank = group.size(), group.rank()
    sharder = sharder_of(layout_name, cp_size=size, cp_rank=rank, packs=packs)
    num_real = sum(map(sum, packs))
    for coordinates, num_entries in (("real", num_real), ("real", num_real - 3), ("slots", 27)):
        x = torch.rand(num_entries, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        x.requires_grad_()
        part = sharder.shard_token_tensor(x, fill=5.0, coordinates=coordinates)
        asked = {"group": group, "coordinates": coordinates, "num_entries": num_entries}
        back = sharder.gather_token_tensor(part, **asked)
        assert torch.equal(back, x), (layout_name, coordinates)

        # The loss that one process would compute, computed by every rank alike.
        weights = torch.arange(2.0 * num_entries, dtype=torch.float64).reshape(num_entries, 2)
        (back * weights).sum().backward()
        assert x.grad is not None
        dist.all_reduce(x.grad, group=group)
        torch.testing.assert_close(x.grad, size * weights, msg=f"{layout_name}, {coordinates}")


def check_one_loss_under_both_reductions(layout_name, group, *, packs):
    """A scale that each rank applies to its part, as a parameter would: averaged, its gradient is right."""
    sharder = sharder_of(layout_name, cp_size=group.size(), cp_rank=group.rank(), packs=packs)
    x = torch.rand(sharder.num_tokens, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for divide_loss, divide_gradient in ((1, group.size()), (group.size(), 1)):
        scale = torch.ones((), dtype=torch.float64, requires_grad=True)
        gathered = sharder.gather_token_tensor(sharder.shard_token_tensor(x) * scale, group=group)
        (gathered.square().sum() / divide_loss).backward()
        assert scale.grad is not None
        dist.all_reduce(scale.grad, group=group)
        torch.testing.assert_close(scale.grad / divide_gradient, 2 * x.square().sum(), msg=layout_name)


def check_shift(layout_name, group, *, packs):
    """What lies ahead is found on whatever rank it is: the same as shifting the whole chunk."""
    sharder = sharder_of(layout_name, cp_size=group.size(), cp_rank=group.rank(), packs=packs)
    offsets = sharder.offsets
    labels = torch.arange(sharder.num_tokens)
    for depth in (0, 1, 2, 7):
        ahead = sharder.shift_token_tensor(sharder.shard_token_tensor(labels), depth, fill=-100, group=group)
        whole = mtp_labels(labels, offsets.cu_seqlens, offsets.cu_seqlens_padded, depth=depth)
        assert torch.equal(ahead, whole[sharder.index_map.positions]), (layout_name, depth)


def main() -> None:
    folder, num_ranks, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{num_ranks}", world_size=num_ranks, rank=rank
    )
    group = dist.group.WORLD
    for name in ("te", "head_tail", "contiguous", "whole_document"):
        check(name, group, packs=[[5, 9, 1]])
        check_callers_coordinates(name, group, packs=[[5, 9, 1]])
        check_one_loss_under_both_reductions(name, group, packs=[[5, 9, 1]])
        check_shift(name, group, packs=[[5, 9, 1]])
    check("te", group, packs=[[5, 9, 1], [], [32]])
    other = sharder_of("te", cp_size=2 * num_ranks, cp_rank=rank, packs=[[5]])
    with pytest.raises(ValueError, match=rf"cp rank {rank} of {2 * num_ranks}, but rank {rank} of"):
        other.gather_token_tensor(torch.zeros(len(other.index_map)), 0, group=group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
