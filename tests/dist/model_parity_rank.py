"""One of four ranks of ``test_model_parity.py``: SCRIPT FOLDER 4 RANK.

Every case of cp 1, 2 and 4 runs in this one process group. A mesh of 4 // cp data-parallel groups deals the
cases out, so that all ranks are at work. What became of each case goes to a file.
"""

import json
import sys
import traceback
from datetime import timedelta
from functools import cache, partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from ringfeed.pipeline.chunk_sharder import ChunkSharder
from ringfeed.sharding.attention import hf
from ringfeed.sharding.attention.allgather import allgather_attention, allgather_context
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.loss import scaled_loss, token_loss_sum
from ringfeed.sharding.mesh_build import build_device_mesh
from ringfeed.sharding.padding import slot_offsets

LENGTHS, TOTAL, VOCAB = [3, 1, 260, 37, 90, 17], 512, 97
# Slots of te at cp 4: pads between documents for every layout, and 72 after the last one.
OFFSETS = slot_offsets(LENGTHS, multiple=8, total=TOTAL)
STARTS = OFFSETS.cu_seqlens_padded[: len(LENGTHS)].tolist()
NUM_SUPERVISED = sum(length - 1 for length in LENGTHS)
CHANGED = 2
"""The document of which a token changes in the leak cases."""
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    # Wide enough that scores differ: with weights near zero every mask gives nearly the same.
    "initializer_range": 0.12,
    "pad_token_id": None,
}
LAYOUTS: dict[str, dict] = {
    "te": {},
    "head_tail": {},
    "contiguous": {},
    "whole_document": {},
    "whole_document-all-cut": {"threshold": 16},
    "magi": {},
    "magi-uneven": {"uneven": True, "chunk_size": 80, "min_chunks_per_rank": 1},
    "ptrr": {},
    "identity": {},
}
TOLERANCE = 1e-5


def make_model(name, attention):
    torch.manual_seed(0)
    chosen: dict[str, Any] = {"attn_implementation": attention}
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**CONFIG, **chosen)).train()
    # One of its two layers has a window.
    kinds = ["full_attention", "sliding_attention"]
    chosen |= {"use_sliding_window": True, "sliding_window": 24, "layer_types": kinds}
    return Qwen2ForCausalLM(Qwen2Config(**CONFIG, **chosen)).train()


def chunk_tensors():
    """Ids and labels [T]: pads have an id of their own, no label crosses a document."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = torch.full((TOTAL,), 7), torch.full((TOTAL,), -100)
    for start, length in zip(STARTS, LENGTHS, strict=True):
        ids[start : start + length] = torch.randint(VOCAB, (length,), generator=generator)
        labels[start : start + length - 1] = ids[start + 1 : start + length]
    return ids, labels


@cache
def unpacked(model_name):
    """Each document alone through the stock model, in chunk order; the loss is a mean over all of them."""
    model, logits = make_model(model_name, "eager"), torch.zeros(TOTAL, VOCAB)
    ids, labels = chunk_tensors()
    total = 0.0
    for start, length in zip(STARTS, LENGTHS, strict=True):
        rows = slice(start, start + length)
        alone = model(input_ids=ids[None, rows]).logits[0]
        loss = functional.cross_entropy(alone, labels[rows], reduction="sum") / NUM_SUPERVISED
        loss.backward()
        logits[rows] = alone.detach()
        total += loss.item()
    return SimpleNamespace(loss=total, logits=logits, grads={n: p.grad for n, p in model.named_parameters()})


def own_llama(model, ids, positions, attend):
    """Logits [L, V] by the model's weights, written out: no transformers code, ``attend`` on [L, heads, 16]."""
    weights = dict(model.named_parameters())
    angles = positions[:, None] * (1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16))
    cos, sin = (f(torch.cat([angles, angles], 1))[:, None] for f in (torch.cos, torch.sin))

    def turned(x):
        return x * cos + torch.cat([-x[..., 8:], x[..., :8]], -1) * sin

    x = functional.embedding(ids, weights["model.embed_tokens.weight"])
    for layer in range(2):
        of = partial(own_weight, weights, layer)
        y = rms_norm(x, of("input_layernorm"))
        q, k, v = (functional.linear(y, of(f"self_attn.{n}_proj")).unflatten(1, (-1, 16)) for n in "qkv")
        x = x + functional.linear(attend(turned(q), turned(k), v).flatten(1), of("self_attn.o_proj"))
        y = rms_norm(x, of("post_attention_layernorm"))
        gate = functional.silu(functional.linear(y, of("mlp.gate_proj")))
        x = x + functional.linear(gate * functional.linear(y, of("mlp.up_proj")), of("mlp.down_proj"))
    return functional.linear(rms_norm(x, weights["model.norm.weight"]), weights["lm_head.weight"])


def own_weight(weights, layer, name):
    return weights[f"model.layers.{layer}.{name}.weight"]


def rms_norm(x, weight):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def direct_path(model, ids, context, group):
    attend = partial(allgather_attention, context=context, group=group)
    return own_llama(model, ids, context.local_positions, attend)


def hf_path(model, ids, context, group):
    call = {"input_ids": ids[None], "position_ids": context.local_positions.long()[None], "use_cache": False}
    return model(**call, ringfeed_context=context, ringfeed_group=group).logits[0]


def checkpointed_path(model, ids, context, group):
    # The older name warns in newer versions.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    logits = hf_path(model, ids, context, group)
    model.gradient_checkpointing = False
    return logits


PATHS = {"direct": direct_path, "hf": hf_path, "hf-checkpointed": checkpointed_path, "hf-windows": hf_path}


class Share:
    """What one rank holds of the chunk."""

    def __init__(self, name, mesh):
        layout = make_layout(name.split("-")[0], **LAYOUTS[name])
        cp_size, cp_rank = mesh["cp"].size(), mesh["cp"].get_local_rank()
        self.sharder = ChunkSharder(layout=layout, cp_size=cp_size, cp_rank=cp_rank, packs=[OFFSETS])
        maps = self.sharder.index_maps
        self.context = allgather_context(OFFSETS.cu_seqlens, OFFSETS.cu_seqlens_padded, maps, cp_rank)
        self.group = mesh["cp"].get_group()
        self.rows = maps[cp_rank].positions
        self.is_real = self.context.local_document_ids >= 0
        self.cp_size, self.copies = cp_size, cp_size if name == "identity" else 1


def check_parity(path, name, mesh):
    model_name = "qwen2" if path == "hf-windows" else "llama"
    share, model, alone = Share(name, mesh), make_model(model_name, "ringfeed"), unpacked(model_name)
    ids, labels = (share.sharder.shard_token_tensor(x) for x in chunk_tensors())
    logits = PATHS[path](model, ids, share.context, share.group)
    loss = scaled_loss(
        token_loss_sum(logits, labels),
        global_supervised=NUM_SUPERVISED,
        reduction="sum",
        dp_size=1,
        cp_size=share.cp_size,
        copies=share.copies,
    )
    loss.backward()
    value = loss.detach()
    for tensor in (value, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(tensor, group=share.group)

    compare(value.item(), alone.loss, "loss", TOLERANCE)
    compare(logits.detach()[share.is_real], alone.logits[share.rows][share.is_real], "logits", TOLERANCE)
    for parameter_name, parameter in model.named_parameters():
        # Gradients of a mean are small: 1e-5 of the largest entry where that is below one.
        expected = alone.grads[parameter_name]
        scale = min(1.0, expected.abs().max().item())
        compare(parameter.grad, expected, parameter_name, TOLERANCE * scale)


def compare(found, expected, name, tolerance):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance, msg=lambda m: f"{name}: {m}")


def check_leak(path, name, mesh):
    share, model = Share(name, mesh), make_model("llama", "ringfeed")
    ids, labels = chunk_tensors()
    token = STARTS[CHANGED] + 100
    changes = {"a token": token, "a pad between": STARTS[1] + 1, "a pad at the end": TOTAL - 1}
    sees = (share.context.local_document_ids == CHANGED) & (share.rows >= token)
    before = leak_outputs(path, model, share, ids, labels)
    for what, position in changes.items():
        changed = ids.clone()
        changed[position] = (changed[position] + 1) % VOCAB
        after = leak_outputs(path, model, share, changed, labels)
        blind = share.is_real & ~sees if what == "a token" else share.is_real
        for found, expected in zip(after, before, strict=True):
            assert (found[blind] - expected[blind]).abs().max() <= 1e-6, what
        if what == "a token" and sees.any():
            assert ((after[0] - before[0])[sees].abs().amax(1) > 1e-4).all()


@torch.no_grad()
def leak_outputs(path, model, share, ids, labels):
    """Logits and losses of the rank's tokens; labels stay, whatever becomes of the ids."""
    local, targets = (share.sharder.shard_token_tensor(x) for x in (ids, labels))
    logits = PATHS[path](model, local, share.context, share.group)
    return logits, functional.cross_entropy(logits, targets, reduction="none")


def run_cases(mesh):
    """This rank's outcomes: case -> "ok" or a traceback. Each dp group has every n-th case."""
    cp_size = mesh["cp"].size()
    paths = PATHS if cp_size == 2 else ("direct", "hf")
    cases = [(check_parity, path, name) for name, path in product(LAYOUTS, paths)]
    if cp_size == 2:
        cases += [(check_leak, path, name) for name, path in product(LAYOUTS, ("direct", "hf"))]
    outcomes = {}
    for check, path, name in cases[mesh["dp"].get_local_rank() :: mesh["dp"].size()]:
        key = f"{check.__name__.removeprefix('check_')}/cp{cp_size}/{name}/{path}"
        try:
            check(path, name, mesh)
            outcomes[key] = "ok"
        except Exception:
            outcomes[key] = traceback.format_exc()
    return outcomes


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
    outcomes: dict[str, str] = {}
    for cp_size in (1, 2, 4):
        outcomes |= run_cases(build_device_mesh({"dp_shard": num_ranks // cp_size, "cp": cp_size}))
    (folder / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
