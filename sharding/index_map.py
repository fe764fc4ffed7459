"""Which tokens of a chunk one rank holds, and how to move arrays through that choice.

In:   runs chosen by a layout (``layouts.py``)
Out:  ``IndexMap``: ``take`` cuts a chunk down to a rank's part,
      ``merge`` puts the ranks' parts back into chunk order

Runs are the primary form: a run is memcpy where a position is a gather. Positions are
expanded from them on demand. numpy goes in and out as numpy, torch as torch.

Shapes: T tokens in the chunk, L tokens on one rank, K runs, R ranks.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ringfeed.sharding.run_kernels import (
    Int64Array,
    expand,
    first_wrong_token,
    merge_adjacent,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IndexMap", "expand_runs", "merge"]

ArrayOrTensor = TypeVar("ArrayOrTensor")

# Below this many tokens per run, one gather is faster than a Python loop of copies
# (benchmarks/bench_index_runs.py).
_SHORTEST_RUN_TO_COPY = 2048


@dataclass(frozen=True, slots=True, eq=False)
class IndexMap:
    """The chunk positions held by one rank, in the order the rank stores them.

    Raises:
        ValueError: if a run does not lie inside the chunk.
    """

    runs: Int64Array
    """int64 [K, 2], read-only: start and length, in local order, none empty, adjacent ones
    merged (what is passed in may be unmerged)."""
    num_tokens: int
    """T, the length of the chunk that the runs point into."""
    _num_local: int = field(init=False, repr=False)

    def __post_init__(self) -> None:
        raw = np.array(self.runs, dtype=np.int64, order="C")
        if raw.ndim != 2 or raw.shape[1] != 2:
            raise ValueError(f"runs must be [K, 2] (start, length), got shape {list(raw.shape)}")
        merged, num_local, wrong = merge_adjacent(raw, self.num_tokens)
        if wrong >= 0:
            raise ValueError(
                f"run {wrong} (start {raw[wrong, 0]}, length {raw[wrong, 1]}) does not lie "
                f"inside the {self.num_tokens}-token chunk"
            )
        merged.flags.writeable = False
        object.__setattr__(self, "runs", merged)
        object.__setattr__(self, "_num_local", num_local)

    @classmethod
    def from_merged(cls, runs: Int64Array, num_tokens: int, num_local: int) -> "IndexMap":
        """Return the map of runs that are merged, inside the chunk and L tokens, unchecked.

        For layouts, whose kernels make runs like that; ``runs`` must never change again.
        """
        # The checks cost more than the runs themselves: 9 us a rank, of 15 us for all of te at cp 8.
        index_map = object.__new__(cls)
        object.__setattr__(index_map, "runs", runs)
        object.__setattr__(index_map, "num_tokens", num_tokens)
        object.__setattr__(index_map, "_num_local", num_local)
        return index_map

    def __len__(self) -> int:
        """Return L."""
        return self._num_local

    @property
    def positions(self) -> "Tensor":
        """int64 tensor [L]; ``positions[i] == j`` says local token i is chunk token j."""
        import torch

        return torch.from_numpy(expand_runs(self.runs))

    @property
    def inverse(self) -> Int64Array:
        """int64 array [T]; ``inverse[j] == i`` says chunk token j is local token i, -1: absent."""
        inverse = np.full(self.num_tokens, -1, dtype=np.int64)
        inverse[expand_runs(self.runs)] = np.arange(self._num_local)
        return inverse

    def take(self, x: ArrayOrTensor, dim: int = 0) -> ArrayOrTensor:
        """Return a copy of this rank's rows of ``x``: [..., T, ...] -> [..., L, ...].

        Args:
            x: array or tensor of any dtype and strides; it is not changed. A tensor's
                gradient flows back to the rows that were taken.
            dim: the tensor dimension that has T entries; negative ones count from the end.

        Raises:
            ValueError: if ``x`` has no such dimension, or it does not have T entries.
        """
        values: Any = x if _is_tensor(x) else np.asarray(x)
        _check_rows(values, self.num_tokens, dim=dim, name="x", owner="index map covers")
        return _select(values, self.runs, self._num_local, dim)  # type: ignore[no-any-return]


def expand_runs(runs: Int64Array) -> Int64Array:
    """Return the chunk position of each local token: runs int64 [K, 2] -> int64 [L]."""
    return expand(runs, int(runs[:, 1].sum()))


def merge(index_maps: Sequence[IndexMap], parts: Sequence[ArrayOrTensor], dim: int = 0) -> ArrayOrTensor:
    """Put every rank's rows back into chunk order: R parts [..., L, ...] -> [..., T, ...].

    Replicas (every map holds the whole chunk in order) merge to a copy of the first part.

    Args:
        index_maps: one per rank, of the same chunk.
        parts: what each rank holds, in the same order; arrays or tensors of one dtype.
        dim: the tensor dimension that has L entries.

    Raises:
        ValueError: if maps and parts do not match, or the maps do not hold each chunk token
            exactly once (the first wrong token is named).
    """
    if not index_maps or len(index_maps) != len(parts):
        raise ValueError(
            f"need one part per index map and at least one, got {len(index_maps)} index maps "
            f"and {len(parts)} parts"
        )
    values: list[Any] = [part if _is_tensor(part) else np.asarray(part) for part in parts]
    _check_parts(index_maps, values, dim)
    if len(index_maps) > 1 and all(_holds_everything(index_map) for index_map in index_maps):
        return _select(values[0], index_maps[0].runs, len(index_maps[0]), dim)  # type: ignore[no-any-return]
    runs = np.concatenate([index_map.runs for index_map in index_maps])
    num_tokens = index_maps[0].num_tokens
    token, times = first_wrong_token(runs, num_tokens)
    if token >= 0:
        raise ValueError(
            f"index maps do not tile the {num_tokens}-token chunk: token {token} is held {times} times"
        )
    return _put_back(values, runs, dim)  # type: ignore[no-any-return]


def _put_back(values: list[Any], runs: Int64Array, dim: int) -> Any:
    positions = expand_runs(runs)
    order = np.empty_like(positions)
    order[positions] = np.arange(len(positions))
    if not _is_tensor(values[0]):
        return np.take(np.concatenate(values, axis=dim), order, axis=dim)
    import torch

    rows = torch.cat(values, dim)
    return rows.index_select(dim, torch.from_numpy(order).to(rows.device))


def _select(x: Any, runs: Int64Array, num_local: int, dim: int) -> Any:
    copy_runs = num_local >= len(runs) * _SHORTEST_RUN_TO_COPY and num_local > 0
    if not _is_tensor(x):
        if not copy_runs:
            return np.take(x, expand_runs(runs), axis=dim)
        before = (slice(None),) * (dim % x.ndim)
        rows = [x[(*before, slice(start, start + length))] for start, length in runs.tolist()]
        return np.concatenate(rows, axis=dim)
    import torch

    if not copy_runs:
        return x.index_select(dim, torch.from_numpy(expand_runs(runs)).to(x.device))
    return torch.cat([x.narrow(dim, start, length) for start, length in runs.tolist()], dim)


def _check_parts(index_maps: Sequence[IndexMap], values: list[Any], dim: int) -> None:
    first = values[0]
    for rank, (index_map, value) in enumerate(zip(index_maps, values, strict=True)):
        if index_map.num_tokens != index_maps[0].num_tokens:
            raise ValueError(
                f"index map {rank} covers {index_map.num_tokens} tokens, "
                f"index map 0 covers {index_maps[0].num_tokens}"
            )
        _check_rows(value, len(index_map), dim=dim, name=f"part {rank}", owner="its rank holds")
        if _is_tensor(value) != _is_tensor(first) or value.dtype != first.dtype:
            raise ValueError(f"part {rank} is {value.dtype} {type(value).__name__}, unlike part 0")
        if _other_sizes(value, dim) != _other_sizes(first, dim):
            raise ValueError(
                f"part {rank} has shape {list(value.shape)}, part 0 {list(first.shape)}; "
                f"they may differ in dim {dim} only"
            )


def _check_rows(value: Any, expected: int, *, dim: int, name: str, owner: str) -> None:
    if not -value.ndim <= dim < value.ndim:
        raise ValueError(f"{name} has {value.ndim} dimensions, so no dim {dim}")
    if value.shape[dim] != expected:
        raise ValueError(f"{owner} {expected} tokens, but {name} has {value.shape[dim]} rows in dim {dim}")


def _other_sizes(value: Any, dim: int) -> list[int]:
    sizes = list(value.shape)
    del sizes[dim]
    return sizes


def _holds_everything(index_map: IndexMap) -> bool:
    everything: bool = index_map.runs.tolist() == [[0, index_map.num_tokens]]
    return everything


def _is_tensor(x: Any) -> bool:
    # Nobody holds a tensor without torch having been imported, so do not import it here.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)
