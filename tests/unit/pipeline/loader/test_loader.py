"""``Loader`` over a plan: the right tokens, counts and order for every rank."""

import numpy as np
import pytest
import torch
import xxhash

from ringfeed.pipeline.ranks import assign_packs
from ringfeed.sharding.index_map import merge

TOKENS = ("input_ids", "labels", "position_ids", "padding_mask")


def last_step(run):
    with run.load() as loader:
        return loader.num_steps - 1


def test_batches_hold_the_tokens_that_the_plan_names(run):
    batches = list(run.load())

    rows = [row for step in range(last_step(run) + 1) for row in run.step_rows(step)]
    # dp 1 gets every pack; only their order in the step is the loader's.
    got = sorted(tuple(batch.tensors["input_ids"].tolist()) for batch in batches if batch.info.num_documents)
    wanted = sorted(tuple(run.expected_pack(row, 1)[0]["input_ids"]) for row in rows)
    assert got == wanted


@pytest.mark.parametrize("layout", ["te", "head_tail", "contiguous", "whole_document"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_tensor_of_every_cp_rank(run, layout, cp_size):
    ranks = [list(run.load(cp_rank=r, cp_size=cp_size, layout=layout)) for r in range(cp_size)]

    multiple = ranks[0][0].sharder.layout.length_multiple(cp_size)
    packs = {}
    for step in range(last_step(run) + 1):
        for row in run.step_rows(step):
            expected, documents = run.expected_pack(row, multiple)
            packs[step, tuple(documents), tuple(expected["input_ids"])] = expected
    for batches in zip(*ranks, strict=True):
        maps = batches[0].sharder.index_maps
        parts = [[batch.tensors[name] for batch in batches] for name in TOKENS]
        whole = {name: merge(maps, of_ranks).tolist() for name, of_ranks in zip(TOKENS, parts, strict=True)}
        info = batches[0].info
        if not info.num_documents:
            assert whole["padding_mask"] == [True] * 128
            continue
        expected = packs.pop((info.step, info.documents, tuple(whole["input_ids"])))
        for batch in batches:
            offsets = {name: batch.tensors[name].tolist() for name in ("cu_seqlens", "cu_seqlens_padded")}
            assert {**whole, **offsets} == expected
    assert packs == {}


def test_missing_packs_of_the_last_step_are_all_padding(run):
    step = last_step(run)
    missing = 8 - len(run.step_rows(step))
    assert missing > 0, "the run must end with a short step"

    batches = [batch for batch in run.load(layout="te", cp_size=2) if batch.info.step == step]

    empty = [batch for batch in batches if batch.info.num_documents == 0]
    assert len(batches) == 8
    assert len(empty) == missing
    for batch in empty:
        assert bool(batch.tensors["padding_mask"].all())
        assert set(batch.tensors["labels"].tolist()) == {-100}
        assert batch.tensors["cu_seqlens"].tolist() == [0, 0]
        assert batch.tensors["cu_seqlens_padded"].tolist() == [0, 128]
        assert (batch.info.local_supervised, batch.info.max_seqlen) == (0, 0)
        assert batch.info.max_seqlen_padded == 128


@pytest.mark.parametrize(("dp_size", "packs_per_chunk"), [(1, 1), (2, 2), (4, 1), (8, 1), (2, 4)])
def test_every_rank_gets_its_packs_in_step_order(run, dp_size, packs_per_chunk):
    loaders = [run.load(dp_rank=d, dp_size=dp_size, packs_per_chunk=packs_per_chunk) for d in range(dp_size)]
    num_micro_batches = 8 // dp_size // packs_per_chunk
    tables: dict[int, list] = {}
    for d, loader in enumerate(loaders):
        places = []
        for batch in loader:
            info = batch.info
            places.append((info.step, info.micro_batch))
            rows = tables.setdefault(info.step, run.step_rows(info.step))
            packs = deal(rows, dp_size, packs_per_chunk)[info.micro_batch, d].tolist()
            documents = [doc for pack in packs if pack >= 0 for doc in rows[pack]["documents"]]
            assert list(info.documents) == documents
            assert info.num_micro_batches == num_micro_batches
            assert len(batch.tensors["input_ids"]) == 128 * packs_per_chunk
        assert places == [(s, m) for s in range(last_step(run) + 1) for m in range(num_micro_batches)]


def deal(rows, dp_size, packs_per_chunk):
    return assign_packs(
        np.array([row["cost"] for row in rows]),
        np.array([row["slate"] for row in rows], dtype=np.int32),
        packs_per_step=8,
        slate_size=4,
        dp_size=dp_size,
        packs_per_chunk=packs_per_chunk,
    )


def test_counts_add_up_over_ranks_and_sources(run):
    sums: dict[int, int] = {}
    infos = {}
    for dp_rank in range(2):
        for cp_rank in range(2):
            for batch in run.load(dp_rank=dp_rank, dp_size=2, cp_rank=cp_rank, cp_size=2):
                info = batch.info
                assert info.local_supervised == int((batch.tensors["labels"] != -100).sum())
                sums[info.step] = sums.get(info.step, 0) + info.local_supervised
                infos[info.step] = info
    for step, info in infos.items():
        rows = run.step_rows(step)
        assert sums[step] == info.global_supervised == sum(row["supervised"] for row in rows)
        by_source = np.sum([row["supervised_by_source"] for row in rows], axis=0).tolist()
        assert info.supervised_by_source == {"prose": by_source[0], "code": by_source[1]}


def test_info_is_plain_ints(run):
    info = next(iter(run.load(dp_rank=1, dp_size=2, cp_rank=1, cp_size=2, packs_per_chunk=2))).info

    names = [name for name in info.__slots__ if name not in ("documents", "supervised_by_source", "layout")]
    assert {name: type(getattr(info, name)) for name in names} == dict.fromkeys(names, int)
    assert {type(value) for value in info.supervised_by_source.values()} == {int}
    assert {type(document) for document in info.documents} == {int}
    assert (info.dp_rank, info.dp_size, info.cp_rank, info.cp_size, info.layout) == (1, 2, 1, 2, "te")


def test_widest_slot_counts_the_tail(run):
    for batch in run.load(cp_size=2):
        widths = batch.tensors["cu_seqlens_padded"].diff()
        assert batch.info.max_seqlen_padded == int(widths.max())
        assert batch.info.max_seqlen == int(batch.tensors["cu_seqlens"].diff().max())


def test_digest_is_over_ids_and_labels_pack_by_pack(run):
    single = set()
    for batch in run.load(cp_rank=1, cp_size=2):
        ids, labels = (batch.tensors[name].int().numpy() for name in ("input_ids", "labels"))
        assert batch.info.digest == xxhash.xxh3_64_intdigest(ids.tobytes() + labels.tobytes())
        single.add(ids.tobytes() + labels.tobytes())
    for batch in run.load(cp_rank=1, cp_size=2, packs_per_chunk=2):
        both = (batch.tensors[name].int().reshape(2, -1).numpy() for name in ("input_ids", "labels"))
        packs = [a.tobytes() + b.tobytes() for a, b in zip(*both, strict=True)]
        assert batch.info.digest == xxhash.xxh3_64_intdigest(b"".join(packs))
        assert set(packs) <= single


def test_step_digest_is_one_per_step_and_dp_rank(run):
    def digests(dp_rank, cp_rank, layout):
        loader = run.load(dp_rank=dp_rank, dp_size=2, cp_rank=cp_rank, cp_size=2, layout=layout)
        return {(b.info.step, b.info.step_digest) for b in loader}

    first, other = digests(0, 0, "te"), digests(1, 0, "te")

    assert len(first) == last_step(run) + 1
    assert first == digests(0, 1, "te") == digests(0, 1, "contiguous")
    assert not first & other


def test_int32_keeps_what_int64_widens(run):
    for narrow, wide in zip(run.load(token_dtype=torch.int32), run.load(), strict=True):
        assert narrow.tensors["padding_mask"].dtype == torch.bool
        for name in ("input_ids", "labels", "position_ids"):
            assert narrow.tensors[name].dtype == torch.int32
            assert wide.tensors[name].dtype == torch.int64
            assert torch.equal(narrow.tensors[name].long(), wide.tensors[name])
        for name in ("cu_seqlens", "cu_seqlens_padded"):
            assert narrow.tensors[name].dtype == wide.tensors[name].dtype == torch.int32


def test_columns_limit_the_tensors_and_nothing_else(run):
    asked = ["cu_seqlens_padded", "labels"]
    for few, every in zip(run.load(columns=asked), run.load(), strict=True):
        assert list(few.tensors) == ["labels", "cu_seqlens_padded"]
        assert few.info == every.info
        assert all(torch.equal(few.tensors[name], every.tensors[name]) for name in asked)


def test_a_batch_owns_its_tensors(run):
    loader = run.load(prefetch_bytes=1)
    kept = list(loader)
    copies = [{name: tensor.clone() for name, tensor in batch.tensors.items()} for batch in run.load()]
    for tensor in kept[0].tensors.values():
        tensor.fill_(1)

    for batch, copy in zip(kept[1:], copies[1:], strict=True):
        assert all(torch.equal(batch.tensors[name], copy[name]) for name in copy)
    storages = {t.untyped_storage().data_ptr() for batch in kept for t in batch.tensors.values()}
    assert len(storages) == 6 * len(kept)


def test_corpora_may_have_moved(run, tmp_path):
    moved = [tmp_path / "prose", tmp_path / "code"]
    for path in moved:
        path.symlink_to(run.plan.parent / path.name)

    first, again = next(iter(run.load(corpus=moved))), next(iter(run.load()))

    assert torch.equal(first.tensors["input_ids"], again.tensors["input_ids"])
