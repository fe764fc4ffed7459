"""Attention "ringfeed" in an unchanged Hugging Face model on one rank, and the models that it refuses."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from ringfeed.sharding.attention import hf
from ringfeed.sharding.attention.allgather import allgather_context
from ringfeed.sharding.attention.flex_blocks import FlexBlocks
from ringfeed.sharding.attention.hf_mask import CausalMask
from ringfeed.sharding.layouts import make_layout

TINY = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    # Token 0 is not special here.
    "pad_token_id": None,
}
LENGTHS, STARTS, TOTAL = [37, 1, 20], [0, 40, 44], 72


@pytest.fixture(autouse=True)
def registered():
    hf.register()


def tiny(model=LlamaForCausalLM, config=LlamaConfig, attention="ringfeed", **changes):
    torch.manual_seed(0)
    return model(config(**{**TINY, **changes}, attn_implementation=attention))


def context(cp_size=1):
    real, slots = [0, 37, 38, 58, 58], [*STARTS, 64, TOTAL]
    maps = make_layout("contiguous").index_maps(slots, cp_size=cp_size, cu_seqlens=real)
    return allgather_context(real, slots, maps, 0)


def packed():
    """What the model is called with, documents of ``LENGTHS`` between pads."""
    made = context()
    ids = torch.randint(31, (1, TOTAL), generator=torch.Generator().manual_seed(1))
    positions = made.global_positions.long()[None]
    return {"input_ids": ids, "position_ids": positions, "use_cache": False, "ringfeed_context": made}


def each_alone(model, ids, **options):
    """Logits of each document in a call of its own, through a copy of the model with SDPA."""
    stock = tiny(type(model), type(model.config), "sdpa", **options)
    stock.load_state_dict(model.state_dict())
    documents = [ids[:, s : s + n] for s, n in zip(STARTS, LENGTHS, strict=True)]
    return torch.cat([stock(input_ids=document).logits[0] for document in documents])


def real_rows(x):
    return torch.cat([x[s : s + n] for s, n in zip(STARTS, LENGTHS, strict=True)])


MODELS: dict[str, tuple] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "mistral, window 8": (MistralForCausalLM, MistralConfig, {"sliding_window": 8}),
    "qwen2, window 8 in one layer": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {
            "sliding_window": 8,
            "layer_types": ["full_attention", "sliding_attention"],
            "use_sliding_window": True,
        },
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_packed_documents_equal_each_alone(name):
    model, config, options = MODELS[name]
    made, call = tiny(model, config, **options), packed()

    hf.check_model(made)
    logits = made(**call).logits[0]

    torch.testing.assert_close(
        real_rows(logits), each_alone(made, call["input_ids"], **options), rtol=0, atol=1e-5
    )


@torch.no_grad()
def test_the_context_s_kernel_attends_in_every_layer_and_window():
    model, config, options = MODELS["qwen2, window 8 in one layer"]
    made, call = tiny(model, config, **options), packed()
    used = []

    def flex(*args, **kwargs):
        used.append(kwargs["block_mask"])
        return flex_attention(*args, **kwargs)

    kernel = FlexBlocks(flex=lambda: flex)
    by_flex = made(**{**call, "ringfeed_context": call["ringfeed_context"].with_kernel(kernel)}).logits

    assert len({id(mask) for mask in used}) == len(used) == 2
    torch.testing.assert_close(real_rows(by_flex[0]), real_rows(made(**call).logits[0]), rtol=0, atol=1e-5)


def enable_checkpointing(model, use_reentrant):
    # The older name warns in newer versions.
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": use_reentrant})


def gradients(model, call):
    model.zero_grad()
    model(**call).logits.logsumexp(-1).sum().backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_layers_that_are_computed_again_see_the_same_batch(use_reentrant):
    model, call = tiny().train(), packed()
    expected = gradients(model, call)

    enable_checkpointing(model, use_reentrant)

    # Another batch in between must not matter to the first one's backward pass.
    loss = model(**call).logits.logsumexp(-1).sum()
    model.eval()(**{**packed(), "ringfeed_context": context()})
    model.train()
    model.zero_grad()
    loss.backward()
    found = [parameter.grad for parameter in model.parameters()]
    torch.testing.assert_close(found, expected)


# Dynamo's own look at .grad.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_model_takes_one_batch_after_another_without_being_compiled_again():
    torch._dynamo.reset()
    model = tiny(num_hidden_layers=1)
    compiled = torch.compile(model, backend="eager")
    graphs = torch._dynamo.utils.counters["stats"]
    seen = []
    for shift in range(3):
        call = packed()
        call["input_ids"] = (call["input_ids"] + shift) % 31
        torch.testing.assert_close(compiled(**call).logits, model(**call).logits)
        seen.append(graphs["unique_graphs"])

    assert seen[0] == seen[2]


def test_under_autocast_attention_runs_in_its_dtype():
    model, call = tiny(), packed()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**call).logits[0]
        model.set_attn_implementation("sdpa")
        rows = slice(0, LENGTHS[0])
        expected = model(input_ids=call["input_ids"][:, rows]).logits[0]

    assert logits.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(logits[rows], expected, rtol=0.05, atol=0.2)


def test_a_call_without_the_context_raises():
    call = packed()
    del call["ringfeed_context"]

    with pytest.raises(ValueError, match=r"without ringfeed_context, .* call model\(\*\*batch\.kwargs"):
        tiny()(**call)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"ringfeed_context": {"documents": 3}}, "must be an AllGatherContext, got dict"),
        ({"ringfeed_context": context().with_window((8, 0))}, r"has Window\(left=8, right=0\)"),
        ({"ringfeed_context": context(cp_size=2)}, "cut into 2 parts: pass the cp group"),
        ({"attention_mask": torch.ones(1, TOTAL)}, "attention_mask is given"),
        ({"attention_mask": torch.zeros(1, 1, TOTAL, TOTAL)}, "attention_mask is a Tensor"),
        ({"s_aux": torch.zeros(4)}, "LlamaAttention wants s_aux"),
        ({"is_causal": False}, "not causal|bidirectional"),
    ],
)
def test_a_call_that_says_something_else_is_refused(change, told):
    with pytest.raises(ValueError, match=told):
        tiny()(**{**packed(), **change})


def test_several_rows_are_refused():
    call = packed()
    for name in ("input_ids", "position_ids"):
        call[name] = call[name].expand(2, -1)

    with pytest.raises(ValueError, match=r"one row of packed documents, got query \[2, 4, 72, 8\]"):
        tiny()(**call)


def test_dropout_is_refused_in_training_only():
    model, call = tiny(attention_dropout=0.1), packed()

    model.eval()(**call)
    with pytest.raises(ValueError, match=r"dropout=0\.1 in attention"):
        model.train()(**call)


def test_a_model_with_more_than_plain_attention_is_refused():
    gemma = tiny(Gemma2ForCausalLM, Gemma2Config, layer_types=["full_attention"] * 2, head_dim=8)
    with pytest.raises(ValueError, match="Gemma2Attention wants softcap"):
        gemma(**packed())


def test_check_model_wants_attention_ringfeed():
    with pytest.raises(ValueError, match=r"attn_implementation is 'sdpa'; call hf\.register\(\)"):
        hf.check_model(tiny(attention="sdpa"))


def test_check_model_refuses_attention_that_is_not_looked_up():
    sizes = {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 31}
    model = tiny(BloomForCausalLM, BloomConfig, **sizes)

    with pytest.raises(ValueError, match="BloomForCausalLM has attention of its own"):
        hf.check_model(model)


def attend(layer, mask, **options):
    q, k, v = torch.randn(3, 1, 4, TOTAL, 8)
    return hf.hf_attention(layer, q, k, v, mask, **{"ringfeed_context": context(), **options})


def test_attention_that_is_not_causal_is_refused():
    with pytest.raises(ValueError, match="SimpleNamespace is not causal; attention 'ringfeed' is"):
        attend(SimpleNamespace(is_causal=False), None)


def test_a_layer_and_its_mask_must_agree_on_the_window():
    with pytest.raises(ValueError, match="sliding_window=8, but its mask has None"):
        attend(SimpleNamespace(), CausalMask(window=None), sliding_window=8)


def test_an_older_transformers_is_refused(monkeypatch):
    # By name: transformers puts another module in its own place while it is imported.
    monkeypatch.setattr("transformers.__version__", "4.56.2")

    with pytest.raises(ImportError, match=r"needs transformers 4\.57 or newer, found 4\.56\.2"):
        hf.register()
