"""A Hugging Face model on CUDA, attending by compiled FlexAttention, against the same model on the CPU."""

from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from ringfeed.sharding.attention import hf
from ringfeed.sharding.attention.allgather import allgather_context
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.padding import slot_offsets

DEVICE = "cuda"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="FlexAttention trains on a CUDA device only"),
]

CONFIG: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.12,
    "pad_token_id": None,
    "use_sliding_window": True,
    "sliding_window": 24,
    "layer_types": ["full_attention", "sliding_attention"],
    "attn_implementation": hf.NAME,
}
TOTAL = 512
OFFSETS = slot_offsets([3, 1, 260, 37, 90, 17], multiple=8, total=TOTAL)


def make_model(device):
    hf.register()
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**CONFIG)).to(device).train()


def packed(device):
    slots = OFFSETS.cu_seqlens_padded
    maps = make_layout("identity").index_maps(slots, cp_size=1)
    context = allgather_context(OFFSETS.cu_seqlens, slots, maps, 0).to(device)
    ids = torch.randint(97, (1, TOTAL), generator=torch.Generator().manual_seed(1)).to(device)
    positions = context.global_positions.long()[None]
    return {"input_ids": ids, "position_ids": positions, "use_cache": False, "ringfeed_context": context}


def outcome(model, call, *, forward=None):
    """Logits of real tokens and the gradients that they give, on the CPU."""
    real = call["ringfeed_context"].local_document_ids >= 0
    forward = model if forward is None else forward
    logits = forward(**call).logits[0][real]
    logits.logsumexp(-1).mean().backward()
    return [x.detach().cpu() for x in (logits, *(parameter.grad for parameter in model.parameters()))]


def close_to_cpu(found):
    for one, other in zip(found, outcome(make_model("cpu"), packed("cpu")), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_logits_and_gradients_equal_the_cpu_s():
    close_to_cpu(outcome(make_model(DEVICE), packed(DEVICE)))


def test_with_layers_computed_again():
    model = make_model(DEVICE)
    # The older name warns in newer versions.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})

    close_to_cpu(outcome(model, packed(DEVICE)))


# Dynamo's own look at .grad.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_with_the_model_compiled_around_attention():
    torch._dynamo.reset()
    model = make_model(DEVICE)

    close_to_cpu(outcome(model, packed(DEVICE), forward=torch.compile(model, backend="aot_eager")))


def test_in_bfloat16_under_autocast():
    with torch.autocast(DEVICE, torch.bfloat16):
        found = outcome(make_model(DEVICE), packed(DEVICE))[0]

    expected = outcome(make_model("cpu"), packed("cpu"))[0]
    torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.1)
