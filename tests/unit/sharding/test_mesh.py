"""The arithmetic of meshes: ranks, coordinates, groups, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.sharding.mesh import AXES, MeshShape, RankCoords, get_submesh, mesh_axis_size

sizes = st.integers(1, 3)
shapes = st.builds(MeshShape, pp=sizes, dp_replicate=sizes, dp_shard=sizes, cp=sizes, tp=sizes)


@given(shape=shapes)
def test_every_rank_is_where_a_rank_grid_has_it(shape):
    # What DeviceMesh does: ranks in row-major order.
    grid = torch.arange(shape.num_ranks).reshape(shape.sizes)

    for rank in range(shape.num_ranks):
        coords = shape.coords(rank)
        assert int(grid[tuple(getattr(coords, axis) for axis in AXES)]) == rank
        assert shape.rank(coords) == rank


@given(shape=shapes, data=st.data())
def test_groups_are_slices_of_the_rank_grid(shape, data):
    rank = data.draw(st.integers(0, shape.num_ranks - 1))
    grid = torch.arange(shape.num_ranks).reshape(shape.sizes)
    here = shape.coords(rank)

    for axis, parts in ((a, [a]) for a in AXES):
        at = tuple(slice(None) if a in parts else getattr(here, a) for a in AXES)
        assert shape.group(axis, rank) == grid[at].tolist()
    both = grid[here.pp, :, :, here.cp, here.tp].flatten().tolist()
    assert shape.group("dp", rank) == both
    assert shape.group("dp_cp", rank) == grid[here.pp, :, :, :, here.tp].flatten().tolist()


@given(shape=shapes, data=st.data())
def test_a_rank_stands_in_its_group_at_its_axis_rank(shape, data):
    rank = data.draw(st.integers(0, shape.num_ranks - 1))

    for axis in (*AXES, "dp", "dp_cp"):
        group = shape.group(axis, rank)
        assert group[shape.axis_rank(axis, rank)] == rank
        assert len(group) == shape.size(axis)


def test_tp_peers_are_neighbours_then_cp_peers():
    shape = MeshShape(dp_shard=2, cp=2, tp=2)

    assert shape.group("tp", 5) == [4, 5]
    assert shape.group("cp", 5) == [5, 7]
    assert shape.group("dp", 5) == [1, 5]
    assert shape.coords(5) == RankCoords(dp_shard=1, cp=0, tp=1)


def test_what_a_loader_is_told():
    shape = MeshShape(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)

    assert shape.loader_ranks(31) == {"dp_rank": 3, "dp_size": 4, "cp_rank": 1, "cp_size": 2}
    # pp and tp peers get the same data.
    assert shape.loader_ranks(6) == shape.loader_ranks(7) == shape.loader_ranks(22)


@pytest.mark.parametrize("size", [0, -2, 1.0, True, None])
def test_a_wrong_size_is_refused(size):
    with pytest.raises(ValueError, match="cp must be an integer of at least 1, got"):
        MeshShape(cp=size)


@pytest.mark.parametrize(
    ("shape", "num_ranks", "fits"),
    [
        (MeshShape(dp_shard=2, cp=2), 8, MeshShape(dp_shard=4, cp=2)),
        (MeshShape(cp=4, tp=2), 64, MeshShape(dp_shard=8, cp=4, tp=2)),
        (MeshShape(dp_replicate=2, dp_shard=4, tp=8), 32, MeshShape(dp_replicate=2, dp_shard=2, tp=8)),
        # No whole number of dp_shard fits, but one replica fewer does.
        (MeshShape(dp_replicate=2, dp_shard=3), 3, MeshShape(dp_replicate=1, dp_shard=3)),
        (MeshShape(cp=8), 4, MeshShape(cp=4)),
        # tp keeps 2 of 4, cp what is left of it, and nothing remains.
        (MeshShape(dp_shard=5, cp=4, tp=4), 6, MeshShape(dp_shard=3, tp=2)),
    ],
)
def test_a_wrong_product_is_refused_with_a_shape_that_fits(shape, num_ranks, fits):
    assert fits.num_ranks == num_ranks
    with pytest.raises(ValueError, match=f"the world has {num_ranks}; what would fit: ") as caught:
        shape.check_num_ranks(num_ranks)

    assert str(caught.value).endswith(str(fits))


@given(shape=shapes, num_ranks=st.integers(1, 100))
def test_what_would_fit_fits(shape, num_ranks):
    shape.fitted(num_ranks).check_num_ranks(num_ranks)
    if num_ranks == shape.num_ranks:
        assert shape.fitted(num_ranks) == shape


def test_the_message_has_the_whole_product():
    with pytest.raises(ValueError, match=r"^pp=1 \* dp_replicate=1 \* dp_shard=2 \* cp=2 \* tp=1 is 4 ranks"):
        MeshShape(dp_shard=2, cp=2).check_num_ranks(6)


def test_axes_may_be_left_out_but_not_change_places():
    assert MeshShape.from_axes({"dp_shard": 2, "tp": 4}) == MeshShape(dp_shard=2, tp=4)

    with pytest.raises(ValueError, match=r"order tp, cp, .* cp, tp \(outermost first\)") as caught:
        MeshShape.from_axes({"tp": 4, "cp": 2})
    assert str(caught.value).endswith(str(MeshShape(cp=2, tp=4)))


def test_an_unknown_axis_is_refused():
    with pytest.raises(ValueError, match="unknown mesh axis 'ep'; known, outermost first: pp, dp_replicate"):
        MeshShape.from_axes({"ep": 2})
    with pytest.raises(ValueError, match=r"'dp' \(dp is dp_replicate and dp_shard taken together\)"):
        MeshShape.from_axes({"dp": 2})
    with pytest.raises(ValueError, match=r"unknown mesh axis 'ep'; known: .*dp_cp"):
        MeshShape().size("ep")


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_outside_is_refused(rank):
    with pytest.raises(ValueError, match=f"rank={rank} must be at least 0 and below 4"):
        MeshShape(cp=4).coords(rank)


def test_coordinates_outside_are_refused():
    with pytest.raises(ValueError, match="coordinate cp=2 must be at least 0 and below cp=2"):
        MeshShape(cp=2).rank(RankCoords(cp=2))
    with pytest.raises(ValueError, match="num_ranks must be at least 1, got 0"):
        MeshShape().check_num_ranks(0)


class MappedMesh(dict):
    mesh_dim_names = ("cp",)


def test_submesh_of_a_mapping():
    cp = SimpleNamespace(size=lambda: 4)
    mesh = MappedMesh(cp=cp, tp=cp)

    assert get_submesh(mesh, "cp") is cp
    assert mesh_axis_size(mesh, "cp") == 4
    # The names decide, not the keys.
    assert get_submesh(mesh, "tp") is None


@pytest.mark.parametrize(
    "mesh", [None, object(), SimpleNamespace(mesh_dim_names=None), SimpleNamespace(mesh_dim_names=("dp",))]
)
def test_no_submesh_is_none_and_of_size_0(mesh):
    assert get_submesh(mesh, "cp") is None
    assert mesh_axis_size(mesh, "cp") == 0


def test_axes_may_go_by_their_order():
    assert MeshShape(2, 1, 4, 8, 3) == MeshShape(pp=2, dp_replicate=1, dp_shard=4, cp=8, tp=3)
    assert RankCoords(1, 0, 3, 7, 2) == RankCoords(pp=1, dp_replicate=0, dp_shard=3, cp=7, tp=2)
