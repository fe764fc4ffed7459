"""Batches for MagiAttention, prepared without it: a stand-in adapter records what it is asked for."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from ringfeed.sharding import automodel
from ringfeed.sharding.automodel import MagiState
from ringfeed.sharding.magi.layout import MagiLayout


@pytest.fixture
def asked(monkeypatch):
    """What the adapter, which needs MagiAttention, was asked to prepare."""
    work = []
    adapter = ModuleType("ringfeed.sharding.attention.magi")
    vars(adapter)["prepare_model"] = lambda model, wanted: work.append((model, wanted))
    monkeypatch.setitem(sys.modules, adapter.__name__, adapter)
    return work


class Mesh(dict):
    mesh_dim_names = ("cp",)


def state(size=1, rank=0, **fields):
    cp_mesh = SimpleNamespace(size=lambda: size, get_local_rank=lambda: rank)
    return MagiState(enabled=True, cp_size=size, device_mesh=Mesh(cp=cp_mesh), **fields)


def sequence(width=1001, **extra):
    tokens = torch.arange(width).unsqueeze(0)
    return {"input_ids": tokens, "labels": tokens + 1, "attention_mask": torch.ones(1, width), **extra}


def packed(width=1024, lengths=(300, 500), slots=(512, 512)):
    tokens = torch.arange(1, 1 + 2 * width).reshape(2, width)
    return {
        "input_ids": tokens,
        "labels": tokens,
        "position_ids": torch.arange(width).expand(2, -1) % 512,
        "seq_lens": torch.tensor([lengths, (width, -1000)]),
        "seq_lens_padded": torch.tensor([slots, (width, -1000)]),
        "weights": torch.ones(2, width),
        "media": torch.zeros(3),
        "qkv_format": "thd",
    }


def on_every_rank(size, batch, **settings):
    fields = {name: settings.pop(name) for name in ("custom", "domain") if name in settings}
    return [
        state(size, rank, **fields).make_cp_batch(None, batch, return_local_indices=True, **settings)
        for rank in range(size)
    ]


def test_a_state_that_is_not_enabled_prepares_nothing(asked):
    batch = sequence()

    assert MagiState().make_cp_batch(None, batch) is batch
    assert asked == []


@pytest.mark.parametrize("size", [1, 2])
def test_one_sequence_is_dealt_out_with_padding_that_is_never_a_label(asked, size):
    batch = sequence()
    ranks = on_every_rank(size, batch, padding_token_id=7)

    places = torch.cat([indices for _, indices in ranks])
    assert len(places) > 1001
    assert places.sort().values.tolist() == list(range(len(places)))
    for local, indices in ranks:
        real = indices < 1001
        assert torch.equal(local["input_ids"][0, real], indices[real])
        assert torch.equal(local["position_ids"][0, real], indices[real])
        assert set(local["input_ids"][0, ~real].tolist()) <= {7}
        assert set(local["labels"][0, ~real].tolist()) <= {-100}
        assert "attention_mask" not in local
    assert set(batch) == {"input_ids", "labels", "attention_mask"}


def test_the_attention_is_asked_for_the_partition_that_the_batch_has(asked):
    ranks = on_every_rank(2, sequence(), model="model")

    model, work = asked[1]
    partition = work.layout.partition_slices(work.slices, work.total, cp_size=2)
    assert model == "model"
    assert work.layout.chunk_size == 512
    for rank, (_, indices) in enumerate(ranks):
        assert torch.equal(partition.index_maps[rank].positions, indices)


def test_documents_are_dealt_out_by_their_slots_and_keep_their_positions(asked):
    batch = packed()
    ranks = on_every_rank(2, batch, custom=True, is_thd=True)

    expected = MagiLayout(chunk_size=512).index_maps([0, 512, 1024, 2048], cp_size=2)
    stream = batch["input_ids"].flatten()
    for index_map, (local, indices) in zip(expected, ranks, strict=True):
        assert torch.equal(indices, index_map.positions)
        assert torch.equal(local["input_ids"], stream[indices])
        assert torch.equal(local["position_ids"], batch["position_ids"].flatten()[indices])
        assert local["weights"].shape == local["padding_mask"].shape == indices.shape
        assert local["media"].shape == (3,)
        assert local["qkv_format"] == "thd"
        assert not {"cu_seqlens", "cu_seqlens_padded", "max_seqlen"} & set(local)


def test_without_context_parallelism_a_custom_model_gets_the_stream(asked):
    local, indices = on_every_rank(1, packed(), custom=True, is_thd=True, num_chunks=2)[0]

    assert indices is None
    assert local["input_ids"].shape == (2, 1024)
    assert asked == []


def test_rows_of_a_custom_model_are_left_alone_at_one_rank_and_refused_at_more(asked):
    batch = sequence()
    assert on_every_rank(1, batch, custom=True)[0][0] == batch
    with pytest.raises(ValueError, match=r"cp_size=2 .* needs a THD batch"):
        on_every_rank(2, batch, custom=True)


def test_a_prefix_tree_reaches_the_attention_and_leaves_the_batch(asked):
    batch = sequence(prefix_tree=([401, 300, 300], [[0, 1], [0, 2]]))

    local, _ = on_every_rank(1, batch, custom=True)[0]

    assert "prefix_tree" in batch
    assert "prefix_tree" not in local
    assert len(asked[0][1].slices) == 5


@pytest.mark.parametrize(
    ("size", "custom", "error"), [(1, False, NotImplementedError), (2, True, ValueError)], ids=["hf", "cp2"]
)
def test_a_prefix_tree_that_would_be_ignored_is_refused(asked, size, custom, error):
    with pytest.raises(error, match="prefix_tree"):
        on_every_rank(size, sequence(prefix_tree=([1001], [[0]])), custom=custom, is_thd=True)


def test_models_with_a_tower_keep_their_batch(asked):
    batch = sequence()

    assert on_every_rank(1, batch, domain="vlm")[0] == (batch, None)
    assert on_every_rank(2, batch, domain="vlm", custom=True)[0][0] is batch
    assert len(asked) == 1
    assert asked[0][1].slices is None
    with pytest.raises(NotImplementedError, match="cp_size=1"):
        on_every_rank(2, batch, domain="vlm")


@pytest.mark.parametrize("ids", [torch.zeros(2, 8), torch.zeros(8), None])
@pytest.mark.parametrize("domain", ["llm", "vlm"])
def test_behind_hugging_face_a_batch_is_one_sequence(asked, ids, domain):
    with pytest.raises(ValueError, match=r"one sequence \[1, S\]"):
        on_every_rank(1, {"input_ids": ids, "labels": ids}, domain=domain)


def test_the_sharder_trims_what_magi_padded(asked):
    model = SimpleNamespace(config=SimpleNamespace(_attn_implementation="magi"))
    batch = sequence()
    sharder = automodel.ContextParallelSharder(model, None, batch)
    _, local = sharder.shard(batch)

    part = sharder.shard_token_tensor(batch["labels"], fill=-100)

    assert torch.equal(part, local["labels"])
    assert torch.equal(sharder.gather_token_tensor(part, trim=True), batch["labels"])
