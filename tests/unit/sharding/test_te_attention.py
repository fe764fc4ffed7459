"""TransformerEngine attention, set up: a stand-in everywhere, the real class under the marker ``gpu``."""

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from ringfeed.sharding.attention.te import attach_te_context_parallel, configure_te_attention
from ringfeed.sharding.attention.te_communication import CommType, TeCommunication, a2a_p2p_ranks

MODULE = "transformer_engine.pytorch.attention"


class StandInAttention(nn.Module):
    """What of ``DotProductAttention`` is used."""

    def __init__(self, num_attention_heads, _kv_channels, num_gqa_groups=None, window_size=(-1, 0), **_):
        super().__init__()
        self.num_attention_heads = num_attention_heads
        self.num_gqa_groups = num_gqa_groups or num_attention_heads
        self.num_gqa_groups_per_partition = self.num_gqa_groups
        self.window_size = window_size
        self.tp_size, self.tp_group = 1, None
        self.cp_group = self.cp_global_ranks = self.cp_stream = None
        self.cp_comm_type = "untouched"

    def set_tensor_parallel_group(self, tp_group):
        self.tp_group = tp_group

    def set_context_parallel_group(self, cp_group, cp_global_ranks, cp_stream, cp_comm_type="p2p"):
        self.cp_group, self.cp_global_ranks, self.cp_stream = cp_group, cp_global_ranks, cp_stream
        self.cp_comm_type = cp_comm_type


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.gpu)])
def attention_class(request, monkeypatch):
    if request.param == "real":
        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device: TransformerEngine's attention refuses to be made without one")
        return pytest.importorskip(MODULE, reason="needs transformer-engine").DotProductAttention
    module = ModuleType(MODULE)
    monkeypatch.setattr(module, "DotProductAttention", StandInAttention, raising=False)
    monkeypatch.setitem(sys.modules, MODULE, module)
    return StandInAttention


@pytest.fixture
def mesh():
    """tp 2 x cp 4 as rank 5 sees it, with groups that carry nothing."""
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield init_device_mesh("cpu", (2, 4), mesh_dim_names=("tp", "cp"))
    dist.destroy_process_group()


def block(attention, **attributes):
    """A decoder layer with a ``self_attn`` that holds ``attention``."""
    layer = nn.Module()
    layer.self_attn = nn.Module()
    layer.self_attn.attn_module = attention
    for name, value in attributes.items():
        setattr(layer.self_attn, name, value)
    return layer


def attention_of(attention_class, *, heads=8, groups=4, **options):
    return attention_class(
        heads, 64, num_gqa_groups=groups, qkv_format="thd", attn_mask_type="padding_causal", **options
    )


def model_of(*attentions):
    model = nn.Module()
    model.layers = nn.ModuleList(block(attention) for attention in attentions)
    return model


def members(group):
    return dist.get_process_group_ranks(group)


def check_untouched(attention):
    assert attention.tp_size == 1
    assert attention.num_gqa_groups_per_partition == attention.num_gqa_groups
    assert attention.cp_group is None


def test_cp_gives_every_module_the_ring(attention_class, mesh):
    first, second = attention_of(attention_class), attention_of(attention_class)

    assert attach_te_context_parallel(model_of(first, second), cp_mesh=mesh["cp"]) == 2

    for attention in (first, second):
        assert members(attention.cp_group) == attention.cp_global_ranks == [4, 5, 6, 7]
        assert attention.cp_comm_type == "p2p"
        assert type(attention.cp_comm_type) is str
        assert attention.tp_size == 1
    assert first.cp_stream is second.cp_stream
    assert (first.cp_stream is None) == (not torch.cuda.is_available())


def test_tp_splits_the_heads(attention_class, mesh):
    attention = attention_of(attention_class)

    assert attach_te_context_parallel(model_of(attention), tp_mesh=mesh["tp"]) == 1

    assert attention.tp_size == 2
    assert attention.num_gqa_groups_per_partition == 2
    assert members(attention.tp_group) == [1, 5]
    assert attention.cp_group is None


def test_twice_is_the_same_as_once(attention_class, mesh):
    attention = attention_of(attention_class)
    model = model_of(attention)

    for _ in range(2):
        assert attach_te_context_parallel(model, mesh["cp"], mesh["tp"]) == 1

    assert (attention.tp_size, attention.num_gqa_groups_per_partition) == (2, 2)
    assert attention.cp_comm_type == "p2p"


def test_windows_are_gathered(attention_class, mesh):
    own = attention_of(attention_class, window_size=(127, 0))
    told, zero, none = (attention_of(attention_class) for _ in range(3))
    model = nn.ModuleList(
        [
            block(own),
            block(told, sliding_window=128),
            block(zero, sliding_window=0),
            block(none, sliding_window=None),
        ]
    )

    assert attach_te_context_parallel(model, cp_mesh=mesh["cp"]) == 4

    assert [a.cp_comm_type for a in (own, told, zero, none)] == ["all_gather"] * 3 + ["p2p"]


@pytest.mark.parametrize(
    ("communication", "plain", "window"),
    [
        (TeCommunication(comm_type=CommType.ALL_GATHER), "all_gather", "all_gather"),
        (TeCommunication(comm_type=CommType.A2A), "a2a", "a2a"),
        (TeCommunication(comm_type=CommType.A2A_P2P, a2a_size=2), "a2a+p2p", "all_gather"),
    ],
)
def test_another_communication_by_choice(attention_class, mesh, communication, plain, window):
    first, second = attention_of(attention_class), attention_of(attention_class)
    model = nn.ModuleList([block(first), block(second, sliding_window=9)])

    assert configure_te_attention(model, cp_mesh=mesh["cp"], communication=communication) == 2

    assert (first.cp_comm_type, second.cp_comm_type) == (plain, window)
    assert members(second.cp_group) == second.cp_global_ranks == [4, 5, 6, 7]


def test_a2a_p2p_gets_both_groups(attention_class, mesh):
    attention = attention_of(attention_class)
    communication = TeCommunication(comm_type=CommType.A2A_P2P, a2a_size=2)

    configure_te_attention(model_of(attention), cp_mesh=mesh["cp"], communication=communication)

    assert isinstance(attention.cp_group, list)
    assert [members(group) for group in attention.cp_group] == [[4, 5], [5, 7]]
    assert attention.cp_global_ranks == [4, 5, 6, 7]


def test_ring_neighbours_are_where_transformer_engine_looks_for_them():
    ranks = [10, 11, 12, 13, 14, 15]
    for cp_rank in range(6):
        neighbours, ring = a2a_p2p_ranks(ranks, a2a_size=2, cp_rank=cp_rank)
        place, turn = neighbours.index(ranks[cp_rank]), ring.index(ranks[cp_rank])
        # Its index of the next rank in the ring, over the whole cp group.
        assert ranks[(turn + 1) % 3 * 2 + place] == ring[(turn + 1) % 3]


def test_heads_that_do_not_divide_change_no_module(attention_class, mesh):
    first, second = attention_of(attention_class), attention_of(attention_class, heads=6, groups=3)
    model = model_of(first, second)

    with pytest.raises(
        ValueError,
        match=r"^layers.1.self_attn has num_attention_heads=6 and num_gqa_groups=3, .* \(tp_size=2\)",
    ):
        attach_te_context_parallel(model, cp_mesh=mesh["cp"], tp_mesh=mesh["tp"])

    check_untouched(first)
    check_untouched(second)


def test_a2a_needs_heads_for_every_rank(attention_class, mesh):
    attention = attention_of(attention_class, heads=8, groups=2)
    communication = TeCommunication(comm_type=CommType.A2A)

    with pytest.raises(ValueError, match=r"multiple of 8 \(tp_size=2 \* 4 cp ranks that exchange heads\)"):
        configure_te_attention(
            model_of(attention), cp_mesh=mesh["cp"], tp_mesh=mesh["tp"], communication=communication
        )

    check_untouched(attention)
    # The ring leaves heads where they are, so the same model is fine with it.
    assert attach_te_context_parallel(model_of(attention), mesh["cp"], mesh["tp"]) == 1


class SizeOne:
    """A submesh of one rank has no group worth asking for."""

    def size(self):
        return 1


@pytest.mark.parametrize("mesh_of_one", [None, SizeOne()])
def test_without_ranks_modules_are_counted_and_left_alone(attention_class, mesh_of_one):
    attention = attention_of(attention_class, heads=7, groups=7)

    assert attach_te_context_parallel(model_of(attention), mesh_of_one, mesh_of_one) == 1

    check_untouched(attention)


def test_a_model_without_such_a_module_is_warned_about(attention_class, mesh):
    with pytest.warns(UserWarning, match="no TransformerEngine attention was set up: Linear has no module"):
        assert attach_te_context_parallel(nn.Linear(1, 1), cp_mesh=mesh["cp"]) == 0
    elsewhere = nn.Module()
    elsewhere.core = attention_of(attention_class)
    elsewhere.self_attn = nn.Linear(1, 1)
    with pytest.warns(UserWarning, match="it has DotProductAttention at 'core'$"):
        assert attach_te_context_parallel(elsewhere, cp_mesh=mesh["cp"]) == 0
    check_untouched(elsewhere.core)


def test_without_transformer_engine_it_says_what_to_install(monkeypatch):
    # None makes an import of the package fail as if it were not there.
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)

    with pytest.raises(
        ImportError, match=r"attention needs 'transformer_engine.* pip install 'ringfeed\[te\]'"
    ):
        attach_te_context_parallel(nn.Linear(1, 1))


def test_a_package_without_the_class_is_an_import_error(monkeypatch):
    monkeypatch.setitem(sys.modules, MODULE, ModuleType(MODULE))

    with pytest.raises(ImportError, match="has no DotProductAttention"):
        attach_te_context_parallel(nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"comm_type": "ring"}, r"one of p2p, all_gather, a2a, a2a\+p2p, got 'ring'"),
        ({"comm_type": "a2a+p2p"}, "a2a_size belongs to comm_type='a2a.p2p' and is needed there"),
        ({"comm_type": "p2p", "a2a_size": 2}, "got a2a_size=2 with comm_type='p2p'"),
    ],
)
def test_a_wrong_choice_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TeCommunication(**options)


@pytest.mark.parametrize(
    ("a2a_size", "cp_size", "valid"), [(3, 4, r"\[2\]"), (4, 4, r"\[2\]"), (1, 3, "none")]
)
def test_an_a2a_size_that_leaves_nothing_to_one_exchange_is_refused(a2a_size, cp_size, valid):
    with pytest.raises(
        ValueError, match=f"a2a_size={a2a_size} must divide cp_size={cp_size} .* valid: {valid}"
    ):
        TeCommunication(comm_type=CommType.A2A_P2P, a2a_size=a2a_size).head_ranks(cp_size)
