"""Checks of torch's ring contexts and its dispatcher, run on each rank by ``checked_rank.py``."""

import functools
import inspect

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.backends import cuda
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import _HeadTailLoadBalancer
from torch.distributed.tensor.experimental._context_parallel import _attention as internals

from ringfeed.sharding.attention.dispatcher import cp_dispatcher_suspended
from ringfeed.sharding.attention.torch_cp import (
    create_context_parallel_ctx,
    get_train_context,
    shard_grad_buffer_for_cp,
    unshard_context_parallel_tensor,
)

PLAIN_SDPA = F.scaled_dot_product_attention
NUM_TOKENS = 8
HEAD_TAIL = [[0, 1, 6, 7], [2, 3, 4, 5]]
CHECKS = []  # type: ignore[var-annotated]


def check(function):
    CHECKS.append(function)
    return function


def batch():
    ids = torch.arange(NUM_TOKENS).repeat(2, 1)
    return {"input_ids": ids, "position_ids": ids.clone(), "mask": ids[0] > 3}


def ring_over(mesh, tensors, *, rotate=None):
    return create_context_parallel_ctx(
        mesh, list(tensors.values()), [1, -1, 0], {tensors["input_ids"]}, cp_rotate_method=rotate
    )


def train_context_of(context):
    return get_train_context(enable_loss_parallel=False, enable_compiled_autograd=False, cp_context=context)


def is_ring():
    return F.scaled_dot_product_attention in internals._replaced_functions


def expect(actual, tokens):
    assert actual.tolist() == tokens, actual


@check
def buffers_are_cut_and_come_back(mesh):
    tensors, mine = batch(), HEAD_TAIL[mesh.get_local_rank()]

    with ring_over(mesh, tensors):
        expect(tensors["input_ids"], [mine, mine])
        expect(tensors["position_ids"], [mine, mine])
        expect(tensors["mask"], [token > 3 for token in mine])
        assert is_ring()

    expect(tensors["input_ids"], [mine, mine])
    expect(tensors["position_ids"], [list(range(NUM_TOKENS))] * 2)
    assert F.scaled_dot_product_attention is PLAIN_SDPA


@check
def the_train_context_can_be_entered_again(mesh):
    tensors, mine = batch(), HEAD_TAIL[mesh.get_local_rank()]
    train_context = train_context_of(ring_over(mesh, tensors))

    for _ in range(3):
        with train_context():
            # What was not restored is this rank's part from the first time on, and is not cut again.
            expect(tensors["input_ids"], [mine, mine])
            expect(tensors["position_ids"], [mine, mine])
            assert is_ring()
    tensors["input_ids"].resize_(2, NUM_TOKENS).copy_(torch.arange(NUM_TOKENS) + 100)
    with train_context():
        expect(tensors["input_ids"], [[token + 100 for token in mine]] * 2)


@check
def a_context_of_buffers_that_stay_cut_can_be_entered_again(mesh):
    ids, mine = batch()["input_ids"], HEAD_TAIL[mesh.get_local_rank()]
    context = create_context_parallel_ctx(mesh, [ids], [1], {ids})

    for _ in range(2):
        with context:
            expect(ids, [mine, mine])
            assert is_ring()
            assert internals._cp_options.enable_load_balance
    assert F.scaled_dot_product_attention is PLAIN_SDPA


@check
def torchs_own_context_can_be_entered_again_by_the_train_context(mesh):
    ids, mine = batch()["input_ids"], HEAD_TAIL[mesh.get_local_rank()]
    used = context_parallel(mesh, buffers=[ids], buffer_seq_dims=[1])
    train_context = train_context_of(used)

    for _ in range(2):
        with train_context():
            expect(ids, [mine, mine])
    with used:
        pass
    with pytest.raises(ValueError, match="can be entered once and has been"), train_context():
        pass


@check
def kernels_inside_the_train_context(mesh):
    def on():
        return cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()

    before = on()
    with train_context_of(ring_over(mesh, batch()))():
        assert on() == (True, True, False)
        assert not cuda.cudnn_sdp_enabled()
    assert on() == before
    with get_train_context(enable_loss_parallel=True, enable_compiled_autograd=True)():
        assert on() == before


@check
def the_rotate_method_is_what_it_was(mesh):
    methods, options = internals._RotateMethod, internals._cp_options
    for before in methods:
        options.rotate_method = before
        for name, inside in (
            ("alltoall", methods.ALL_TO_ALL),
            ("allgather", methods.ALL_GATHER),
            (None, before),
        ):
            context = ring_over(mesh, batch(), rotate=name)
            assert options.rotate_method is before
            with context:
                assert options.rotate_method is inside
            with pytest.raises(ZeroDivisionError), context:
                raise ZeroDivisionError
            assert options.rotate_method is before


@check
def buffers_are_balanced_whatever_the_process_wide_flag(mesh):
    tensors = batch()
    internals._cp_options.enable_load_balance = False
    try:
        with ring_over(mesh, tensors):
            expect(tensors["position_ids"][0], HEAD_TAIL[mesh.get_local_rank()])
            assert internals._cp_options.enable_load_balance
        assert not internals._cp_options.enable_load_balance
        whole = unshard_context_parallel_tensor(mesh, tensors["input_ids"], seq_dim=1)
        expect(whole[0], list(range(NUM_TOKENS)))
    finally:
        internals._cp_options.enable_load_balance = True


@check
def contexts_do_not_nest(mesh):
    outer, tensors = ring_over(mesh, batch()), batch()
    with outer:
        ring = F.scaled_dot_product_attention
        for inner in (outer, ring_over(mesh, tensors)):
            with pytest.raises(ValueError, match="do not nest"):
                inner.__enter__()
        assert F.scaled_dot_product_attention is ring
    expect(tensors["input_ids"][0], list(range(NUM_TOKENS)))
    assert F.scaled_dot_product_attention is PLAIN_SDPA


@check
def unshard_undoes_the_cut(mesh):
    for shape, dim in (([8], 0), ([8, 3], 0), ([2, 8, 3], 1), ([2, 8, 3], -2), ([3, 2, 8], 2), ([2, 0], 1)):
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(9).to(dtype)
            part = shard_grad_buffer_for_cp(whole, dim, mesh)
            found = unshard_context_parallel_tensor(mesh, part, seq_dim=dim)
            assert torch.equal(found, whole), (shape, dim, dtype)
            assert found.is_contiguous()
            assert found.dtype == dtype
    leaf = torch.zeros(2, 4, requires_grad=True)
    assert not unshard_context_parallel_tensor(mesh, leaf, seq_dim=1).requires_grad
    with pytest.raises(ValueError, match="6 tokens, but layout 'head_tail' at cp_size=2 needs a multiple"):
        unshard_context_parallel_tensor(mesh, torch.zeros(3), seq_dim=0)


@check
def shard_agrees_with_torch(mesh):
    whole = torch.arange(2 * 8 * 3).reshape(2, 8, 3)
    (expected,) = internals._context_parallel_buffers(mesh, [whole], [1], _HeadTailLoadBalancer(8, 2, "cpu"))

    torch.testing.assert_close(shard_grad_buffer_for_cp(whole, 1, mesh), expected)


@check
def the_suspended_ring_comes_back_as_it_was(mesh):
    def attend_and_fail(error):
        assert F.scaled_dot_product_attention is PLAIN_SDPA
        assert not internals.custom_ops.keys() <= handlers().keys()
        x = torch.randn(1, 1, 3, 4)
        assert F.scaled_dot_product_attention(x, x, x).shape == x.shape
        with cp_dispatcher_suspended(mesh):
            assert F.scaled_dot_product_attention is PLAIN_SDPA
        assert F.scaled_dot_product_attention is PLAIN_SDPA
        raise error

    with ring_over(mesh, batch()):
        ring = F.scaled_dot_product_attention
        for error in (ZeroDivisionError, KeyboardInterrupt):
            with pytest.raises(error), cp_dispatcher_suspended(mesh):
                attend_and_fail(error)
            assert F.scaled_dot_product_attention is ring
            assert internals.custom_ops.keys() <= handlers().keys()
    assert F.scaled_dot_product_attention is PLAIN_SDPA


@check
def the_suspended_ring_keeps_its_own_mesh_and_dim(mesh):
    other = init_device_mesh("cpu", (2,), mesh_dim_names=("other",))
    internals._dispatch_mode = internals._DispatchMode.MONKEY_PATCH
    internals._enable_context_parallel_dispatcher_impl(seq_dim=1, mesh=other)
    try:
        with cp_dispatcher_suspended(mesh):
            pass
        facts = inspect.getclosurevars(F.scaled_dot_product_attention).nonlocals
        assert facts["device_mesh"] is other
        assert facts["input_fn"].__self__.seq_dim == 1
    finally:
        internals._disable_context_parallel_dispatcher_impl()


@check
def a_renamed_internal_is_an_error(mesh):
    names = (
        "_replaced_functions",
        "_disable_cp_dtensor_dispatcher",
        "_enable_context_parallel_dispatcher_impl",
    )
    for name in names:
        with ring_over(mesh, batch()), pytest.MonkeyPatch.context() as patch:
            ring = F.scaled_dot_product_attention
            patch.delattr(internals, name)
            with pytest.raises(RuntimeError, match=f"has no .*{name}"), cp_dispatcher_suspended(mesh):
                raise AssertionError("the ring would have stayed on")
            assert F.scaled_dot_product_attention is ring
    with ring_over(mesh, batch()), pytest.MonkeyPatch.context() as patch:
        patch.setattr(internals, "_replaced_functions", {})
        with (
            pytest.raises(RuntimeError, match="does not list in _replaced_functions"),
            cp_dispatcher_suspended(mesh),
        ):
            raise AssertionError("the ring would have stayed on")


@check
def a_patch_over_the_ring_is_an_error(mesh):
    with ring_over(mesh, batch()), pytest.MonkeyPatch.context() as patch:
        ring = F.scaled_dot_product_attention
        patch.setattr(F, "scaled_dot_product_attention", functools.partial(ring))
        with pytest.raises(RuntimeError, match="put over it"), cp_dispatcher_suspended(mesh):
            raise AssertionError("the ring would have stayed on")


def handlers():
    return DTensor._op_dispatcher._custom_op_handlers
