"""One rank of ``test_allgather_attention.py``: run every case, save outputs and gradients."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ringfeed.sharding.attention.allgather import allgather_attention, allgather_context
from ringfeed.sharding.layouts import make_layout


def run_case(case: dict, *, cp_size: int, cp_rank: int) -> dict[str, torch.Tensor]:
    layout = make_layout(case["layout"], **case["options"])
    offsets = {"cu_seqlens": case["cu_seqlens"], "cp_size": cp_size}
    padded = case["cu_seqlens_padded"]
    maps = [layout.index_map(padded, cp_rank=rank, **offsets) for rank in range(cp_size)]
    context = allgather_context(case["cu_seqlens"], padded, maps, cp_rank, window=case["window"])
    leaves = [maps[cp_rank].take(case[name]).requires_grad_() for name in ("q", "k", "v")]
    out = allgather_attention(*leaves, context=context, group=dist.group.WORLD)
    grads = torch.autograd.grad((out * maps[cp_rank].take(case["weight"])).sum(), leaves)
    names = ("grad_q", "grad_k", "grad_v")
    return {"out": out.detach(), **dict(zip(names, grads, strict=True))}


def main(folder: Path, num_ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{num_ranks}",
        world_size=num_ranks,
        rank=rank,
        timeout=timedelta(seconds=60),
    )
    cases = torch.load(folder / f"cases-{num_ranks}.pt")
    results = {name: run_case(case, cp_size=num_ranks, cp_rank=rank) for name, case in cases.items()}
    torch.save(results, folder / f"results-{num_ranks}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
