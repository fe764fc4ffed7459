"""One rank of ``test_loss.py``: SCRIPT FOLDER NUM_RANKS RANK."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ringfeed.pipeline.chunk_sharder import ChunkSharder
from ringfeed.sharding.attention.allgather import allgather_attention, allgather_context
from ringfeed.sharding.layouts import make_layout
from ringfeed.sharding.loss import scaled_loss, token_loss_sum
from ringfeed.sharding.padding import slot_offsets

TOTAL, VOCAB = 32, 11
# Micro-batches of documents: very uneven, one of a single token (no label), one without any document.
STEP = [[17, 1, 5], [30], [], [2]]


class TinyModel(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, 8).double()
        self.qkv = nn.Linear(8, 24).double()
        self.head = nn.Linear(8, VOCAB).double()

    def forward(self, ids, context, group):
        q, k, v = self.qkv(self.embed(ids)).reshape(len(ids), 3, 2, 4).unbind(1)
        return self.head(allgather_attention(q, k, v, context=context, group=group).flatten(1))


def documents_of(lengths, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(VOCAB, (length,), generator=generator) for length in lengths]


def chunk_of(lengths, seed, sharder):
    """Ids and labels [T] of documents in the sharder's slots."""
    ids, labels = torch.zeros(TOTAL, dtype=torch.int64), torch.full((TOTAL,), -100)
    starts = sharder.offsets.cu_seqlens_padded.tolist()
    for start, tokens in zip(starts, documents_of(lengths, seed), strict=False):
        ids[start : start + len(tokens)] = tokens
        labels[start : start + len(tokens) - 1] = tokens[1:]
    return ids, labels


def expected_gradients():
    """One process, one document at a time, one mean over the step."""
    model = TinyModel()
    losses, count = [], 0
    for seed, lengths in enumerate(STEP):
        for tokens in documents_of(lengths, seed):
            whole = make_layout("identity").index_maps([0, len(tokens)], cp_size=1)
            context = allgather_context([0, len(tokens)], [0, len(tokens)], whole, 0)
            logits = model(tokens, context, None)[:-1]
            losses.append(nn.functional.cross_entropy(logits, tokens[1:], reduction="sum"))
            count += len(tokens) - 1
    loss = torch.stack(losses).sum() / count
    loss.backward()
    return loss.item(), count, [parameter.grad for parameter in model.parameters()]


EXPECTED = expected_gradients()


def losses_of_rank(model, *, layout, dp, cp, reduction):
    """Yield the scaled loss of each micro-batch of this rank; dp ranks take turns."""
    _, count, _ = EXPECTED
    (dp_rank, dp_size), (cp_rank, cp_size) = dp, cp
    made = make_layout(layout)
    for seed, lengths in list(enumerate(STEP))[dp_rank::dp_size]:
        offsets = slot_offsets(lengths, multiple=made.length_multiple(cp_size), total=TOTAL)
        sharder = ChunkSharder(layout=made, cp_size=cp_size, cp_rank=cp_rank, packs=[offsets])
        ids, labels = (sharder.shard_token_tensor(x) for x in chunk_of(lengths, seed, sharder))
        context = allgather_context(
            offsets.cu_seqlens, offsets.cu_seqlens_padded, sharder.index_maps, cp_rank
        )
        yield scaled_loss(
            token_loss_sum(model(ids, context, dist.group.WORLD if cp_size > 1 else None), labels),
            global_supervised=count,
            reduction=reduction,
            dp_size=dp_size,
            cp_size=cp_size,
            copies=cp_size if layout == "identity" else 1,
        )


def check_sum(**place):
    model = TinyModel()
    total = 0.0
    for loss in losses_of_rank(model, reduction="sum", **place):
        loss.backward()
        total += loss.item()
    value = torch.tensor(total, dtype=torch.float64)
    for tensor in (value, *(parameter.grad for parameter in model.parameters())):
        dist.all_reduce(tensor)
    compare(model, place)
    # What a log shows: the same step loss.
    torch.testing.assert_close(value.item(), EXPECTED[0])


def check_mean(**place):
    model = DistributedDataParallel(TinyModel())
    # Forward and backward of one micro-batch at a time; only the last one reduces.
    micro_batches = losses_of_rank(model, reduction="mean", **place)
    num_steps = len(STEP) // place["dp"][1]
    for number in range(num_steps):
        model.require_backward_grad_sync = number == num_steps - 1
        next(micro_batches).backward()
    compare(model, place)


def compare(model, place):
    for parameter, expected in zip(model.parameters(), EXPECTED[2], strict=True):
        torch.testing.assert_close(parameter.grad, expected, msg=lambda m: f"{place}: {m}")


def main() -> None:
    folder, num_ranks, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{num_ranks}",
        world_size=num_ranks,
        rank=rank,
        timeout=timedelta(seconds=60),
    )
    here, alone = (rank, num_ranks), (0, 1)
    for check in (check_sum, check_mean):
        for layout in ("te", "whole_document", "contiguous", "identity"):
            check(layout=layout, dp=alone, cp=here)
        check(layout="te", dp=here, cp=alone)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
