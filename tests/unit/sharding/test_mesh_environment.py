"""Which rank a process is, from variables as launchers set them."""

import pytest

from ringfeed.sharding.mesh_build import build_device_mesh
from ringfeed.sharding.mesh_environment import RankEnvironment, read_rank_environment

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "16",
    "SLURM_LOCALID": "2",
    "SLURM_JOB_ID": "1234567",
    "SLURM_JOB_NODELIST": "gpu[007-010,12],login",
}


@pytest.fixture
def bare(monkeypatch):
    for name in (
        *TORCHRUN,
        *SLURM,
        "SLURM_STEP_NUM_TASKS",
        "SLURM_STEP_NODELIST",
        "MASTER_ADDR",
        "MASTER_PORT",
    ):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_torchrun_and_ray_train():
    assert read_rank_environment(TORCHRUN) == RankEnvironment(
        rank=5, world_size=8, local_rank=1, init_method="env://"
    )


def test_slurm():
    assert read_rank_environment(SLURM) == RankEnvironment(
        rank=3, world_size=16, local_rank=2, init_method=f"tcp://gpu007:{15_000 + 1234567 % 15_000}"
    )


def test_torchrun_under_srun_is_torchruns():
    assert read_rank_environment({**SLURM, **TORCHRUN}).rank == 5


def test_a_world_size_exported_by_a_slurm_script_does_not_hide_srun():
    assert read_rank_environment({**SLURM, "WORLD_SIZE": "16"}).rank == 3


def test_the_step_counts_all_parts_of_a_heterogeneous_job():
    found = {**SLURM, "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "b1"}

    assert read_rank_environment(found).world_size == 4
    assert read_rank_environment(found).init_method.startswith("tcp://b1:")


def test_a_master_that_is_set_wins_over_slurms_list():
    found = {**SLURM, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "29500"}

    assert read_rank_environment(found).init_method == "tcp://10.0.0.7:29500"


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("node[3]", "node3"),
        ("node[03-05,9]", "node03"),
        ("node[9,03-05]-ib,x", "node9-ib"),
        ("rack-2-gpu[1-4]", "rack-2-gpu1"),
        ("[a1,a2]", "a1"),
    ],
)
def test_the_first_host_of_a_list(nodelist, host):
    assert read_rank_environment({**SLURM, "SLURM_JOB_NODELIST": nodelist}).init_method.startswith(
        f"tcp://{host}:"
    )


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({}, "neither RANK and WORLD_SIZE nor SLURM_PROCID is set; start it with torchrun, srun or a Ray"),
        ({"RANK": "0"}, "RANK is set alone"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set alone"),
        ({**TORCHRUN, "RANK": "8"}, "RANK=8 must be below WORLD_SIZE=8"),
        ({**TORCHRUN, "RANK": "-1"}, "RANK='-1' must be an integer of at least 0"),
        ({**TORCHRUN, "WORLD_SIZE": "0"}, "WORLD_SIZE='0' must be an integer of at least 1"),
        ({**TORCHRUN, "WORLD_SIZE": "two"}, "WORLD_SIZE='two' must be an integer"),
        ({**TORCHRUN, "LOCAL_RANK": "8"}, "LOCAL_RANK=8 must be below WORLD_SIZE=8"),
        ({"RANK": "0", "WORLD_SIZE": "1"}, "LOCAL_RANK is not set.*set it to 0 if every process has its own"),
        ({"SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, "SLURM_NTASKS is not set"),
        ({**SLURM, "SLURM_PROCID": "16"}, "SLURM_PROCID=16 must be below SLURM_NTASKS=16"),
        ({**SLURM, "SLURM_JOB_NODELIST": ",a"}, "no host can be read from Slurm's host list ',a'"),
    ],
)
def test_what_makes_no_sense_is_refused(found, message):
    with pytest.raises(ValueError, match=message):
        read_rank_environment(found)


def test_the_process_environment_is_read_by_default_and_empty_is_unset(bare):
    for name, value in {**TORCHRUN, "SLURM_PROCID": ""}.items():
        bare.setenv(name, value)

    assert read_rank_environment().rank == 5


def test_a_wrong_shape_is_refused_before_the_ranks_meet(bare):
    for name, value in TORCHRUN.items():
        bare.setenv(name, value)

    # No MASTER_ADDR: going on to meet would fail in another way.
    with pytest.raises(ValueError, match=r"the world has 8; what would fit: .*dp_shard=4, cp=2"):
        build_device_mesh({"dp_shard": 2, "cp": 2})
    with pytest.raises(ValueError, match="order cp, dp_shard"):
        build_device_mesh({"cp": 2, "dp_shard": 4})
    with pytest.raises(ValueError, match=r"device must be one of cpu, cuda, got \['cpu'\]"):
        build_device_mesh({"dp_shard": 4, "cp": 2}, device=["cpu"])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="device must be one of cpu, cuda, got 'tpu'"):
        build_device_mesh({"dp_shard": 4, "cp": 2}, "tpu")  # type: ignore[arg-type]
