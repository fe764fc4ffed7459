"""MagiAttention over shares that the layout ``magi`` has cut: keys, their check, and the attention itself.

In:   a ``MagiLayout`` and a mask; or a model and its batch's ``MagiWork`` (``automodel_magi.py``)
Out:  MagiAttention's runtime keys; attention modules that know their group and key

MagiAttention is only asked for keys and kernels. Tensors are cut, and padded each with its own fill, by the
index maps of ``sharding/magi/``: MagiAttention's ``dispatch`` pads with one value, its position ids are cut
off at the end of the stream, and its masks made of offsets are kept by a tensor's identity, so none of
these is used. Every rank must call with the same arguments.

Shapes: T tokens in the stream, T' with padding, L local tokens, H heads, D their size.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ringfeed.sharding.attention.magi_keys import MagiHeads, build_key, verify
from ringfeed.sharding.attention.magi_package import load_magi
from ringfeed.sharding.automodel_magi import MagiWork
from ringfeed.sharding.magi.layout import MagiLayout
from ringfeed.sharding.magi.partition import MagiPartition
from ringfeed.sharding.mesh import mesh_axis_size

__all__ = [
    "MagiHeads",
    "active_key",
    "build_key",
    "magi_attention",
    "prepare_model",
    "roll",
    "stamp_cp_group",
    "undispatch",
    "verify",
]

_IN_PLACE = MagiLayout(chunk_size=1)
"""Chunks of one token: on one rank nothing is padded or moved."""
_verified: "WeakKeyDictionary[nn.Module, tuple[MagiLayout, int]]" = WeakKeyDictionary()
"""What each model's first batch was checked for: the layout and the number of ranks."""


def stamp_cp_group(model: nn.Module, group: Any, *, key: Any = None, self_key: bool = False) -> int:
    """Give every attention module of the language model its group and key; return how many there are.

    Attention is what has "Attention" in its class's name. A tower beside ``language_model`` gets nothing.

    Args:
        model: the model, wrapped or not.
        group: the cp process group, put in ``cp_group``.
        key: of the batch, put in ``magi_key``.
        self_key: the forward makes a causal key of the length it meets; put in ``_magi_self_key``.

    Raises:
        ValueError: if there is no attention module.
    """
    modules = _attention_modules(model)
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no module with 'Attention' in its class's name; MagiAttention finds "
            "its group there"
        )
    for module in modules:
        vars(module).update(cp_group=group, magi_key=key, _magi_self_key=self_key)
    return len(modules)


@contextmanager
def active_key(model: nn.Module, key: Any) -> Iterator[None]:
    """Let the model attend under the mask of ``key``, and under what it had before, afterwards.

    The key is kept on the modules, so that activation checkpointing, whose forward runs again in another
    thread, sees it as well: keep the backward pass inside.
    """
    modules = _attention_modules(model)
    names = ("magi_key", "_magi_self_key")
    before = [{name: vars(module)[name] for name in names if name in vars(module)} for module in modules]
    try:
        for module in modules:
            vars(module).update(magi_key=key, _magi_self_key=False)
        yield
    finally:
        for module, had in zip(modules, before, strict=True):
            for name in names:
                vars(module).pop(name, None)
            vars(module).update(had)


def magi_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *, softmax_scale: float | None = None
) -> Tensor:
    """Return attention of this rank's queries to the whole stream's keys, [L, H, D] as ``query``.

    Args:
        module: a stamped attention module.
        query: [L, H, D], float16 or bfloat16, of this rank.
        key: [L, Hkv, D].
        value: [L, Hkv, D].
        softmax_scale: None for 1 / sqrt(D).

    Raises:
        ValueError: if the module is not stamped, or has neither a key nor leave to make one.
    """
    group = getattr(module, "cp_group", None)
    if group is None:
        raise ValueError(f"{type(module).__name__} has no cp_group; call prepare_model before the forward")
    runtime_key = getattr(module, "magi_key", None)
    if runtime_key is None:
        if not getattr(module, "_magi_self_key", False):
            raise ValueError(f"{type(module).__name__} has no magi_key; call prepare_model for each batch")
        heads = MagiHeads(num_heads_q=query.shape[1], num_heads_kv=key.shape[1], head_dim=int(query.shape[2]))
        runtime_key = _causal_key(len(query), heads, group)
    # The backward kernels take strides for granted: views of another order give NaN there.
    operands = [operand.contiguous() for operand in (query, key, value)]
    out: Tensor = load_magi().calc_attn(*operands, runtime_key, softmax_scale=softmax_scale)[0]
    return out


def undispatch(local: Tensor, key: Any, dim: int = 0) -> Tensor:
    """Return the whole stream from every rank's share, without padding; differentiable.

    Args:
        local: [..., L, ...], of this rank.
        key: of the batch.
        dim: the token axis.
    """
    whole: Tensor = load_magi().undispatch(local.movedim(dim, 0).contiguous(), key)
    return whole.movedim(0, dim)


def roll(
    local: Tensor, key: Any, *, shift: int, partition: MagiPartition, fill: float | None = None, dim: int = 0
) -> Tensor:
    """Move tokens along the stream without gathering it: token t gets what token t - shift had.

    Documents are not looked at; ``sharding/mtp.py`` makes labels that end with their document.

    Args:
        local: [..., L, ...], of this rank.
        key: of the batch.
        shift: tokens to the right; -1 gives each its successor's.
        partition: the layout's, of the same batch.
        fill: for tokens whose source lies outside [0, T), padding included; None leaves there what
            MagiAttention brings, which goes around the padded stream.
        dim: the token axis.
    """
    rolled: Tensor = load_magi().roll(local, shift, dim, key)
    if fill is None:
        return rolled
    source = partition.index_maps[int(key.cp_group.rank())].positions - shift
    outside = ((source < 0) | (source >= partition.grid.total)).to(local.device)
    shape = [1] * local.ndim
    shape[dim] = -1
    return rolled.masked_fill(outside.reshape(shape), fill)


def prepare_model(model: Any, work: MagiWork) -> None:
    """Give the model's attention the group and the key of its next batch.

    The first batch of a model, under each layout and number of ranks, is checked token by token; the
    others by chunk size and padding, which does not wait for the device.

    Raises:
        ImportError: if MagiAttention cannot be used.
        ValueError: if there is no process group or no attention module, or MagiAttention deals tokens out
            in another way.
    """
    load_magi()
    group = _group(work)
    root = getattr(model, "module", model)
    if work.slices is None or work.total is None:
        stamp_cp_group(root, group, self_key=True)
        return
    layout = work.layout or _IN_PLACE
    heads = MagiHeads.of_model(root, tp_size=max(1, mesh_axis_size(work.state.device_mesh, "tp")))
    key = build_key(layout, work.slices, work.total, heads=heads, group=group)
    checked = (layout, int(group.size()))
    if _verified.get(root) != checked:
        verify(layout.partition_slices(work.slices, work.total, cp_size=checked[1]), key)
        _verified[root] = checked
    stamp_cp_group(root, group, key=key)


def _causal_key(total: int, heads: MagiHeads, group: Any) -> Any:
    if int(group.size()) != 1:
        raise ValueError(f"a key made in the forward needs cp_size=1, got {int(group.size())}")
    return build_key(_IN_PLACE, _IN_PLACE.slices([0, total]), total, heads=heads, group=group)


def _group(work: MagiWork) -> Any:
    if work.state.cp_group is not None:
        return work.state.cp_group
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() == 1:
        return dist.group.WORLD
    raise ValueError(
        "MagiAttention needs a process group also for one rank, and the mesh has no cp axis; give the "
        "mesh one (size 1 will do)"
    )


def _attention_modules(model: nn.Module) -> list[nn.Module]:
    root = getattr(model, "module", model)
    inner = getattr(root, "model", None)
    text = getattr(root, "language_model", None) or getattr(inner, "language_model", None) or root
    return [module for module in text.modules() if "Attention" in type(module).__name__]
