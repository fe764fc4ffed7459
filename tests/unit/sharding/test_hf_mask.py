"""What a Hugging Face model asks for is read from transformers' own mask functions; nothing is built."""

from types import SimpleNamespace

import pytest
import torch
from transformers import masking_utils as hf_masks

from ringfeed.sharding.attention.hf_mask import CausalMask, describe_mask


def packed(function):
    """As transformers wraps it when positions restart."""
    return hf_masks.and_masks(function, hf_masks.packed_sequence_mask_function(torch.zeros(1, 8)))


@pytest.mark.parametrize("wrap", [lambda function: function, packed])
def test_a_causal_mask_has_no_window(wrap):
    assert describe_mask(mask_function=wrap(hf_masks.causal_mask_function)) == CausalMask(window=None)


@pytest.mark.parametrize("wrap", [lambda function: function, packed])
def test_a_sliding_mask_has_its_window(wrap):
    function = wrap(hf_masks.sliding_window_causal_mask_function(7))

    assert describe_mask(mask_function=function) == CausalMask(window=7)


OTHERS = {
    "chunked": hf_masks.chunked_causal_mask_function(4, torch.zeros(1)),
    "bidirectional": getattr(hf_masks, "bidirectional_mask_function", None) or (lambda *_: True),
    "joined": hf_masks.or_masks(hf_masks.causal_mask_function, lambda *_: True),
    "user's": hf_masks.and_masks(hf_masks.causal_mask_function, lambda *_: True),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("wrap", [lambda function: function, packed])
def test_any_other_mask_is_refused(name, wrap):
    with pytest.raises(ValueError, match=r"the model wants the mask '.*'; attention 'ringfeed' is causal"):
        describe_mask(mask_function=wrap(OTHERS[name]))


def test_a_mask_function_that_cannot_be_read_is_refused():
    with pytest.raises(ValueError, match="cannot be read"):
        describe_mask(mask_function=SimpleNamespace)


def test_layers_that_mix_tokens_without_attention_are_refused():
    config = SimpleNamespace(layer_types=["linear_attention", "full_attention"])

    with pytest.raises(ValueError, match=r"layers of type 'linear_attention', which would mix"):
        describe_mask(mask_function=hf_masks.causal_mask_function, config=config)


def test_an_attention_mask_is_refused():
    with pytest.raises(ValueError, match="attention_mask is given"):
        describe_mask(mask_function=hf_masks.causal_mask_function, attention_mask=torch.ones(1, 8))
