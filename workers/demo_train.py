"""Train as one process of the demo; ``demo_process.py`` starts it.

In:   a ``TrainJob`` as JSON; views through ``ringfeed.pipeline.loader``
Out:  ``TrainJob.record(rank)``: one JSON line a step, and a last one with counts and times

The same loop runs sharded, on dp x cp processes, and unsharded, on one: only the source of the
batches and the function that attends differ.
"""

import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringfeed.pipeline.batch import Batch
from ringfeed.pipeline.loader import Loader
from ringfeed.sharding.attention.allgather import allgather_attention
from ringfeed.workers.demo_job import TrainJob, TrainResult
from ringfeed.workers.demo_model import (
    Attend,
    DecoderConfig,
    TinyDecoder,
    attend_per_document,
    token_loss_sum,
)

__all__ = ["main", "train"]

_LEARNING_RATE = 1e-2
_COLLECTIVE_TIMEOUT = timedelta(minutes=5)


@dataclass(frozen=True, slots=True)
class _Groups:
    """The process groups of one rank; None where it is alone."""

    world: dist.ProcessGroup | None
    cp: dist.ProcessGroup | None


def main(arguments: list[str]) -> None:
    """Train as rank ``arguments[1]`` of the job in the file ``arguments[0]``."""
    # One thread a process: there are more processes than cores already.
    torch.set_num_threads(1)
    job, rank = TrainJob.from_json(Path(arguments[0]).read_text()), int(arguments[1])
    groups = _join(job, rank)
    with job.record(rank).open("w") as record:
        result = train(job, rank, groups, record)
        record.write(json.dumps(asdict(result)) + "\n")
    if groups.world is not None:
        dist.destroy_process_group()


def train(job: TrainJob, rank: int, groups: _Groups, record: TextIO) -> TrainResult:
    """Train ``job.steps`` steps and return counts and times of this rank."""
    load_tokens, load_seconds = _time_loading(job, rank)
    model = TinyDecoder(DecoderConfig(vocab_size=job.vocab_size))
    optimizer = torch.optim.Adam(model.parameters(), lr=_LEARNING_RATE, eps=1e-6)
    tokens = num_bytes = 0
    started = time.monotonic()
    with _open_loader(job, rank) as loader:
        for step, batches in enumerate(_steps(loader, job.steps)):
            optimizer.zero_grad()
            loss = torch.zeros(())
            for batch in batches:
                attend = _attend(batch, groups) if job.is_sharded else _attend_unsharded(batch)
                loss += _backward(model, batch, attend)
                tokens += _num_tokens(batch)
                num_bytes += sum(tensor.nbytes for tensor in batch.tensors.values())
            _sum_over_ranks(model, loss, groups.world)
            optimizer.step()
            record.write(json.dumps({"step": step, "loss": loss.item()}) + "\n")
            record.flush()
    return TrainResult(
        tokens=tokens,
        bytes=num_bytes,
        train_seconds=time.monotonic() - started,
        load_tokens=load_tokens,
        load_seconds=load_seconds,
    )


def _backward(model: nn.Module, batch: Batch, attend: Attend) -> Tensor:
    """Add the micro-batch's part of the gradient; return its part of the step's loss."""
    logits = model(batch.tensors["input_ids"], batch.tensors["position_ids"], attend)
    # Every rank divides by the step's own count, so plain sums over micro-batches and ranks are right.
    loss = token_loss_sum(logits, batch.tensors["labels"]) / batch.info.global_supervised
    loss.backward()  # type: ignore[no-untyped-call]
    return loss.detach()


def _attend(batch: Batch, groups: _Groups) -> Attend:
    return partial(allgather_attention, **batch.kwargs("allgather"), group=groups.cp)


def _attend_unsharded(batch: Batch) -> Attend:
    offsets = {name: batch.tensors[name] for name in ("cu_seqlens", "cu_seqlens_padded")}
    return partial(attend_per_document, **offsets)


def _sum_over_ranks(model: nn.Module, loss: Tensor, world: dist.ProcessGroup | None) -> None:
    """Sum gradients and loss over all ranks, in place."""
    if world is None:
        return
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([loss.reshape(1), *(grad.flatten() for grad in grads)])
    dist.all_reduce(flat, group=world)
    loss.copy_(flat[0])
    for grad, summed in zip(grads, torch.split(flat[1:], [grad.numel() for grad in grads]), strict=True):
        grad.copy_(summed.view_as(grad))


def _steps(loader: Loader, num_steps: int) -> Iterator[list[Batch]]:
    """Yield the micro-batches of each of the first ``num_steps`` steps."""
    batches = iter(loader)
    for _ in range(num_steps):
        yield list(islice(batches, loader.num_micro_batches))


def _time_loading(job: TrainJob, rank: int) -> tuple[int, float]:
    """Read all batches once; return the tokens and seconds after the first, which opens and compiles."""
    with _open_loader(job, rank, prefetch_bytes=0) as loader:
        batches = islice(loader, job.steps * loader.num_micro_batches)
        next(batches)
        started = time.monotonic()
        tokens = sum(_num_tokens(batch) for batch in batches)
        return tokens, time.monotonic() - started


def _num_tokens(batch: Batch) -> int:
    return int((~batch.tensors["padding_mask"]).sum())


def _open_loader(job: TrainJob, rank: int, *, prefetch_bytes: int = 16 << 20) -> Loader:
    return Loader(
        job.source,
        dp_rank=rank // job.cp_size,
        dp_size=job.dp_size,
        cp_rank=rank % job.cp_size,
        cp_size=job.cp_size,
        layout=job.layout,
        prefetch_bytes=prefetch_bytes,
    )


def _join(job: TrainJob, rank: int) -> _Groups:
    """Meet the other ranks. Ranks with one dp coordinate are neighbours and form a cp group."""
    if job.num_ranks == 1:
        return _Groups(world=None, cp=None)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{job.rendezvous}",
        world_size=job.num_ranks,
        rank=rank,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    chunks = [list(range(dp * job.cp_size, (dp + 1) * job.cp_size)) for dp in range(job.dp_size)]
    groups = [dist.new_group(ranks) for ranks in chunks]
    return _Groups(world=dist.group.WORLD, cp=groups[rank // job.cp_size])
