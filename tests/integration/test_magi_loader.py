"""Layout ``magi`` on the whole line: a plan, a loader per cp rank, and the pack put back together."""

import numpy as np
import pytest
import torch

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import Balance, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.shard_writer import (
    ShardTask,
    num_folders,
    shards_made_from,
    shards_manifest,
    write_steps,
)
from ringfeed.pipeline.staging import StagedFolder
from ringfeed.pipeline.store import SHARDS_FORMAT
from ringfeed.sharding.index_map import merge
from ringfeed.sharding.layouts import make_layout

CP_SIZE, PACK_TOKENS = 2, 128
NAMES = ("input_ids", "labels", "position_ids", "padding_mask")
CHUNKED = {"chunk_size": 16, "min_chunks_per_rank": 4}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A plan whose last step lacks packs, so that some micro-batches are padding throughout."""
    folder = tmp_path_factory.mktemp("magi")
    rng = np.random.default_rng(3)
    lengths = np.minimum(rng.lognormal(3.2, 1.0, size=61).astype(int) + 1, 300)
    documents = [rng.integers(1, 30_000, size=length, dtype=np.int32) for length in lengths.tolist()]
    write_corpus(folder / "corpus", documents, name="prose", pad_id=0)
    run_plan(
        PlanOptions(
            output=folder / "plan",
            corpora=[folder / "corpus"],
            pack_tokens=PACK_TOKENS,
            packs_per_step=8,
            max_cp=CP_SIZE,
            balance=Balance.BEST_FIT,
            window=2,
        )
    )
    return folder / "plan"


@pytest.fixture(scope="module")
def odd_plan(tmp_path_factory):
    """A plan whose packs no number of equal chunks fills at cp 3."""
    folder = tmp_path_factory.mktemp("odd")
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 1000, size=n, dtype=np.int32) for n in rng.integers(5, 300, 40).tolist()]
    write_corpus(folder / "corpus", documents, name="prose", pad_id=0)
    run_plan(
        PlanOptions(
            output=folder / "plan",
            corpora=[folder / "corpus"],
            pack_tokens=501,
            packs_per_step=4,
            pad_multiple=1,
            balance=Balance.BEST_FIT,
        )
    )
    return folder / "plan"


def load(plan, layout, cp_rank, cp_size=CP_SIZE, **options):
    return Loader(plan, dp_rank=0, dp_size=1, cp_rank=cp_rank, cp_size=cp_size, layout=layout, **options)


@pytest.mark.parametrize(
    "options",
    [
        {},
        CHUNKED,
        {"causal": False, "window": (9, 0), "algorithm": "topp_heap", "top_p": 1.0},
        {"uneven": True},
    ],
    ids=["default", "chunked", "window", "uneven"],
)
def test_ranks_put_together_are_the_packs_that_one_rank_gets(plan, options):
    layout = make_layout("magi", **options)
    ranks = [load(plan, layout, rank) for rank in range(CP_SIZE)]
    num_padding = 0

    for whole, *parts in zip(load(plan, "identity", 0, cp_size=1), *ranks, strict=True):
        maps = layout.index_maps(
            whole.tensors["cu_seqlens_padded"], cp_size=CP_SIZE, cu_seqlens=whole.tensors["cu_seqlens"]
        )
        assert [index_map.num_tokens for index_map in maps] == [PACK_TOKENS] * CP_SIZE
        for name in NAMES:
            assert torch.equal(merge(maps, [part.tensors[name] for part in parts]), whole.tensors[name])
            for part, index_map in zip(parts, maps, strict=True):
                assert torch.equal(part.tensors[name], index_map.take(whole.tensors[name]))
        assert all(torch.equal(p.tensors["cu_seqlens"], whole.tensors["cu_seqlens"]) for p in parts)
        assert sum(part.info.local_supervised for part in parts) == whole.info.local_supervised
        num_padding += whole.info.num_documents == 0

    assert num_padding > 0


def test_a_tensor_in_chunk_order_is_sharded_like_the_ids(plan):
    whole = next(iter(load(plan, "identity", 0, cp_size=1)))

    for rank in range(CP_SIZE):
        part = next(iter(load(plan, make_layout("magi", **CHUNKED), rank)))
        ids = part.sharder.shard_token_tensor(whole.tensors["input_ids"])
        assert torch.equal(ids, part.tensors["input_ids"])
        assert part.info.layout == "magi"


def test_a_pack_that_magi_would_pad_is_refused_with_the_lengths_that_do(plan):
    with pytest.raises(
        ValueError, match=r"packs of 128 slots .*'magi' at cp_size=2.* multiple of 96.*96, 192"
    ):
        load(plan, make_layout("magi", chunk_size=48), 0)


def test_many_packs_in_a_chunk_are_refused(plan):
    with pytest.raises(ValueError, match="layout 'magi' takes one pack per chunk"):
        load(plan, "magi", 0, packs_per_chunk=2)


def test_a_whole_step_at_once(plan):
    for rank in range(CP_SIZE):
        step = next(iter(load(plan, "magi", rank).steps()))
        assert step.tensors["input_ids"].shape == (8, PACK_TOKENS // CP_SIZE)


UNEVEN = {"uneven": True, "chunk_size": 8, "min_chunks_per_rank": 2}


def test_uneven_shares_have_their_own_length_in_every_batch(odd_plan):
    layout = make_layout("magi", **UNEVEN)
    lengths = set()

    for rank in range(3):
        for batch in load(odd_plan, layout, rank, cp_size=3):
            held = len(batch.sharder.index_map)
            assert {name: len(batch.tensors[name]) for name in NAMES} == dict.fromkeys(NAMES, held)
            lengths.add(held)

    assert len(lengths) > 1


def test_whole_steps_of_uneven_shares_are_refused(odd_plan):
    loaders = [load(odd_plan, make_layout("magi", **UNEVEN), rank, cp_size=3) for rank in range(3)]

    with pytest.raises(ValueError, match=r"local tokens, a whole step needs one number; iterate"):
        _ = [list(loader.steps()) for loader in loaders]


def write_shards(plan_folder, output, layout, cp_size):
    plan = Plan.open(plan_folder)
    spec = open_spec(plan, OpenOptions(layout=layout, cp_size=cp_size), pad_id=plan.open_corpora().pad_id)
    task = ShardTask(plan=plan.path, folder=output.with_name("shards.partial"), spec=spec, steps_per_folder=2)
    made_from = shards_made_from(plan, task)
    with StagedFolder.open(output, format=SHARDS_FORMAT, made_from=made_from) as staged:
        indices = range(num_folders(plan, steps_per_folder=2))
        entries = [entry for index in indices for entry in write_steps(task, index)]
        staged.publish(shards_manifest(plan, task, entries))
    return output


def test_files_of_uneven_shares_give_the_bytes_of_the_plan(odd_plan, tmp_path):
    layout = make_layout("magi", **UNEVEN)
    shards = write_shards(odd_plan, tmp_path / "shards", layout, cp_size=3)

    for rank in range(3):
        pairs = zip(load(shards, None, rank, 3), load(odd_plan, layout, rank, 3), strict=True)
        for from_files, from_plan in pairs:
            assert from_files.info == from_plan.info
            for name, tensor in from_plan.tensors.items():
                assert torch.equal(from_files.tensors[name], tensor), name
