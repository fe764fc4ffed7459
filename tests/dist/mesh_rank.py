"""One rank of ``test_mesh_build.py``: SCRIPT FOLDER NUM_RANKS RANK, told its rank as srun would."""

import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from ringfeed.sharding.attention.te_communication import CommType, TeCommunication
from ringfeed.sharding.mesh import AXES, MeshShape, get_submesh, mesh_axis_size
from ringfeed.sharding.mesh_build import build_device_mesh, flat_submesh
from ringfeed.sharding.mesh_environment import read_rank_environment


def slurm_variables(folder: Path, num_ranks: int, rank: int) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank),
        "SLURM_NTASKS": str(num_ranks),
        "SLURM_LOCALID": str(rank),
        "SLURM_JOB_ID": "77",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": (folder / "port").read_text(),
    }


def check_axis(mesh, shape: MeshShape, axis: str, rank: int) -> None:
    submesh = mesh[axis] if axis in AXES else flat_submesh(mesh, axis)
    members = shape.group(axis, rank)
    assert dist.get_process_group_ranks(mesh.get_group(axis)) == members, axis
    assert dist.get_process_group_ranks(submesh.get_group()) == members, axis
    assert submesh.size() == shape.size(axis) == len(members), axis
    assert submesh.get_local_rank() == shape.axis_rank(axis, rank), axis
    # The group is the one it says it is: a sum over it is the sum of its members.
    total = torch.tensor([rank])
    dist.all_reduce(total, group=submesh.get_group())
    assert int(total) == sum(members), axis


def check_a2a_p2p_groups(num_ranks: int, rank: int) -> None:
    """Half the world exchanges heads, pairs across the halves form rings; other ranks take no part."""
    cp_mesh = build_device_mesh({"cp": num_ranks})["cp"]
    neighbours = num_ranks // 2

    bound = TeCommunication(comm_type=CommType.A2A_P2P, a2a_size=neighbours).bind(cp_mesh)

    first = rank // neighbours * neighbours
    expected = [list(range(first, first + neighbours)), [rank % neighbours, rank % neighbours + neighbours]]
    for group, members in zip(bound.groups, expected, strict=True):
        total = torch.tensor([rank])
        dist.all_reduce(total, group=group)
        assert int(total) == sum(members), members
    assert bound.ranks == list(range(num_ranks))


def main() -> None:
    torch.set_num_threads(1)
    folder, num_ranks, rank = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    os.environ.update(slurm_variables(folder, num_ranks, rank))
    shape = MeshShape(dp_shard=num_ranks // 2, cp=2)

    mesh = build_device_mesh(shape)

    assert (dist.get_rank(), dist.get_world_size()) == (rank, num_ranks)
    assert dist.get_backend() == "gloo"
    assert mesh.mesh_dim_names == AXES
    assert tuple(mesh.shape) == shape.sizes
    with warnings.catch_warnings(action="error"):
        for axis in (*AXES, "dp", "dp_cp"):
            check_axis(mesh, shape, axis, rank)
    assert mesh["dp_cp"] == flat_submesh(mesh, "dp_cp")
    with pytest.raises(ValueError, match="name='cp' must be one of dp, dp_cp"):
        flat_submesh(mesh, "cp")
    assert get_submesh(mesh, "cp").get_local_rank() == shape.coords(rank).cp
    assert [mesh_axis_size(mesh, axis) for axis in ("pp", "cp", "ep")] == [1, 2, 0]
    # A second mesh goes by the process group that is there, whatever the variables say now.
    os.environ["SLURM_NTASKS"] = "1"
    again = build_device_mesh(MeshShape(dp_replicate=2, dp_shard=num_ranks // 4, cp=2))
    assert dist.get_process_group_ranks(again["dp"].get_group()) == shape.group("dp", rank)
    with pytest.raises(ValueError, match=f"the world has {num_ranks}; what would fit"):
        build_device_mesh(MeshShape(cp=num_ranks * 2))
    assert read_rank_environment({**os.environ, "SLURM_NTASKS": str(num_ranks)}).rank == rank
    check_a2a_p2p_groups(num_ranks, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
