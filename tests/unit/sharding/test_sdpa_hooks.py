"""Which modules are hooked, what their forward sees, and what is left of it afterwards."""

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from ringfeed.sharding.attention.sdpa_hooks import attach_context_parallel_hooks, attach_cp_sdpa_hooks
from ringfeed.sharding.attention.sdpa_swap import process_swap

MESH = object()
PLAIN_SDPA = F.scaled_dot_product_attention


class Attention(nn.Module):
    """Records what it is called with, and what SDPA is meanwhile."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner, self.seen = inner or nn.ModuleDict(), {}

    def forward(self, x, attention_mask=None, is_causal=None, fail=None):
        self.seen = {"mask": attention_mask, "is_causal": is_causal, "sdpa": F.scaled_dot_product_attention}
        for module in self.inner.values():
            module(x)
        self.seen["sdpa after the inner one"] = F.scaled_dot_product_attention
        if fail is not None:
            raise fail
        return x


class MaskOnly(nn.Module):
    def forward(self, x, attention_mask=None):
        return x, attention_mask


class Anything(nn.Module):
    def forward(self, x, attention_mask=None, **kwargs):
        return x, attention_mask, kwargs


class OnlyX(nn.Module):
    def forward(self, x):
        return x


def model(**modules):
    return nn.ModuleDict({"layer": nn.ModuleDict(modules)})


def causal(module):
    attach_context_parallel_hooks(model(self_attn=module))
    return module


def swapped(module):
    attach_cp_sdpa_hooks(model(self_attn=module), MESH)
    return module


X = torch.zeros(1)
MASK = torch.ones(1)


class TestMask:
    @pytest.mark.parametrize("mask", [MASK, None])
    def test_a_mask_by_keyword_is_taken_away(self, mask):
        module = causal(Attention())

        module(X, attention_mask=mask, is_causal=False)

        assert (module.seen["mask"], module.seen["is_causal"]) == (None, True)

    @pytest.mark.parametrize("is_causal", [None, False])
    def test_a_mask_by_position_is_taken_away(self, is_causal):
        module = causal(Attention())

        module(X, MASK)
        assert (module.seen["mask"], module.seen["is_causal"]) == (None, True)
        module(X, MASK, is_causal)
        assert (module.seen["mask"], module.seen["is_causal"]) == (None, True)

    def test_a_call_without_a_mask_stays_as_it_is(self):
        module = causal(Attention())

        module(X)

        assert (module.seen["mask"], module.seen["is_causal"]) == (None, None)

    def test_the_callers_keywords_stay_as_they_are(self):
        kwargs = {"attention_mask": MASK}

        causal(Attention())(X, **kwargs)

        assert kwargs == {"attention_mask": MASK}

    def test_attaching_twice_is_the_same_as_once(self):
        module = Attention()
        for _ in range(2):
            causal(module)

        assert len(module._forward_pre_hooks) == 1

    def test_other_modules_are_not_hooked(self):
        modules = {name: Attention() for name in ("cross_self_attn", "attention", "self_attn_norm")}
        attach_context_parallel_hooks(model(**modules))
        attach_context_parallel_hooks(root := Attention())

        assert not any(module._forward_pre_hooks for module in (*modules.values(), root))

    def test_a_module_that_cannot_be_causal_is_refused_and_none_is_hooked(self):
        first = Attention()
        layers = nn.ModuleList([model(self_attn=first), model(self_attn=MaskOnly())])

        with pytest.raises(
            ValueError, match=r"1\.layer\.self_attn \(MaskOnly\) takes attention_mask, but not is_causal"
        ):
            attach_context_parallel_hooks(layers)
        assert not first._forward_pre_hooks

    def test_keywords_of_any_name_take_is_causal(self):
        assert causal(Anything())(X, MASK) == (X, None, {"is_causal": True})

    def test_a_module_without_a_mask_needs_no_is_causal(self):
        assert causal(OnlyX())(X) is X

    @pytest.mark.parametrize("wrap", [checkpoint_wrapper, lambda m: torch.compile(m, backend="eager")])
    def test_the_hook_is_on_the_wrapped_module(self, wrap):
        module = Attention()
        causal(wrap(module))

        assert len(module._forward_pre_hooks) == 1


class TestSdpa:
    def test_is_the_wrapper_inside_and_itself_outside(self):
        module = swapped(Attention())

        module(X)

        assert module.seen["sdpa"] is process_swap().wrapper
        assert F.scaled_dot_product_attention is PLAIN_SDPA

    @pytest.mark.parametrize("error", [ZeroDivisionError, RuntimeError])
    def test_is_restored_when_forward_raises(self, error):
        module = swapped(Attention())

        with pytest.raises(error):
            module(X, fail=error)

        assert F.scaled_dot_product_attention is PLAIN_SDPA

    def test_is_restored_by_the_next_forward_after_an_interrupt(self):
        module, outer = swapped(Attention()), swapped(Attention())
        with pytest.raises(KeyboardInterrupt):
            module(X, fail=KeyboardInterrupt)

        outer(X)
        module(X)

        assert F.scaled_dot_product_attention is PLAIN_SDPA

    def test_is_restored_when_another_hook_raises_before_ours(self):
        module = swapped(Attention())

        def failing(module, args):
            raise ZeroDivisionError

        for prepend in (True, False):
            handle = module.register_forward_pre_hook(failing, prepend=prepend)
            with pytest.raises(ZeroDivisionError):
                module(X)
            assert F.scaled_dot_product_attention is PLAIN_SDPA
            handle.remove()

    def test_stays_the_wrapper_after_an_inner_self_attention(self):
        inner = swapped(Attention())
        outer = Attention(nn.ModuleDict({"self_attn": inner}))
        swapped(outer)

        outer(X)

        wrapper = process_swap().wrapper
        assert (inner.seen["sdpa"], outer.seen["sdpa after the inner one"]) == (wrapper, wrapper)
        assert F.scaled_dot_product_attention is PLAIN_SDPA

    def test_a_late_patch_survives(self, monkeypatch):
        module = swapped(Attention())
        late = object()
        monkeypatch.setattr(F, "scaled_dot_product_attention", late)

        module(X)

        assert F.scaled_dot_product_attention is late

    def test_attaching_twice_is_the_same_as_once(self):
        module = Attention()
        for _ in range(2):
            swapped(module)

        assert (len(module._forward_pre_hooks), len(module._forward_hooks)) == (1, 1)

    def test_the_last_mesh_counts(self, monkeypatch):
        entered = []
        monkeypatch.setattr(process_swap(), "enter", lambda *call: entered.append(call))
        module, other = swapped(Attention()), object()
        attach_cp_sdpa_hooks(model(self_attn=module), other)

        module(X)

        assert entered == [(module, other)]

    def test_other_modules_are_not_hooked(self):
        modules = {name: Attention() for name in ("cross_self_attn", "attention")}
        attach_cp_sdpa_hooks(model(**modules), MESH)

        assert not any(module._forward_pre_hooks for module in modules.values())

    def test_outside_a_hooked_forward_the_wrapper_changes_nothing(self):
        x = torch.randn(1, 1, 4, 8)

        found = process_swap().wrapper(x, key=x, value=x, is_causal=True)

        torch.testing.assert_close(found, PLAIN_SDPA(x, x, x, is_causal=True))

    def test_another_threads_attention_stays_as_it_is(self):
        from concurrent.futures import ThreadPoolExecutor

        x = torch.randn(1, 1, 4, 8)

        class Elsewhere(nn.Module):
            def forward(self, _):
                assert F.scaled_dot_product_attention is process_swap().wrapper
                with ThreadPoolExecutor(1) as pool:
                    return pool.submit(F.scaled_dot_product_attention, x, x, x).result()

        torch.testing.assert_close(swapped(Elsewhere())(X), PLAIN_SDPA(x, x, x))
