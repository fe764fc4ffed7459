"""One of four ranks of ``test_hf_loader.py``, dp 2 x cp 2: SCRIPT FOLDER 4 RANK.

A loader's batches of one step go through an unchanged Hugging Face model under FSDP2; full gradients and the
loss are held against the stock model over each piece of the step alone.
"""

import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.plan import Plan
from ringfeed.sharding.attention import hf
from ringfeed.sharding.loss import scaled_loss, token_loss_sum
from ringfeed.sharding.mesh import MeshShape
from ringfeed.sharding.mesh_build import build_device_mesh

SHAPE = MeshShape(dp_shard=2, cp=2)
CONFIG: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.12,
    "pad_token_id": None,
}
TOLERANCE = 1e-5


def make_model(attention):
    torch.manual_seed(0)
    config: dict[str, Any] = {**CONFIG, "attn_implementation": attention}
    return LlamaForCausalLM(LlamaConfig(**config)).train()


def unpacked_step(folder):
    """Loss and gradients of step 0, piece by piece from the plan's table and the documents."""
    documents = torch.load(folder / "documents.pt")
    rows = Plan.open(folder / "plan").step(0).to_pylist()
    model, loss_sum, count = make_model("eager"), torch.zeros(()), 0
    for row in rows:
        for document, start, length in zip(row["documents"], row["starts"], row["lengths"], strict=True):
            tokens = documents[document]
            # A piece that the document goes on after has the next token as its last label.
            labels = functional.pad(tokens[1:], (0, 1), value=-100)[start : start + length]
            logits = model(input_ids=tokens[None, start : start + length]).logits[0]
            loss_sum = loss_sum + functional.cross_entropy(logits, labels, reduction="sum")
            count += int((labels >= 0).sum())
    (loss_sum / count).backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    return SimpleNamespace(loss=(loss_sum / count).item(), count=count, grads=grads)


def sharded_model(mesh):
    model = make_model("ringfeed")
    hf.check_model(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh["dp_cp"])
    return fully_shard(model, mesh=mesh["dp_cp"])


def train_step(model, loader, *, group, reduction):
    """Forward and backward of the first step's micro-batches; return this rank's part of the loss."""
    logged = torch.zeros(())
    for batch in loader:
        info = batch.info
        assert info.global_supervised == EXPECTED.count
        logits = model(**batch.kwargs("hf"), ringfeed_group=group).logits[0]
        loss_sum = token_loss_sum(logits, batch.tensors["labels"])
        sizes = {"dp_size": info.dp_size, "cp_size": info.cp_size}
        counts = {"global_supervised": info.global_supervised, **sizes}
        scaled_loss(loss_sum, reduction=reduction, **counts).backward()
        logged += scaled_loss(loss_sum.detach(), reduction="sum", **counts)
        if info.micro_batch == info.num_micro_batches - 1:
            break
    return logged


def check_step(folder, mesh, *, layout, reduction, checkpointed):
    model = sharded_model(mesh)
    if reduction == "sum":
        # Each sharded module has a factor of its own.
        for module in (module for module in model.modules() if isinstance(module, FSDPModule)):
            module.set_gradient_divide_factor(1.0)
            # Else torch multiplies while it sums, which gloo cannot.
            module.set_force_sum_reduction_for_comms(True)
    if checkpointed:
        # The older name warns in newer versions.
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
    loader = Loader(folder / "plan", layout=layout, **SHAPE.loader_ranks(dist.get_rank()))
    loss = train_step(model, loader, group=mesh["cp"].get_group(), reduction=reduction)
    dist.all_reduce(loss, group=mesh["dp_cp"].get_group())
    grads = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}

    assert abs(loss.item() - EXPECTED.loss) <= TOLERANCE
    assert grads.keys() == EXPECTED.grads.keys()
    for name, expected in EXPECTED.grads.items():
        scale = min(1.0, expected.abs().max().item())
        compare(grads[name], expected, name, TOLERANCE * scale)


def compare(found, expected, name, tolerance):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, msg=lambda m: f"{name}: {m}")


def main(folder: Path, num_ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    hf.register()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        world_size=num_ranks,
        rank=rank,
        timeout=timedelta(seconds=60),
    )
    mesh = build_device_mesh(SHAPE)
    outcomes = {}
    for name, case in json.loads((folder / "cases.json").read_text()).items():
        try:
            check_step(folder, mesh, **case)
            outcomes[name] = "ok"
        except Exception:
            outcomes[name] = traceback.format_exc()
    (folder / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    EXPECTED = unpacked_step(Path(sys.argv[1]))
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
