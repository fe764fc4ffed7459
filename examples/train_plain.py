"""A plain torch loop: torchrun --nproc-per-node 2 train_plain.py plan --cp 2."""

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from decoder import Decoder
from ringfeed.pipeline import Batch, Loader
from ringfeed.sharding.attention.allgather import allgather_attention
from ringfeed.sharding.loss import scaled_loss, token_loss_sum
from ringfeed.sharding.mesh import MeshShape
from ringfeed.sharding.mesh_build import build_device_mesh
from ringfeed.sharding.mesh_environment import read_rank_environment


class GatheredAttention(nn.Module):
    """ringfeed's own attention: any layout, on a CPU too."""

    def __init__(self, cp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.cp_group = cp_group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **attention: Any) -> Tensor:
        return allgather_attention(q, k, v, group=self.cp_group, **attention)


def main() -> None:
    arguments = parse_arguments()
    # 1. Mesh: cp ranks share a chunk, dp ranks have different ones. gloo on CPUs, nccl on GPUs.
    world = read_rank_environment().world_size
    shape = MeshShape(dp_replicate=world // arguments.cp, cp=arguments.cp)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = build_device_mesh(shape, kind)
    device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)
    rank = dist.get_rank()
    # 2. Model: the same on every rank.
    torch.manual_seed(0)
    model = Decoder(lambda: GatheredAttention(mesh.get_group("cp"))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # 3. Data: this rank's part of every chunk.
    loader = Loader(arguments.source, layout="whole_document", device=device, **shape.loader_ranks(rank))
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if arguments.checkpoint.exists():
        saved = torch.load(arguments.checkpoint, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])

    batches = iter(loader)
    while micro_batches := list(islice(batches, loader.num_micro_batches)):
        loss, norm = train_step(model, optimizer, micro_batches, mesh)
        step = micro_batches[0].info.step
        if rank == 0:
            print(f"step {step} loss {loss:.5f} gradient {norm:.5f}", flush=True)
        # 6. Checkpoint: the loader's state is the same on every rank.
        if rank == 0 and (step + 1) % arguments.save_every == 0:
            partial = arguments.checkpoint.with_suffix(".partial")
            torch.save({name: part.state_dict() for name, part in parts.items()}, partial)
            partial.replace(arguments.checkpoint)
        if step + 1 == arguments.steps:
            break
    dist.destroy_process_group()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list[Batch], mesh: DeviceMesh
) -> tuple[float, float]:
    """Return the loss of the step over all ranks, and the norm of its gradient."""
    step_loss = torch.zeros((), device=micro_batches[0].tensors["labels"].device)
    for batch in micro_batches:
        ids, positions = batch.tensors["input_ids"], batch.tensors["position_ids"]
        logits = model(ids, positions, **batch.kwargs("allgather"))
        # 4. Loss: a sum over this rank's tokens, over the count of the whole step.
        loss = scaled_loss(
            token_loss_sum(logits, batch.tensors["labels"]),
            global_supervised=batch.info.global_supervised,
            reduction="sum",
            dp_size=batch.info.dp_size,
            cp_size=batch.info.cp_size,
            copies=batch.info.copies,
        )
        loss.backward()
        step_loss += loss.detach()
    # 5. Gradients: added over all ranks, cp too. Divided by nothing: the loss has been already.
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp_cp"))
    dist.all_reduce(step_loss, group=mesh.get_group("dp_cp"))
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return step_loss.item(), norm.item()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", help="a plan or shards")
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--checkpoint", type=Path, default=Path("plain.pt"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
