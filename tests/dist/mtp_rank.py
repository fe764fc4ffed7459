"""One rank of ``test_mtp_counts.py``: SCRIPT FOLDER NUM_RANKS RANK; the plan lies in FOLDER."""

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from ringfeed.pipeline.corpus import Corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.mtp_counts import global_supervised_by_depth
from ringfeed.pipeline.plan import Plan
from ringfeed.sharding.loss import token_loss_sum

DEPTHS = 4


def expected_counts(plan, lengths, step):
    counts = [0] * DEPTHS
    for row in plan.step(step).to_pylist():
        for document, start, length in zip(row["documents"], row["starts"], row["lengths"], strict=True):
            goes_on = start + length < lengths[document]
            for depth in range(DEPTHS):
                counts[depth] += max(0, length - 1 + goes_on - depth)
    return tuple(counts)


def check(folder, *, layout, dp, cp, cp_group):
    (dp_rank, dp_size), (cp_rank, cp_size) = dp, cp
    plan = Plan.open(folder / "plan")
    lengths = Corpus.open(folder / "corpus").lengths
    places = {"dp_rank": dp_rank, "dp_size": dp_size, "cp_rank": cp_rank, "cp_size": cp_size}
    for step, batch in enumerate(Loader(folder / "plan", layout=layout, **places).steps()):
        counts = global_supervised_by_depth(batch, num_depths=DEPTHS, group=dist.group.WORLD)
        assert counts == expected_counts(plan, lengths, step), (layout, step, counts)
        # They are the labels that ranks train on: a loss of 1 a token adds up to the count.
        held = torch.zeros(DEPTHS, dtype=torch.int64)
        for part in batch.micro_batches():
            for depth in range(DEPTHS):
                labels = part.sharder.shift_token_tensor(
                    part.tensors["labels"], depth, fill=-100, group=cp_group
                )
                uniform = torch.zeros(len(labels), 2)
                loss = token_loss_sum(uniform, (labels >= 0).long() - (labels < 0) * 100)
                held[depth] += round(float(loss / torch.tensor(2.0).log()))
        dist.all_reduce(held)
        copies = cp_size if layout == "identity" else 1
        assert held.tolist() == [copies * count for count in counts]


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
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    check(folder, layout="te", dp=(rank // 2, 2), cp=(rank % 2, 2), cp_group=groups[rank // 2])
    check(folder, layout="identity", dp=(rank // 2, 2), cp=(rank % 2, 2), cp_group=groups[rank // 2])
    check(folder, layout="whole_document", dp=(0, 1), cp=(rank, 4), cp_group=dist.group.WORLD)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
