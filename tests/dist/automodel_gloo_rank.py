"""One rank of ``test_automodel_gloo.py``: run every check's part on this rank, save what came out."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from ringfeed.sharding import automodel

WEIGHTS = torch.tensor([0.0, 1, 6, 7, 2, 3, 4, 5])


def thd_batch():
    tokens = torch.arange(10, 26).reshape(2, 8)
    lengths = torch.tensor([[3, 4], [7, -1000]])
    slots = torch.tensor([[4, 4], [8, -1000]])
    return {
        "input_ids": tokens,
        "labels": tokens + 1,
        "position_ids": torch.arange(8).expand(2, -1).clone(),
        "seq_lens": lengths,
        "seq_lens_padded": slots,
    }


def row_batch(width):
    tokens = torch.arange(1, 1 + 2 * width).reshape(2, width)
    return {
        "input_ids": tokens,
        "labels": tokens + 1,
        "padding_mask": torch.zeros(2, width, dtype=torch.bool),
        "position_ids": torch.arange(width).expand(2, -1).clone(),
    }


def run_thd(mesh):
    batch = thd_batch()
    _, local, sharder = automodel._make_cp_batch_and_ctx(mesh, batch, use_te=True)
    features = torch.arange(16 * 3.0).reshape(2, 8, 3)
    part = sharder.shard_token_tensor(features)
    return {
        "local": local,
        "part": part,
        "gathered": sharder.gather_token_tensor(part, seq_dim=0),
        "trimmed": sharder.gather_token_tensor(part, seq_dim=0, trim=True),
        "mask": sharder.gather_token_tensor(local["padding_mask"], seq_dim=0, trim=True),
        "last_dim": sharder.gather_token_tensor(part.T.contiguous(), seq_dim=-1, trim=True),
    }


def run_round_robin(mesh, width):
    batch = row_batch(width)
    before = {name: value.clone() for name, value in batch.items()}
    context, made, sharder = automodel._make_cp_batch_and_ctx(mesh, batch)
    results: dict = {"widths_before": {name: value.shape[1] for name, value in made.items()}}
    with context():
        results["inside"] = {name: value.clone() for name, value in made.items()}
    results["after"] = dict(made)
    results["untouched"] = all(torch.equal(batch[name], before[name]) for name in before)
    tensor = torch.rand(2, width, generator=torch.Generator().manual_seed(3))
    part = sharder.shard_token_tensor(tensor, fill=-1)
    results["tensor"] = tensor
    results["gathered"] = sharder.gather_token_tensor(part)
    results["trimmed"] = sharder.gather_token_tensor(part, trim=True)
    results["unsharded"] = automodel.unshard_context_parallel_tensor(mesh["cp"], part, seq_dim=1)
    return results


def run_contiguous(mesh):
    sharder = automodel.ContextParallelSharder(
        device_mesh=mesh,
        shard_batch=automodel.shard_batch_contiguous,
        local_token_global_indices=automodel.contiguous_local_indices,
    )
    _, local = sharder.shard(row_batch(6))
    tensor = torch.arange(12).reshape(2, 6)
    part = sharder.shard_token_tensor(tensor, fill=-1)
    return {"local": local, "part": part, "trimmed": sharder.gather_token_tensor(part, trim=True)}


def run_gradients(mesh, rank):
    """Of a loss that every rank computes alike, and of one whose ranks take other tokens each."""
    cp_mesh = mesh["cp"]
    indices = automodel.round_robin_local_indices(cp_mesh, len(WEIGHTS))
    results = {}
    for name in ("alike", "divided", "other_tokens"):
        part = torch.zeros(1, len(indices), requires_grad=True)
        whole = automodel.gather_token_tensor_by_indices(cp_mesh, part, indices)
        loss = (whole[0] * WEIGHTS).sum()
        if name == "divided":
            loss = loss / cp_mesh.size()
        if name == "other_tokens":
            mine = slice(4 * rank, 4 * rank + 4)
            loss = (whole[0, mine] * WEIGHTS[mine]).sum()
        (grad,) = torch.autograd.grad(loss, part)
        results[name] = grad[0]
    results["expected"] = WEIGHTS[indices]
    return results


def run_refusal(mesh):
    try:
        # Both ranks claim the same positions.
        automodel.gather_token_tensor_by_indices(mesh["cp"], torch.zeros(1, 2), torch.arange(2))
    except ValueError as error:
        return {"message": str(error)}
    return {"message": ""}


def main(folder: Path, num_ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{num_ranks}",
        world_size=num_ranks,
        rank=rank,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (1, num_ranks), mesh_dim_names=("dp", "cp"))
    results = {
        "thd": run_thd(mesh),
        "padded": run_round_robin(mesh, 6),
        "exact": run_round_robin(mesh, 8),
        "contiguous": run_contiguous(mesh),
        "gradients": run_gradients(mesh, rank),
        "refusal": run_refusal(mesh),
    }
    torch.save(results, folder / f"results-{num_ranks}-{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
