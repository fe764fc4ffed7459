"""MagiAttention's runtime keys for the layout ``magi``, and the check that both deal out alike.

In:   a ``MagiLayout``, a mask, heads and a process group
Out:  keys for ``magi.py``; an error that names what differs

Keys are made of ranges: MagiAttention's other way, of offsets, keeps a mask by its tensor's identity and
returns the old one after the tensor was written to.

Shapes: T tokens in the stream.
"""

import importlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ringfeed.sharding.attention.magi_package import load_magi
from ringfeed.sharding.magi.chunking import ChunkGrid
from ringfeed.sharding.magi.layout import MagiLayout
from ringfeed.sharding.magi.partition import MagiPartition
from ringfeed.sharding.magi.slices import MaskSlices, SliceTuple

__all__ = ["MagiHeads", "build_key", "verify"]

_ALGORITHMS = {
    "min_heap": "MinHeapDispatchAlg",
    "sequential_select": "SequentialDispatchAlg",
    "topp_heap": "ToppHeapDispatchAlg",
    "batch_topp_heap": "BatchToppHeapDispatchAlg",
    "sorted_sequential_select": "SortedSequentialSelectAlg",
    "backtracing_pruning": "BTPDispatchAlg",
}
_WAY_OUT = (
    "; use the same chunk_size, algorithm and min_chunks_per_rank on both sides (MagiAttention reads "
    "MAGI_ATTENTION_MIN_CHUNKS_PER_RANK)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class MagiHeads:
    """Attention heads of one rank, as MagiAttention's keys want them."""

    num_heads_q: int
    num_heads_kv: int
    head_dim: int

    @classmethod
    def of_model(cls, model: Any, *, tp_size: int = 1) -> "MagiHeads":
        """Return one rank's heads by a model's ``config``, that of its text part where there is one.

        Args:
            model: its config counts the heads of all ranks.
            tp_size: tensor-parallel ranks that share them.

        Raises:
            ValueError: if the model has no such config, or its heads cannot be shared.
        """
        config = getattr(model, "config", None)
        config = getattr(config, "text_config", None) or config
        heads = getattr(config, "num_attention_heads", None)
        size = getattr(config, "head_dim", None)
        if heads and not size:
            size = getattr(config, "hidden_size", 0) // heads
        if not heads or not size:
            raise ValueError(
                f"{type(model).__name__} has no config with num_attention_heads, and head_dim or "
                "hidden_size; MagiAttention's key needs them"
            )
        groups = getattr(config, "num_key_value_heads", None) or heads
        if heads % tp_size or groups % tp_size:
            raise ValueError(
                f"num_attention_heads={heads} and num_key_value_heads={groups} of {type(model).__name__} "
                f"must be multiples of tp_size={tp_size}; use fewer tp ranks"
            )
        return cls(num_heads_q=heads // tp_size, num_heads_kv=groups // tp_size, head_dim=size)


def build_key(
    layout: MagiLayout, slices: MaskSlices | Iterable[SliceTuple], total: int, *, heads: MagiHeads, group: Any
) -> Any:
    """Return MagiAttention's key for a mask over ``total`` tokens, also as the group's most recent one.

    Args:
        layout: who deals the chunks out; its algorithm and chunk size are MagiAttention's, too.
        slices: the mask, of ``layout.slices``, or tuples ``(q0, q1, k0, k1, kind)``.
        total: T.
        heads: of one rank.
        group: the cp process group.

    Raises:
        ImportError: if MagiAttention cannot be used (``magi_package.py``).
        ValueError: if its chunks or padding are not the layout's.
    """
    api = load_magi()
    ranges = importlib.import_module("magi_attention.common").AttnRanges
    rows = MaskSlices.read(slices).to_tuples()
    key = api.magi_attn_flex_key(
        q_ranges=ranges.from_ranges([(q0, q1) for q0, q1, _, _, _ in rows]),
        k_ranges=ranges.from_ranges([(k0, k1) for _, _, k0, k1, _ in rows]),
        attn_mask_type=[kind for *_, kind in rows],
        total_seqlen_q=total,
        total_seqlen_k=total,
        num_heads_q=heads.num_heads_q,
        num_heads_kv=heads.num_heads_kv,
        head_dim=heads.head_dim,
        # Computed by MagiAttention; the argument is what remains of older versions.
        pad_size=0,
        cp_group_or_mesh=group,
        dist_attn_config=api.DistAttnConfig(dispatch_config=_dispatch_config(api, layout)),
    )
    _check_sizes(layout.rule.grid(total, cp_size=int(group.size())), key)
    # A key that was there before is not the most recent one until it is used.
    api.get_position_ids(key)
    return key


def verify(expected: MagiLayout | MagiPartition, key: Any) -> None:
    """Check that MagiAttention deals tokens out as ringfeed does. Waits for the device: once, before step 1.

    Args:
        expected: a partition, or a layout, which is asked about the key's own mask.
        key: of ``build_key``, or of MagiAttention.

    Raises:
        ValueError: if chunk size, padding, or a token of this rank differs (the first is named).
    """
    group = key.cp_group
    partition = expected
    if isinstance(partition, MagiLayout):
        slices, total = _mask_of(key)
        partition = partition.partition_slices(slices, total, cp_size=int(group.size()))
    _check_sizes(partition.grid, key)
    rank = int(group.rank())
    wanted = torch.from_numpy(partition.position_ids(rank))
    found = load_magi().get_position_ids(key).cpu().to(torch.int64)
    if wanted.shape != found.shape:
        raise ValueError(
            f"rank {rank} holds {len(found)} tokens by MagiAttention and {len(wanted)} by the layout 'magi'"
            f"{_WAY_OUT}"
        )
    differs = (wanted != found).nonzero()
    if len(differs):
        first = int(differs[0])
        raise ValueError(
            f"position ids of rank {rank} differ in {len(differs)} of {len(wanted)} tokens: token {first} is "
            f"{int(found[first])} by MagiAttention and {int(wanted[first])} by the layout 'magi'{_WAY_OUT}"
        )


def _check_sizes(grid: ChunkGrid, key: Any) -> None:
    wanted = {
        "chunk_size": grid.chunk_size,
        "pad_size": grid.pad_size,
        "total_seqlen_q": grid.padded_total,
    }
    for name, value in wanted.items():
        found = int(getattr(key, name))
        if found != value:
            raise ValueError(f"{name} is {found} in MagiAttention's key and {value} by the layout{_WAY_OUT}")


def _mask_of(key: Any) -> tuple[list[SliceTuple], int]:
    """Return a key's slices and T, without the padding that it ends with."""
    queries, keys = key.q_ranges.to_naive_ranges(), key.k_ranges.to_naive_ranges()
    words = [kind.value for kind in key.attn_mask_type]
    rows = [(*query, *keys, word) for query, keys, word in zip(queries, keys, words, strict=True)]
    return rows[:-1] if key.pad_size else rows, key.total_seqlen_q - key.pad_size


def _dispatch_config(api: Any, layout: MagiLayout) -> Any:
    solver = layout.solver
    name = _ALGORITHMS[solver.name]
    # Three of them are not among the api's names.
    owner = (
        api if hasattr(api, name) else importlib.import_module("magi_attention.meta.solver.dispatch_solver")
    )
    algorithm = getattr(owner, name)(**solver.options)
    return api.DispatchConfig(chunk_size=layout.chunk_size, uneven_shard=layout.uneven, alg=algorithm)
