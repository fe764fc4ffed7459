"""FSDP2 over all dp and cp ranks: torchrun --nproc-per-node 2 train_fsdp2.py plan --cp 2."""

import argparse
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from decoder import Decoder
from ringfeed.pipeline import Batch, Loader
from ringfeed.sharding.attention.allgather import allgather_attention
from ringfeed.sharding.loss import scaled_loss, token_loss_sum
from ringfeed.sharding.mesh import MeshShape
from ringfeed.sharding.mesh_build import build_device_mesh, flat_submesh
from ringfeed.sharding.mesh_environment import read_rank_environment


class GatheredAttention(nn.Module):
    """ringfeed's own attention: any layout, on a CPU too."""

    def __init__(self, cp_group: dist.ProcessGroup) -> None:
        super().__init__()
        self.cp_group = cp_group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **attention: Any) -> Tensor:
        return allgather_attention(q, k, v, group=self.cp_group, **attention)


class Training:
    """Model and optimizer, as torch.distributed.checkpoint wants them. A Loader is so by itself."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )


def main() -> None:
    arguments = parse_arguments()
    # 1. Mesh: weights are sharded over dp and cp together, since cp ranks need the same ones.
    world = read_rank_environment().world_size
    shape = MeshShape(dp_shard=world // arguments.cp, cp=arguments.cp)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = build_device_mesh(shape, kind)
    device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)
    rank = dist.get_rank()
    # 2. Model: sharded layer by layer.
    torch.manual_seed(0)
    model = Decoder(lambda: GatheredAttention(mesh.get_group("cp"))).to(device)
    for module in (*model.layers, model):
        fully_shard(module, mesh=flat_submesh(mesh, "dp_cp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # 3. Data: this rank's part of every chunk.
    loader = Loader(arguments.source, layout="whole_document", device=device, **shape.loader_ranks(rank))
    parts = {"training": Training(model, optimizer), "loader": loader}
    # .metadata is written last: without it a checkpoint was not finished.
    if saved := sorted(arguments.checkpoints.glob("step-*/.metadata")):
        dcp.load(parts, checkpoint_id=saved[-1].parent)

    batches = iter(loader)
    while micro_batches := list(islice(batches, loader.num_micro_batches)):
        loss, norm = train_step(model, optimizer, micro_batches, mesh)
        step = micro_batches[0].info.step
        if rank == 0:
            print(f"step {step} loss {loss:.5f} gradient {norm:.5f}", flush=True)
        # 6. Checkpoint: sharded weights, and the loader's state, which is the same on every rank.
        if (step + 1) % arguments.save_every == 0:
            dcp.save(parts, checkpoint_id=arguments.checkpoints / f"step-{step + 1:08d}")
        if step + 1 == arguments.steps:
            break
    dist.destroy_process_group()


def train_step(
    model: FSDPModule, optimizer: torch.optim.Optimizer, micro_batches: list[Batch], mesh: DeviceMesh
) -> tuple[float, float]:
    """Return the loss of the step over all ranks, and the norm of its gradient."""
    step_loss = torch.zeros((), device=micro_batches[0].tensors["labels"].device)
    for batch in micro_batches:
        # Gradients are reduced once a step, with the last micro-batch.
        model.set_requires_gradient_sync(batch is micro_batches[-1])
        ids, positions = batch.tensors["input_ids"], batch.tensors["position_ids"]
        logits = model(ids, positions, **batch.kwargs("allgather"))
        # 4. Loss: a sum over this rank's tokens, over the count of the whole step. "mean":
        #    FSDP divides gradients by its dp * cp ranks, so the loss is multiplied by that.
        loss = scaled_loss(
            token_loss_sum(logits, batch.tensors["labels"]),
            global_supervised=batch.info.global_supervised,
            reduction="mean",
            dp_size=batch.info.dp_size,
            cp_size=batch.info.cp_size,
            copies=batch.info.copies,
        )
        loss.backward()
        step_loss += loss.detach()
    # 5. Gradients are reduced already. The loss, for the log, is the mean over ranks, too.
    dist.all_reduce(step_loss, group=mesh.get_group("dp_cp"))
    step_loss /= batch.info.dp_size * batch.info.cp_size
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
    optimizer.step()
    optimizer.zero_grad()
    return step_loss.item(), norm.item()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", help="a plan or shards")
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=2, help="steps between checkpoints")
    parser.add_argument("--checkpoints", type=Path, default=Path("fsdp2"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
