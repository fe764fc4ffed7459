"""The plain loop under Ray Train: python ray_train.py ray-actor://ringfeed/feed --cp 2 --ranks 2.

Beside `ringfeed serve` with a Ray of its own, set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN for both, and
RAY_ADDRESS to the `ray_address` that `serve --json` prints.
"""

import argparse
import tempfile
from itertools import islice
from pathlib import Path
from typing import Any

import ray.train
import torch
import torch.distributed as dist
from ray.train.torch import TorchTrainer
from torch import nn
from train_plain import GatheredAttention, train_step

from decoder import Decoder
from ringfeed.pipeline import Loader
from ringfeed.sharding.mesh import MeshShape
from ringfeed.sharding.mesh_build import build_device_mesh


def train_rank(arguments: dict[str, Any]) -> None:
    """What every rank does, in a process of its own that is a Ray actor."""
    # 1. Mesh: Ray Train has started the process group; the mesh is laid over it.
    shape = MeshShape(dp_replicate=dist.get_world_size() // arguments["cp"], cp=arguments["cp"])
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    mesh = build_device_mesh(shape, kind)
    device = torch.device(kind, torch.cuda.current_device() if kind == "cuda" else None)
    rank = dist.get_rank()
    # 2. Model: the same on every rank.
    torch.manual_seed(0)
    model = Decoder(lambda: GatheredAttention(mesh.get_group("cp"))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    # 3. Data: a rank that is a Ray actor maps blocks from the object store of its node.
    source, ranks = arguments["source"], shape.loader_ranks(rank)
    with Loader(source, layout="whole_document", device=device, **ranks) as loader:
        parts = {"model": model, "optimizer": optimizer, "loader": loader}
        load(parts, device)
        batches = iter(loader)
        while micro_batches := list(islice(batches, loader.num_micro_batches)):
            loss, norm = train_step(model, optimizer, micro_batches, mesh)
            step = micro_batches[0].info.step
            if rank == 0:
                print(f"step {step} loss {loss:.5f} gradient {norm:.5f}", flush=True)
            save(parts, {"step": step, "loss": loss}, rank)
            if step + 1 == arguments["steps"]:
                break


def load(parts: dict[str, Any], device: torch.device) -> None:
    """Go on from the newest checkpoint of this run, if it has one: also after a rank died."""
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder, "state.pt"), map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])


def save(parts: dict[str, nn.Module], metrics: dict[str, float], rank: int) -> None:
    """Every rank reports; the checkpoint is rank 0's, as the loader's state is the same on all."""
    if rank != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save({name: part.state_dict() for name, part in parts.items()}, Path(folder, "state.pt"))
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("source", help="a service on this Ray, a plan or shards")
    parser.add_argument("--cp", type=int, default=2)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--storage", type=Path, default=Path("ray-train"), help="every node sees it")
    arguments = parser.parse_args()
    trainer = TorchTrainer(
        train_rank,
        train_loop_config=vars(arguments),
        scaling_config=ray.train.ScalingConfig(
            num_workers=arguments.ranks, use_gpu=torch.cuda.is_available()
        ),
        run_config=ray.train.RunConfig(name="ringfeed", storage_path=str(arguments.storage.resolve())),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
