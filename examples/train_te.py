"""TransformerEngine's attention: torchrun --nproc-per-node 2 train_te.py plan --cp 2. Needs GPUs."""

import argparse
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformer_engine.pytorch import DotProductAttention

from decoder import HEAD_WIDTH, NUM_HEADS, NUM_KV_HEADS, Decoder
from ringfeed.pipeline import Batch, Loader
from ringfeed.sharding.attention.te import attach_te_context_parallel
from ringfeed.sharding.loss import scaled_loss, token_loss_sum
from ringfeed.sharding.mesh import MeshShape
from ringfeed.sharding.mesh_build import build_device_mesh
from ringfeed.sharding.mesh_environment import read_rank_environment


def main() -> None:
    arguments = parse_arguments()
    # 1. Mesh: cp ranks share a chunk, dp ranks have different ones. gloo on CPUs, nccl on GPUs.
    world = read_rank_environment().world_size
    shape = MeshShape(dp_replicate=world // arguments.cp, cp=arguments.cp)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = build_device_mesh(shape, kind)
    device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)
    rank = dist.get_rank()
    # 2. Model: the same on every rank; its attention is told who the cp ranks are.
    torch.manual_seed(0)
    model = Decoder(make_attention).to(device)
    attach_te_context_parallel(model, cp_mesh=mesh["cp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # 3. Data: in the order in which TransformerEngine has its tokens.
    loader = Loader(arguments.source, layout="te", device=device, **shape.loader_ranks(rank))
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


def make_attention() -> nn.Module:
    """Return TransformerEngine's own attention, which is a ring once it is told of the cp ranks."""
    return DotProductAttention(
        NUM_HEADS,
        HEAD_WIDTH,
        num_gqa_groups=NUM_KV_HEADS,
        attention_dropout=0.0,
        qkv_format="thd",
        attn_mask_type="padding_causal",
    )


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: list[Batch], mesh: DeviceMesh
) -> tuple[float, float]:
    """Return the loss of the step over all ranks, and the norm of its gradient."""
    step_loss = torch.zeros((), device=micro_batches[0].tensors["labels"].device)
    for batch in micro_batches:
        ids, positions = batch.tensors["input_ids"], batch.tensors["position_ids"]
        # TransformerEngine's THD kernels take 16-bit numbers only.
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            logits = model(ids, positions, **batch.kwargs("te"))
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
    parser.add_argument("--checkpoint", type=Path, default=Path("te.pt"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
