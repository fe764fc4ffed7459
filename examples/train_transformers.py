"""A Hugging Face model, unchanged: torchrun --nproc-per-node 2 train_transformers.py plan --cp 2."""

import argparse
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM, LlamaConfig

from ringfeed.pipeline import Batch, Loader
from ringfeed.sharding.attention import hf
from ringfeed.sharding.loss import scaled_loss, token_loss_sum
from ringfeed.sharding.mesh import MeshShape
from ringfeed.sharding.mesh_build import build_device_mesh
from ringfeed.sharding.mesh_environment import read_rank_environment

CONFIG = LlamaConfig(
    vocab_size=259,  # of ringfeed's byte tokenizer
    hidden_size=64,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


def main() -> None:
    arguments = parse_arguments()
    # 1. Mesh: cp ranks share a chunk, dp ranks have different ones. gloo on CPUs, nccl on GPUs.
    world = read_rank_environment().world_size
    shape = MeshShape(dp_replicate=world // arguments.cp, cp=arguments.cp)
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = build_device_mesh(shape, kind)
    device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)
    rank = dist.get_rank()
    # 2. Model: any that looks its attention up; AutoModelForCausalLM.from_pretrained is the same.
    hf.register()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG, attn_implementation=hf.NAME).to(device)
    hf.check_model(model)
    wrapped = DistributedDataParallel(model, process_group=mesh.get_group("dp_cp"))
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
        loss, norm = train_step(wrapped, optimizer, micro_batches, mesh)
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
    model: DistributedDataParallel,
    optimizer: torch.optim.Optimizer,
    micro_batches: list[Batch],
    mesh: DeviceMesh,
) -> tuple[float, float]:
    """Return the loss of the step over all ranks, and the norm of its gradient."""
    step_loss = torch.zeros((), device=micro_batches[0].tensors["labels"].device)
    for batch in micro_batches:
        # Gradients are reduced once a step, with the last micro-batch.
        model.require_backward_grad_sync = batch is micro_batches[-1]
        # No labels: the model would shift them once more, and take the mean of its own tokens.
        logits = model(**batch.kwargs("hf"), ringfeed_group=mesh.get_group("cp")).logits[0]
        # 4. Loss: a sum over this rank's tokens, over the count of the whole step. "mean":
        #    DDP divides gradients by its dp * cp ranks, so the loss is multiplied by that.
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
    parser.add_argument("--checkpoint", type=Path, default=Path("transformers.pt"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
