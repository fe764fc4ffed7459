"""Ranks of one dp coordinate compare what they are about to train on, now and then.

In:   the step digest of each batch that is handed out (``pipeline/loader_node.py``), a process group
Out:  nothing, or ``RankMismatchError`` on every rank, with both digests

The cp ranks of a dp rank hold parts of the same packs. If one of them follows another plan, skip list or
state, attention mixes tokens that do not belong together, and nothing crashes. A step digest stands for chain
value, skip list and packs, so comparing one number per rank finds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

    from ringfeed.pipeline.batch import BatchInfo

__all__ = ["CHECK_EVERY", "BatchCheck", "DigestCheck", "RankMismatchError"]

CHECK_EVERY = 64
"""Steps between two comparisons; the first batch after a start or a loaded state is always compared."""
_FIELDS = ("step", "micro_batch", "dp_rank", "dp_size", "step_digest")
_SIGN = 1 << 63


class RankMismatchError(RuntimeError):
    """Ranks that must hold parts of the same packs do not."""


class BatchCheck(Protocol):
    """Compares the batches of ranks that share packs, now and then."""

    def restart(self) -> None:
        """Compare the next batch: an iteration begins."""
        ...

    def see(self, info: BatchInfo) -> None:
        """Look at a batch that is about to be handed out.

        Raises:
            RankMismatchError: if the ranks do not have the same packs.
        """
        ...


class DigestCheck:
    """Compares batches over a process group; every rank of it must hand out batches in the same order."""

    def __init__(self, group: ProcessGroup | Any, *, every: int = CHECK_EVERY) -> None:
        """Compare nothing yet.

        Args:
            group: of the ranks of one dp coordinate (cp ranks; tp and pp ranks may be in it), or a
                one-dimensional ``DeviceMesh`` of them.
            every: steps between two comparisons, at least 1.

        Raises:
            ValueError: if ``every`` is below 1, or this process is not in the group.
        """
        if every < 1:
            raise ValueError(f"every={every} must be at least 1")
        self._group: ProcessGroup = group.get_group() if hasattr(group, "get_group") else group
        if dist.get_rank(self._group) < 0:
            raise ValueError(
                "cp_group: this process is not in it; pass the group of this rank's own cp peers"
            )
        self._every = every
        self._following: int | None = None
        self.num_checks = 0

    def restart(self) -> None:
        """Compare the next batch: an iteration begins."""
        self._following = None

    def see(self, info: BatchInfo) -> None:
        """Compare a batch that is about to be handed out, if it is time to.

        Raises:
            RankMismatchError: on every rank alike, if the ranks do not stand at the same packs.
        """
        if self._following is not None and info.step < self._following:
            return
        self._following = info.step + self._every
        self.num_checks += 1
        rows = self._gather(torch.tensor([_signed(getattr(info, name)) for name in _FIELDS]))
        if any(row != rows[0] for row in rows):
            raise RankMismatchError(_text(rows, dist.get_process_group_ranks(self._group)))

    def _gather(self, own: Tensor) -> list[list[int]]:
        # A group of NCCL alone carries no CPU tensors.
        is_on_cpu = "cpu:" in dist.get_backend_config(self._group)
        own = own.to("cpu" if is_on_cpu else "cuda")
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size(self._group))]
        dist.all_gather(parts, own, group=self._group)
        return [part.tolist() for part in parts]


def _text(rows: list[list[int]], ranks: list[int]) -> str:
    other = next(i for i, row in enumerate(rows) if row != rows[0])
    first, second = (_side(rows[i], ranks[i]) for i in (0, other))
    names = [name for name, mine, theirs in zip(_FIELDS, rows[0], rows[other], strict=True) if mine != theirs]
    if "dp_rank" in names or "dp_size" in names:
        why = "cp_group has ranks of several dp coordinates; pass the group of one dp rank's cp peers"
    elif "step" in names or "micro_batch" in names:
        why = "they stand at different places; load one state on all ranks"
    else:
        why = "they follow different plans or skip lists; start all ranks with the same ones"
    return f"ranks that share packs do not agree: {first}, but {second}: {why}"


def _side(row: list[int], rank: int) -> str:
    values = dict(zip(_FIELDS, row, strict=True))
    return (
        f"rank {rank} has step digest {values['step_digest'] % (2 * _SIGN):016x} at step {values['step']}, "
        f"micro-batch {values['micro_batch']} (dp rank {values['dp_rank']} of {values['dp_size']})"
    )


def _signed(value: Any) -> int:
    """Return a 64-bit digest as the int64 of the same bits."""
    return int(value) - 2 * _SIGN if value >= _SIGN else int(value)
