"""``Loader(device="cuda")``: the same batches as on the CPU, through pinned memory and a side stream."""

import numpy as np
import pytest
import torch

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.planner.options import Balance, PlanOptions
from ringfeed.pipeline.planner.run import run_plan

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    root = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(3)
    lengths = np.minimum(rng.lognormal(6.0, 1.0, size=300).astype(int) + 1, 20_000)
    documents = [rng.integers(1, 50_000, size=length, dtype=np.int32) for length in lengths]
    write_corpus(root / "corpus", documents, name="corpus")
    run_plan(
        PlanOptions(
            output=root / "plan",
            corpora=[root / "corpus"],
            pack_tokens=16_384,
            packs_per_step=4,
            max_cp=2,
            balance=Balance.BEST_FIT,
            seed=0,
        )
    )
    return root / "plan"


def load(plan, **changes):
    return Loader(plan, dp_rank=0, dp_size=1, cp_rank=1, cp_size=2, layout="te", **changes)


@pytest.mark.parametrize("token_dtype", [torch.int64, torch.int32])
def test_same_batches_as_on_the_cpu(plan, token_dtype):
    on_cpu, on_cuda = (load(plan, device=d, token_dtype=token_dtype) for d in (None, "cuda"))

    for batch, moved in zip(on_cpu, on_cuda, strict=True):
        assert batch.info == moved.info
        for name, tensor in batch.tensors.items():
            assert moved.tensors[name].device.type == "cuda"
            assert moved.tensors[name].dtype == tensor.dtype
            assert torch.equal(moved.tensors[name].cpu(), tensor), name


def test_batches_stay_as_they_are_while_later_ones_arrive(plan):
    kept = list(load(plan, device="cuda", prefetch_bytes=0))
    torch.cuda.synchronize()

    for batch, moved in zip(load(plan), kept, strict=True):
        assert torch.equal(moved.tensors["input_ids"].cpu(), batch.tensors["input_ids"])


def test_whole_steps_on_the_device(plan):
    for step, moved in zip(load(plan).steps(), load(plan, device="cuda").steps(), strict=True):
        assert step.info == moved.info
        assert torch.equal(moved.tensors["cu_seqlens"].cpu(), step.tensors["cu_seqlens"])
        assert torch.equal(moved.tensors["labels"].cpu(), step.tensors["labels"])
