"""The MagiAttention adapter against a stand-in package, written to a folder, with MagiAttention's own API."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ringfeed.sharding.attention import magi
from ringfeed.sharding.attention.magi_package import is_magi_available, load_magi
from ringfeed.sharding.automodel_magi import MagiState, MagiWork
from ringfeed.sharding.magi.layout import MagiLayout
from ringfeed.sharding.optional import MissingDependencyError

STAND_IN = Path(__file__).with_name("magi_stand_in")
API = (STAND_IN / "api.py.txt").read_text()
PACKAGE = {
    "__init__.py": "",
    "api.py": API,
    "common.py": (STAND_IN / "common.py.txt").read_text(),
    "magi_attn_ext.py": "",
    "meta/__init__.py": "",
    "meta/solver/__init__.py": "",
    "meta/solver/dispatch_solver.py": (STAND_IN / "dispatch_solver.py.txt").read_text(),
}


class Group:
    def __init__(self, size=1, rank=0):
        self._size, self._rank = size, rank

    def size(self):
        return self._size

    def rank(self):
        return self._rank


class StandInMesh(dict):
    @property
    def mesh_dim_names(self):
        return tuple(self)


class ToyAttention(nn.Module):
    pass


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.vision = nn.ModuleList([ToyAttention()])
        self.language_model = nn.ModuleList([ToyAttention(), nn.Linear(1, 1), ToyAttention()])


def toy(module=None):
    model = nn.Sequential(ToyAttention(), nn.Linear(1, 1), ToyAttention()) if module is None else module
    model.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2, hidden_size=64)
    return model


@pytest.fixture
def install(tmp_path, monkeypatch):
    """Write a package ``magi_attention``; what was imported of it is forgotten, also afterwards."""

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] == "magi_attention"]:
            del sys.modules[name]

    def write(**changes):
        for name, text in {**PACKAGE, **changes}.items():
            if text is not None:
                path = tmp_path / "magi_attention" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    forget()
    yield write
    forget()


@pytest.fixture
def api(install):
    install()
    return load_magi()


HEADS = magi.MagiHeads(num_heads_q=4, num_heads_kv=2, head_dim=16)
LAYOUT = MagiLayout(chunk_size=64)
OFFSETS = [0, 300, 301, 1001]


def key_of(layout=LAYOUT, group=None, offsets=OFFSETS):
    slices = layout.slices(offsets)
    return magi.build_key(layout, slices, int(offsets[-1]), heads=HEADS, group=group or Group())


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"api.py": None, "common.py": None}, MissingDependencyError, "empty placeholder from PyPI"),
        ({"magi_attn_ext.py": None}, ImportError, "extension magi_attn_ext is not built"),
        (
            {"magi_attn_ext.py": "raise ImportError('magi_attn_ext.so: undefined symbol')"},
            ImportError,
            "magi_attn_ext is not built or does not load .*undefined symbol",
        ),
        (
            {"api.py": "from magi_attention import magi_attn_ext\n", "magi_attn_ext.py": None},
            ImportError,
            "extension magi_attn_ext is not built",
        ),
        (
            {"api.py": API.replace("num_heads_q,\n", "\n", 1).replace("num_heads_q, ", "0, ")},
            ImportError,
            r"too old: it lacks magi_attn_flex_key\(num_heads_q=\)",
        ),
        ({"api.py": API.replace("def roll(", "def rolled(")}, ImportError, "too old: it lacks roll;"),
        (
            {"api.py": "import no_such_dependency"},
            ModuleNotFoundError,
            "No module named 'no_such_dependency'",
        ),
    ],
)
def test_what_is_wrong_with_the_package_is_told(install, changes, error, message):
    install(**changes)

    with pytest.raises(error, match=message) as caught:
        load_magi()

    assert type(caught.value) is error
    assert not is_magi_available()


def test_an_absent_package_is_told(monkeypatch):
    if is_magi_available():
        pytest.skip("MagiAttention is installed")
    with pytest.raises(MissingDependencyError, match="MagiAttention is not installed"):
        load_magi()


def test_a_whole_package_is_available(install):
    install()

    assert is_magi_available()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_key_is_verified_against_layout_and_partition(api, rank):
    key = key_of(group=Group(2, rank))

    assert key.pad_size == -1001 % 126
    magi.verify(LAYOUT, key)
    magi.verify(LAYOUT.partition(OFFSETS, cp_size=2), key)


def test_the_key_tells_algorithm_and_mask(api):
    layout = MagiLayout(chunk_size=64, algorithm="sequential_select", causal=False, window=(3, 0))
    key = key_of(layout, Group(2))

    assert key.dist_attn_config.dispatch_config.alg == api.SequentialDispatchAlg()
    wanted = layout.slices(OFFSETS).to_tuples()
    assert [row[4] for row in wanted] == [kind.value for kind in key.attn_mask_type[: len(wanted)]]
    other = key_of(MagiLayout(algorithm="backtracing_pruning"), Group(2))
    assert type(other.dist_attn_config.dispatch_config.alg).__name__ == "BTPDispatchAlg"


def test_another_algorithm_is_seen_in_the_positions(api):
    key = key_of(group=Group(2))

    with pytest.raises(ValueError, match=r"position ids of rank 0 differ in \d+ of \d+ tokens: token \d+ is"):
        magi.verify(MagiLayout(chunk_size=64, algorithm="sequential_select"), key)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (MagiLayout(chunk_size=32), "chunk_size is 63 in MagiAttention's key and 32 by the layout"),
        (MagiLayout(chunk_size=64, uneven=True), "pad_size is 7 in MagiAttention's key and 0 by"),
    ],
)
def test_other_sizes_are_refused(api, layout, message):
    key = key_of(group=Group(2))

    with pytest.raises(ValueError, match=message):
        magi.verify(layout, key)


def test_another_environment_is_refused_as_the_key_is_built(api, monkeypatch):
    monkeypatch.setattr(api, "M", 16)

    with pytest.raises(ValueError, match=r"chunk_size is 32 .* 63 .*MAGI_ATTENTION_MIN_CHUNKS_PER_RANK"):
        key_of(group=Group(2))


def test_offsets_written_in_place_make_another_key(api):
    offsets, group = torch.tensor([0, 512, 1024]), Group()
    first = key_of(group=group, offsets=offsets)
    offsets[1] = 100

    second = key_of(group=group, offsets=offsets)

    assert first.q_ranges == ((0, 512), (512, 1024))
    assert second.q_ranges == ((0, 100), (100, 1024))


def test_a_key_that_returns_is_the_most_recent_one(api):
    group = Group()
    first = key_of(group=group)
    key_of(group=group, offsets=[0, 1001])

    assert key_of(group=group) == first
    assert api.get_most_recent_key(group) == first


def test_the_tower_keeps_its_own_attention(api):
    model, group = Tower(), Group()

    assert magi.stamp_cp_group(model, group) == 2

    assert all(
        vars(module)["cp_group"] is group
        for module in model.language_model
        if isinstance(module, ToyAttention)
    )
    assert not hasattr(model.vision[0], "cp_group")
    with pytest.raises(ValueError, match="Linear has no module with 'Attention'"):
        magi.stamp_cp_group(nn.Linear(1, 1), group)


def test_an_active_key_is_taken_back_also_after_an_error(api):
    model, group = toy(), Group()
    magi.stamp_cp_group(model, group, self_key=True)
    del model[2]._magi_self_key
    before = [dict(vars(module)) for module in (model[0], model[2])]

    def fail_inside():
        with magi.active_key(model, "outer"):
            with magi.active_key(model, "inner"):
                assert [model[0].magi_key, model[2].magi_key] == ["inner", "inner"]
            assert [model[0].magi_key, model[0]._magi_self_key] == ["outer", False]
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()

    assert [dict(vars(module)) for module in (model[0], model[2])] == before


def work_of(group, layout=LAYOUT, offsets=OFFSETS):
    state = MagiState(enabled=True, cp_group=group, cp_size=group.size())
    return MagiWork(slices=LAYOUT.slices(offsets), total=offsets[-1], state=state, layout=layout)


def test_a_model_is_verified_once_and_stamped_each_time(api):
    model, group = toy(), Group(2, 1)
    del api.LOG[:]

    magi.prepare_model(model, work_of(group))
    first = model[0].magi_key
    magi.prepare_model(model, work_of(group, offsets=[0, 1024]))

    # Each key is touched once, and the first one read once more.
    assert api.LOG == ["get_position_ids"] * 3
    assert model[0].cp_group is group
    assert model[2].magi_key is model[0].magi_key != first
    assert (first.num_heads_q, first.num_heads_kv, first.head_dim) == (4, 2, 16)


def test_a_wrong_deal_is_refused_before_the_model_is_touched(api, monkeypatch):
    model = toy()
    monkeypatch.setattr(api, "get_position_ids", lambda _: torch.arange(504))

    with pytest.raises(ValueError, match="position ids of rank 1 differ"):
        magi.prepare_model(model, work_of(Group(2, 1)))

    assert not hasattr(model[0], "cp_group")


def test_tokens_that_stay_in_place_are_not_padded(api):
    model = toy()

    magi.prepare_model(model, work_of(Group(), layout=None))

    assert (model[0].magi_key.pad_size, model[0].magi_key.chunk_size) == (0, 1)


def test_a_length_met_in_the_forward_makes_its_own_key(api):
    model, group = toy(), Group()
    state = MagiState(enabled=True, cp_group=group, domain="vlm")
    magi.prepare_model(model, MagiWork(slices=None, total=None, state=state))
    query = torch.zeros(2, 37, 16).transpose(0, 1)

    out = magi.magi_attention(model[0], query, query, query)

    assert torch.equal(out, query + 1)
    assert (api.LOG[-1].total_seqlen_q, api.LOG[-1].pad_size) == (37, 0)
    assert api.LOG[-1].q_ranges == ((0, 37),)
    magi.stamp_cp_group(model, Group(2), self_key=True)
    with pytest.raises(ValueError, match="needs cp_size=1, got 2"):
        magi.magi_attention(model[0], query, query, query)


def test_modules_that_were_not_prepared_are_refused(api):
    model, query = toy(), torch.zeros(3, 2, 16)

    with pytest.raises(ValueError, match="no cp_group; call prepare_model"):
        magi.magi_attention(model[0], query, query, query)
    magi.stamp_cp_group(model, Group())
    with pytest.raises(ValueError, match="no magi_key; call prepare_model"):
        magi.magi_attention(model[0], query, query, query)


def test_no_group_and_no_heads_are_told(api):
    work = MagiWork(slices=None, total=None, state=MagiState(enabled=True))
    with pytest.raises(ValueError, match="needs a process group also for one rank"):
        magi.prepare_model(toy(), work)
    with pytest.raises(ValueError, match="no config with num_attention_heads"):
        magi.MagiHeads.of_model(nn.Linear(1, 1))


def test_heads_are_those_of_one_tensor_parallel_rank(api):
    model, work = toy(), work_of(Group(2, 1))
    work.state.device_mesh = StandInMesh(cp=Group(2, 1), tp=Group(2))

    magi.prepare_model(model, work)

    key = model[0].magi_key
    assert (key.num_heads_q, key.num_heads_kv, key.head_dim) == (2, 1, 16)
    assert magi.MagiHeads.of_model(model) == HEADS


def test_heads_that_the_ranks_cannot_share_are_refused():
    message = r"=4 and num_key_value_heads=2 of Sequential must be multiples of tp_size=4; use fewer tp"
    with pytest.raises(ValueError, match=message):
        magi.MagiHeads.of_model(toy(), tp_size=4)


def test_the_stream_comes_back_without_padding(api):
    key = key_of()
    local = torch.arange(1024).expand(2, -1)

    assert torch.equal(magi.undispatch(local, key, dim=1), torch.arange(1001).expand(2, -1))


@pytest.mark.parametrize("shift", [-2, 3])
def test_rolled_tokens_from_outside_are_filled(api, shift):
    key, partition = key_of(), LAYOUT.partition(OFFSETS, cp_size=1)
    local = torch.arange(1, 1025).unsqueeze(0)

    rolled = magi.roll(local, key, shift=shift, partition=partition, fill=-100, dim=1)[0].tolist()

    sources = [place - shift for place in range(1024)]
    assert rolled == [source + 1 if 0 <= source < 1001 else -100 for source in sources]
    plain = magi.roll(local, key, shift=shift, partition=partition, dim=1)
    assert torch.equal(plain, torch.roll(local, shift, 1))
