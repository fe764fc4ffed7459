"""Which way a batch is sharded, told from model, mesh and batch."""

import contextlib
from enum import Enum
from types import SimpleNamespace

import pytest
import torch

from ringfeed.sharding import automodel
from ringfeed.sharding.automodel import ContextParallelSharder


class Backend(Enum):
    TE = "te"


class TextBackend(str, Enum):  # noqa: UP042 - as the original's users have it; a StrEnum would say "te"
    TE = "te"


def submesh(size, rank=0):
    group = SimpleNamespace(size=lambda: size)
    return SimpleNamespace(size=lambda: size, get_local_rank=lambda: rank, get_group=lambda: group)


class Mesh(dict):
    @property
    def mesh_dim_names(self):
        return tuple(self)


def mesh(size, rank=0):
    return Mesh(cp=submesh(size, rank), tp=submesh(1))


def batch(width=8, **extra):
    tokens = torch.arange(width).unsqueeze(0)
    lengths = torch.tensor([[width]])
    made = {"input_ids": tokens, "labels": tokens, "position_ids": tokens}
    return {**made, "seq_lens": lengths, "seq_lens_padded": lengths, **extra}


def model(attn=None, **attributes):
    backend = {} if attn is None else {"backend": SimpleNamespace(attn=attn)}
    return SimpleNamespace(**backend, **attributes)


def hf_model(implementation, **config):
    return SimpleNamespace(config=SimpleNamespace(_attn_implementation=implementation, **config))


class StubMagi:
    enabled, cp_size, domain = True, 2, "llm"

    def __init__(self, indices):
        self.indices = indices

    def make_cp_batch(self, _cp_mesh, batch, **settings):
        self.settings = settings
        return {"input_ids": batch["input_ids"]}, self.indices


@pytest.mark.parametrize(
    ("given", "backend"),
    [
        (None, None),
        (SimpleNamespace(), None),
        (model("te"), "te"),
        (model(""), ""),
        (SimpleNamespace(backend=SimpleNamespace(attn=""), config=hf_model("te").config), ""),
        (model(Backend.TE), "Backend.TE"),
        (model(TextBackend.TE), "TextBackend.TE"),
        (hf_model("sdpa"), "sdpa"),
        (hf_model(None, _attn_implementation_internal="magi"), "magi"),
        (hf_model("sdpa", _attn_implementation_internal="magi"), "sdpa"),
        (hf_model(None, text_config=SimpleNamespace(_attn_implementation="flash")), "flash"),
        (hf_model("sdpa", text_config=SimpleNamespace(_attn_implementation="flash")), "sdpa"),
        (hf_model(None, text_config=SimpleNamespace(_attn_implementation_internal="magi")), "magi"),
        (SimpleNamespace(backend=SimpleNamespace(attn="te"), config=hf_model("sdpa").config), "te"),
    ],
)
def test_the_backend_is_read_from_the_model_then_its_config(given, backend):
    assert automodel._attention_backend(given) == backend


@pytest.mark.parametrize(
    ("given", "uses"),
    [
        (model("te"), True),
        (model("TE"), False),
        (model(Backend.TE), False),
        (model("sdpa", _te_attention_injected=0), False),
        (model("sdpa", _te_attention_injected=1), True),
        (None, False),
    ],
)
def test_te_is_native_or_injected(given, uses):
    assert automodel._uses_te_attention(given) is uses


@pytest.mark.parametrize("tower", ["visual", "vision_model", "vision_tower", "audio_model", "audio_tower"])
def test_a_tower_makes_a_model_multimodal(tower):
    assert automodel._is_multimodal_model(model(**{tower: object()}))
    assert not automodel._is_multimodal_model(model(**{tower: None}))


@pytest.mark.parametrize("name", ["vision_config", "audio_config"])
def test_so_does_a_towers_config_even_if_empty(name):
    assert automodel._is_multimodal_model(hf_model("sdpa", **{name: {}}))
    assert not automodel._is_multimodal_model(hf_model("sdpa", **{name: None}))


@pytest.mark.parametrize(
    "given",
    [
        model(model=SimpleNamespace(visual=object())),
        hf_model("sdpa", text_config=SimpleNamespace(vision_config={})),
        SimpleNamespace(config={"vision_config": {}}),
        None,
    ],
    ids=["a level down", "in the text's config", "config is a dict", "no model"],
)
def test_a_tower_elsewhere_does_not_count_as_in_the_original(given):
    assert not automodel._is_multimodal_model(given)


@pytest.mark.parametrize("size", [None, 2])
@pytest.mark.parametrize("towers", [{}, {"visual": object()}], ids=["llm", "vlm"])
@pytest.mark.parametrize("custom", [True, False])
def test_magi_state_of_every_kind_of_model(custom, towers, size):
    given = model("magi", **towers) if custom else hf_model("magi")
    if towers and not custom:
        given.visual = towers["visual"]
    device_mesh = None if size is None else mesh(size)

    state = automodel._magi_state_from_model(given, device_mesh)

    assert state is not None
    assert state.enabled
    assert state.custom is custom
    assert state.hf_dispatch is not custom
    assert state.domain == ("vlm" if towers else "llm")
    assert state.cp_size == (size or 1)
    assert (state.cp_group is None) == (size is None)
    assert state.device_mesh is device_mesh


@pytest.mark.parametrize("given", [None, model("te"), hf_model("sdpa")])
def test_other_models_have_no_magi_state(given):
    assert automodel._magi_state_from_model(given, mesh(2)) is None


def resolve(size, **ways):
    settings = {
        "magi": None,
        "is_thd": False,
        "num_chunks": 1,
        "seq_lens_padding_value": -1000,
        "model": None,
    }
    model_sharder = ways.pop("model_sharder", None)
    return automodel._resolve_cp_sharder(submesh(size), model_sharder, **{**settings, **ways})


def test_ways_go_in_the_order_model_magi_thd_ring_identity():
    own = ContextParallelSharder(shard_batch=automodel.shard_batch_identity)
    magi = StubMagi(None)

    assert resolve(1, model_sharder=own, magi=magi, is_thd=True) is own
    assert resolve(1, magi=magi, is_thd=True).shard_batch.magi is magi
    assert type(resolve(1, is_thd=True).shard_batch).__name__ == "_TeSharding"
    assert resolve(2).local_token_global_indices is automodel.round_robin_local_indices
    assert resolve(1).shard_batch is automodel.shard_batch_identity


def test_extra_buffers_are_for_the_ring_alone():
    buffers = {"teacher": 1}

    assert resolve(2, extra_seq_buffers=buffers).shard_batch.keywords == {"extra_seq_buffers": buffers}
    assert resolve(1, extra_seq_buffers=buffers).shard_batch is automodel.shard_batch_identity


def test_a_disabled_magi_is_none():
    disabled = SimpleNamespace(enabled=False)
    assert resolve(1, magi=disabled).shard_batch is automodel.shard_batch_identity


@pytest.mark.parametrize(
    ("indices", "layout"),
    [(torch.arange(4), (None, (1, 8), 8)), (torch.arange(8), (8, None, 16))],
    ids=["no-padding", "padded"],
)
def test_magi_tells_where_tokens_went(indices, layout):
    magi = StubMagi(indices)
    _, _, sharder = automodel._make_cp_batch_and_ctx(mesh(2), batch(), magi=magi, num_chunks=3, model="m")

    told = sharder.shard_layout
    assert told is not None
    assert (told.original_seq_len, told.input_row_shape, told.padded_seq_len) == layout
    assert magi.settings["num_chunks"] == 3
    assert magi.settings["model"] == "m"


def test_without_context_parallelism_the_batch_is_the_same_object():
    given = batch()
    context, made, sharder = automodel._make_cp_batch_and_ctx(None, given)

    assert context is contextlib.nullcontext
    assert made is given
    assert torch.equal(sharder.shard_token_tensor(torch.arange(8).unsqueeze(0)), given["input_ids"])


def test_extra_buffers_of_a_thd_batch_are_refused_before_anything_happens():
    with pytest.raises(ValueError, match=r"extra_seq_buffers=\['teacher'\] are not supported by the THD"):
        automodel._make_cp_batch_and_ctx(None, {}, use_te=True, extra_seq_buffers={"teacher": 1})

    asked: list[int] = []
    given = hooked({}, asked, "te")
    with pytest.raises(ValueError, match="not supported by the THD"):
        automodel._prepare_cp_sharder(
            given, mesh(2), batch(qkv_format="thd"), extra_seq_buffers={"teacher": 1}
        )
    assert asked == []


@pytest.mark.parametrize(
    ("attn", "fields", "way"),
    [
        ("te", {"qkv_format": "thd"}, "_TeSharding"),
        ("sdpa", {"qkv_format": "thd"}, "partial"),
        ("te", {}, "partial"),
        ("magi", {"qkv_format": "thd"}, "_MagiSharding"),
    ],
)
def test_thd_needs_a_thd_batch_and_a_backend_that_takes_it(attn, fields, way):
    sharder = automodel._prepare_cp_sharder(model(attn), mesh(2), batch(**fields))

    assert type(sharder.shard_batch).__name__ == way


def hooked(returned, calls, attn="sdpa", **attributes):
    def prepare(given, *, num_chunks):
        calls.append(num_chunks)
        return returned

    return model(attn, prepare_model_inputs_for_cp=prepare, **attributes)


def test_a_hooks_entries_join_the_batch_when_it_is_sharded():
    own = ContextParallelSharder(shard_batch=automodel.shard_batch_identity)
    calls: list[int] = []
    given = batch()
    before = set(given)

    sharder = ContextParallelSharder(
        hooked({"cp_sharder": own, "mark": 1}, calls), mesh(2), given, num_chunks=5
    )
    assert set(given) == before
    _, made = sharder.shard(given)

    assert sharder.shard_batch is automodel.shard_batch_identity
    assert calls == [5]
    assert made["mark"] == 1
    assert set(given) == before


@pytest.mark.parametrize(
    ("size", "attn", "attributes", "settings", "asked"),
    [
        (1, "sdpa", {}, {}, False),
        (2, "sdpa", {}, {}, True),
        (1, "te", {"supports_thd": True}, {}, True),
        (2, "sdpa", {}, {"invoke_pre_embed": False}, False),
        (2, "magi", {}, {}, False),
        (2, "magi", {"visual": 1}, {}, True),
    ],
)
def test_when_the_hook_is_asked(size, attn, attributes, settings, asked):
    calls: list[int] = []
    given = hooked({}, calls, attn, **attributes)

    automodel._prepare_cp_sharder(given, mesh(size), batch(qkv_format="thd"), **settings)

    assert bool(calls) is asked


def test_a_hook_that_returns_nothing_is_refused():
    with pytest.raises(ValueError, match="prepare_model_inputs_for_cp returned None"):
        automodel._prepare_cp_sharder(hooked(None, []), mesh(2), batch())
