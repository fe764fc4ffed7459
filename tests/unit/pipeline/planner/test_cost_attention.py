"""Costs from a model's shape, held against operations that are counted one by one."""

import numpy as np
import pytest

from ringfeed.pipeline.planner.cost import cost_model_of
from ringfeed.pipeline.planner.cost_attention import AttentionCost


def costs(model, *lengths):
    return model.piece_costs(np.array(lengths, dtype=np.int64)).tolist()


def counted(length, *, full_layers, causal=True, window=None, kv_heads=2, vocab=0):
    """Operations of a forward pass of the small shape, query by query."""
    flops = 0
    for query in range(length):
        keys = [key for key in range(length) if not causal or key <= query]
        seen = [key for key in keys if window is None or key > query - window]
        # Scores and their product with the values: 2 * 4 operations each, 2 heads.
        flops += (full_layers * len(keys) + (3 - full_layers) * len(seen)) * 2 * (2 * 4 + 2 * 4)
    per_layer = 2 * 8 * 8 * 2 + 2 * 8 * (kv_heads * 4) * 2 + 3 * 2 * 8 * 20
    return flops + length * (3 * per_layer + 2 * 8 * vocab)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 9])
@pytest.mark.parametrize(
    ("options", "full_layers"),
    [
        ({}, 3),
        ({"causal": False}, 3),
        ({"window": 4}, 0),
        ({"window": 1, "window_layers": 2}, 1),
        ({"kv_heads": 1, "vocab": 5}, 3),
    ],
)
def test_a_cost_is_the_operations_of_a_forward_pass(length, options, full_layers):
    model = AttentionCost(hidden=8, heads=2, layers=3, ffn=20, **options)
    shared = {name: value for name, value in options.items() if name != "window_layers"}
    [cost] = costs(model, length)
    assert cost * model.flops_per_unit == counted(length, full_layers=full_layers, **shared)


def test_the_preset_is_the_plain_shape_with_all_pairs_counted():
    # 6 * hidden, of an MLP of 4 * hidden without a gate.
    shape = AttentionCost(hidden=4096, heads=32, layers=1, ffn=16_384, ffn_matrices=2, causal=False)
    assert shape.per_token == 24_576 * shape.per_pair


@pytest.mark.parametrize(
    "spec",
    [
        "attention:hidden=4096,heads=32,layers=32,ffn=11008",
        "attention:hidden=64,heads=2,layers=4,ffn=100,causal=false,head_dim=128,ffn_matrices=2",
        "attention:hidden=64,heads=3,layers=4,ffn=100,window=128,window_layers=2,kv_heads=1,head_dim=7,vocab=9",
    ],
)
def test_a_name_describes_its_model(spec):
    model = cost_model_of(spec)
    assert model.name == spec
    assert cost_model_of(model.name) == model


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("hidden=8,heads=2,layers=3", "needs ffn=N"),
        ("", "needs hidden=N, heads=N, layers=N, ffn=N"),
        ("hidden=8,heads=2,layers=3,ffn=0", "ffn must be an integer of at least 1, got 0"),
        ("hidden=8,heads=3,layers=3,ffn=9", "hidden=8 is not a multiple of heads=3; give head_dim"),
        ("hidden=8,heads=2,layers=3,ffn=9,window=4,causal=false", "window=4 needs causal attention"),
        ("hidden=8,heads=2,layers=3,ffn=9,window_layers=1", "has nothing to do; give window, too"),
        ("hidden=8,heads=2,layers=3,ffn=9,window=4,window_layers=4", "is more than layers=3"),
        ("hidden=8,heads=2,layers=3,ffn=9,causal=1", "causal must be true or false, got 1"),
        ("hidden=true,heads=2,layers=3,ffn=9", "hidden must be an integer of at least 1, got True"),
        ("hidden=8,heads=2,layers=3,ffn=1_0", "'ffn=1_0' is neither a whole number nor true or false"),
        ("hidden=8,hidden=8,heads=2", "'hidden=8' is no field, or is there twice"),
        ("width=8", "'width=8' is no field, or is there twice; fields: hidden, heads"),
    ],
)
def test_a_shape_that_is_none_is_refused(settings, told):
    with pytest.raises(ValueError, match=told):
        cost_model_of(f"attention:{settings}")


def test_a_piece_beyond_int64_is_refused_and_does_not_wrap():
    model = AttentionCost(hidden=7, heads=1, layers=1000, ffn=2**40)
    with pytest.raises(ValueError, match=r"makes a piece of 2000000000 tokens cost more than int64 holds"):
        costs(model, 2_000_000_000)
