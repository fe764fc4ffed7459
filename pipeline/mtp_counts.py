"""How many labels a step has at each depth of multi-token prediction: one loss denominator per depth.

In:   the ``Batch``es of one rank and step (``pipeline/batch.py``)
Out:  counts over all ranks, for ``sharding/loss.py``

    counts = global_supervised_by_depth([batch, ...], num_depths=3, group=dp_cp_group)
    labels = batch.sharder.shift_token_tensor(batch.tensors["labels"], k, fill=-100, group=cp_group)
    scaled_loss(token_loss_sum(logits_k, labels), global_supervised=counts[k], ...)

Depth 0 is the count that every batch carries. Of the others only its own part is known to a rank, so
they take one small collective a step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfeed.pipeline.batch import Batch
from ringfeed.pipeline.batch_kwargs_varlen import required_tensor

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch.distributed as dist

    from ringfeed.pipeline.batch import BatchInfo

__all__ = ["global_supervised_by_depth"]


def global_supervised_by_depth(
    batches: Batch | Iterable[Batch], *, num_depths: int, group: dist.ProcessGroup | None = None
) -> tuple[int, ...]:
    """Return the supervised labels of a step at depths 0 to ``num_depths`` - 1, over all ranks.

    Waits for the device once, where the labels are on one. All ranks of ``group`` have to call it.

    Args:
        batches: all micro-batches of this rank in one step, or the step as one batch (``Loader.steps``).
        num_depths: at least 1.
        group: all dp * cp ranks; not needed where there is one.

    Returns:
        ``num_depths`` counts. The first is ``info.global_supervised``; a later one may be 0, and then
        that depth has no loss in this step.

    Raises:
        ValueError: if these are not the micro-batches of one step, the group has another size, or labels
            were left out by ``Loader(columns=...)``.
    """
    given = (batches,) if isinstance(batches, Batch) else tuple(batches)
    parts = [part for batch in given for part in batch.micro_batches()]
    if not parts:
        raise ValueError("batches is empty; pass the micro-batches of one step")
    info = parts[0].info
    _check_one_step(parts, info)
    _check_group(group, info)
    counts, *others = (
        part.sharder.supervised_by_depth(required_tensor(part, "labels"), num_depths) for part in parts
    )
    for other in others:
        counts = counts + other
    if group is not None:
        import torch.distributed as dist

        dist.all_reduce(counts, group=group)
    return tuple(count // info.copies for count in counts.tolist())


def _check_one_step(parts: list[Batch], info: BatchInfo) -> None:
    expected = [(info.step, micro_batch) for micro_batch in range(info.num_micro_batches)]
    found = [(part.info.step, part.info.micro_batch) for part in parts]
    if sorted(found) != expected:
        raise ValueError(
            f"batches are (step, micro-batch) {found}; pass all {info.num_micro_batches} micro-batches of "
            "one step, each once"
        )


def _check_group(group: dist.ProcessGroup | None, info: BatchInfo) -> None:
    num_ranks = info.dp_size * info.cp_size
    if group is None and num_ranks > 1:
        raise ValueError(f"the step is spread over {num_ranks} ranks: pass group=, all dp * cp of them")
    if group is not None and group.size() != num_ranks:
        raise ValueError(
            f"group has {group.size()} ranks, but the step is spread over {num_ranks}: dp {info.dp_size} * "
            f"cp {info.cp_size}"
        )
