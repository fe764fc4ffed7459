"""Checks of hooked attention under compile, checkpointing and copying, run by ``checked_rank.py``.

Torch's ring has no CPU kernel. The attention that is patched in here gathers its sharded operands, so it
is right only if the hooks marked them.
"""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate, Shard

from ringfeed.sharding.attention.dispatcher import cp_dispatcher_suspended
from ringfeed.sharding.attention.sdpa_hooks import attach_context_parallel_hooks, attach_cp_sdpa_hooks
from ringfeed.sharding.attention.sdpa_swap import process_swap
from ringfeed.sharding.attention.torch_cp import create_context_parallel_ctx

PLAIN_SDPA = F.scaled_dot_product_attention
CHECKS = []  # type: ignore[var-annotated]


def check(function):
    CHECKS.append(function)
    return function


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x, attention_mask=None, is_causal=None):
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        attended = F.scaled_dot_product_attention(
            q, k, v, attn_mask=attention_mask, is_causal=bool(is_causal)
        )
        return self.out(attended.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn = Attention()

    def forward(self, x, attention_mask=None):
        return x + self.self_attn(x, attention_mask=attention_mask).tanh()


def make_model():
    torch.manual_seed(5)
    return nn.ModuleList([Layer(), Layer()])


def gathering_sdpa(mesh, calls):
    """SDPA for sharded operands in plain order; each call leaves a mark in ``calls``."""

    def gathering(q, k, v, **kwargs):
        calls.append(1)
        for x in (q, k, v):
            assert isinstance(x, DTensor)
            assert x.placements == (Shard(2),)
        out = PLAIN_SDPA(q.full_tensor(), k.full_tensor(), v.full_tensor(), **kwargs)
        return DTensor.from_local(out, mesh, [Replicate()]).redistribute(placements=[Shard(2)])

    return gathering


def expected(mesh):
    """Output part and gradients of the whole sequence on one rank; the mask is causal there."""
    model, x = make_model(), torch.randn(2, 12, 16, generator=torch.Generator().manual_seed(2))
    mask = torch.full((12, 12), float("-inf")).triu(1)
    out = x
    for layer in model:
        out = layer(out, attention_mask=mask)
    (out * torch.linspace(-1, 1, out.numel()).reshape(out.shape)).sum().backward()
    rows = slice(6 * mesh.get_local_rank(), 6 * mesh.get_local_rank() + 6)
    return x[:, rows], out[:, rows].detach(), rows, [p.grad for p in model.parameters()]


def assert_equals_the_whole(mesh, layers, parameters, *, calls):
    x, out, rows, grads = expected(mesh)
    with pytest.MonkeyPatch.context() as patch:
        marks: list[int] = []
        gathering = gathering_sdpa(mesh, marks)
        patch.setattr(F, "scaled_dot_product_attention", gathering)
        mask = torch.zeros(2, 1, 12, 12)
        found = x
        for layer in layers:
            found = layer(found, attention_mask=mask)
        weight = torch.linspace(-1, 1, x.numel() * 2).reshape(2, 12, 16)[:, rows]
        (found * weight).sum().backward()
        assert F.scaled_dot_product_attention is gathering
        assert len(marks) == calls, len(marks)
    torch.testing.assert_close(found, out, rtol=0, atol=1e-5)
    for parameter, grad in zip(parameters, grads, strict=True):
        dist.all_reduce(parameter.grad)
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=1e-5)
        parameter.grad = None


def hooked(mesh, model):
    for _ in range(2):
        attach_context_parallel_hooks(model)
        attach_cp_sdpa_hooks(model, mesh)
    return model


@check
def equals_the_whole_sequence(mesh):
    model = hooked(mesh, make_model())

    assert_equals_the_whole(mesh, model, list(model.parameters()), calls=2)


@check
def equals_the_whole_sequence_when_compiled(mesh):
    model = hooked(mesh, make_model())
    layers = [torch.compile(layer, backend="eager") for layer in model]

    assert_equals_the_whole(mesh, layers, list(model.parameters()), calls=2)
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert_equals_the_whole(mesh, layers, list(model.parameters()), calls=2)


@check
def equals_the_whole_sequence_when_compiled_in_place_before_hooking(mesh):
    model = make_model()
    for layer in model:
        layer.self_attn = torch.compile(layer.self_attn, backend="eager")
    hooked(mesh, model)

    assert_equals_the_whole(mesh, model, list(model.parameters()), calls=2)


@check
def equals_the_whole_sequence_when_the_attention_is_checkpointed(mesh):
    model = make_model()
    for layer in model:
        layer.self_attn = checkpoint_wrapper(layer.self_attn)
    hooked(mesh, model)

    # Once more in the recomputation of each.
    assert_equals_the_whole(mesh, model, list(model.parameters()), calls=4)


@check
def equals_the_whole_sequence_when_layers_are_checkpointed_and_compiled(mesh):
    model = hooked(mesh, make_model())
    layers = [torch.compile(checkpoint_wrapper(layer), backend="eager") for layer in model]

    assert_equals_the_whole(mesh, layers, list(model.parameters()), calls=4)


@check
def a_copy_is_hooked_as_well(mesh):
    model = copy.deepcopy(hooked(mesh, make_model()))
    attach_cp_sdpa_hooks(model, mesh)

    assert_equals_the_whole(mesh, model, list(model.parameters()), calls=2)


@check
def nothing_is_marked_while_the_ring_is_suspended(mesh):
    model = hooked(mesh, make_model())
    x = expected(mesh)[0]
    with create_context_parallel_ctx(mesh, [torch.zeros(4)], [0], set()), torch.no_grad():
        ring = F.scaled_dot_product_attention
        with cp_dispatcher_suspended(mesh):
            alone = model[0](x, attention_mask=torch.zeros(2, 1, 12, 12))
            assert F.scaled_dot_product_attention is PLAIN_SDPA
        assert F.scaled_dot_product_attention is ring

    torch.testing.assert_close(alone, make_model()[0](x, torch.full((6, 6), float("-inf")).triu(1)))


@check
def in_a_ring_context_the_ring_is_called_with_marked_operands(mesh):
    seen = []

    def recorded(q, k, v, **kwargs):
        seen.append((type(q), type(k), type(v)))
        return q

    model = hooked(mesh, make_model())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", recorded)
        with create_context_parallel_ctx(mesh, [torch.zeros(4)], [0], set()):
            ring = F.scaled_dot_product_attention
            model[0](torch.zeros(1, 2, 16))
            assert F.scaled_dot_product_attention is ring
    assert seen == [(DTensor, DTensor, DTensor)]


@check
def operands_are_marked_one_by_one(mesh):
    seen: list[torch.Tensor] = []

    class Mixed(nn.Module):
        def forward(self, x):
            # A key that is marked already, as after a tensor-parallel projection, hides nothing.
            k = DTensor.from_local(x, mesh, [Shard(2)])
            return F.scaled_dot_product_attention(x, k, x)

    def recorded(*operands):
        seen.extend(operands)
        return operands[0]

    attach_cp_sdpa_hooks(model := nn.ModuleDict({"self_attn": Mixed()}), mesh)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", recorded)
        out = model["self_attn"](torch.zeros(1, 2, 3, 4))
    assert [type(x) for x in seen] == [DTensor] * 3
    assert [x.shape for x in seen] == [(1, 2, 6, 4)] * 3
    assert type(out) is torch.Tensor


@check
def the_wrapper_is_off_outside(mesh):
    x = torch.randn(1, 2, 4, 8)

    assert F.scaled_dot_product_attention is PLAIN_SDPA
    assert not isinstance(process_swap().wrapper(x, x, x), DTensor)
