"""What the launcher says about this process: which rank of how many it is, and where they meet.

In:   environment variables (``environment.py``)
Out:  ``RankEnvironment``, for ``build_device_mesh`` (``mesh_build.py``)

torchrun and Ray Train set the same variables and win over Slurm's, which describe torchrun itself
where it was started by srun.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from ringfeed.sharding.environment import launch_variables

__all__ = ["RankEnvironment", "read_rank_environment"]

# Below the range from which Linux takes ports for outgoing connections.
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEnvironment:
    """One process of a launched job."""

    rank: int
    world_size: int
    local_rank: int
    """Its number among the processes of its machine."""
    init_method: str
    """What ``torch.distributed.init_process_group`` is to be called with."""


def read_rank_environment(variables: Mapping[str, str] | None = None) -> RankEnvironment:
    """Read which rank this process is.

    Args:
        variables: environment variables to read, by default those of this process.

    Raises:
        ValueError: if no launcher set any, one is missing, or a value makes no sense.
    """
    found = launch_variables() if variables is None else variables
    if "RANK" in found and "WORLD_SIZE" in found:
        return _checked(found, "RANK", "WORLD_SIZE", "LOCAL_RANK", "env://")
    if "SLURM_PROCID" in found:
        # Of one part of a heterogeneous job SLURM_NTASKS counts that part, SLURM_PROCID counts all.
        tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in found else "SLURM_NTASKS"
        return _checked(found, "SLURM_PROCID", tasks, "SLURM_LOCALID", _slurm_meeting_place(found))
    half = [name for name in ("RANK", "WORLD_SIZE") if name in found]
    told = f"{half[0]} is set alone" if half else "neither RANK and WORLD_SIZE nor SLURM_PROCID is set"
    raise ValueError(
        f"which rank this process is cannot be told: {told}; start it with torchrun, srun or a Ray Train "
        "TorchTrainer, or call torch.distributed.init_process_group yourself first"
    )


def _checked(
    found: Mapping[str, str], rank_name: str, size_name: str, local_name: str, init_method: str
) -> RankEnvironment:
    world_size = _integer(found, size_name, at_least=1)
    rank = _integer(found, rank_name, at_least=0)
    if rank >= world_size:
        raise ValueError(f"{rank_name}={rank} must be below {size_name}={world_size}")
    local_rank = _integer(found, local_name, at_least=0)
    if local_rank >= world_size:
        raise ValueError(f"{local_name}={local_rank} must be below {size_name}={world_size}")
    return RankEnvironment(rank=rank, world_size=world_size, local_rank=local_rank, init_method=init_method)


def _integer(found: Mapping[str, str], name: str, *, at_least: int) -> int:
    if name not in found:
        way_out = "; set it to 0 if every process has its own machine" if "LOCAL" in name else ""
        raise ValueError(f"{name} is not set, though the launcher's other variables are{way_out}")
    value = found[name]
    if not re.fullmatch(r"\d+", value) or int(value) < at_least:
        raise ValueError(f"{name}={value!r} must be an integer of at least {at_least}")
    return int(value)


def _slurm_meeting_place(found: Mapping[str, str]) -> str:
    """Return where the ranks of a Slurm step meet: a TCP address that each of them comes to by itself."""
    host = found.get("MASTER_ADDR") or _first_host(
        found.get("SLURM_STEP_NODELIST") or found.get("SLURM_JOB_NODELIST") or "localhost"
    )
    if "MASTER_PORT" in found:
        return f"tcp://{host}:{_integer(found, 'MASTER_PORT', at_least=1)}"
    # Two jobs that share a node have different numbers, so different ports.
    job = _integer({"SLURM_JOB_ID": found.get("SLURM_JOB_ID", "0")}, "SLURM_JOB_ID", at_least=0)
    return f"tcp://{host}:{_FIRST_PORT + job % _NUM_PORTS}"


def _first_host(nodelist: str) -> str:
    """Return the first of Slurm's host list: ``gpu[007-010,12],login`` -> ``gpu007``."""
    match = re.match(r"([^,\[\]]*)(?:\[([^\],-]+)[^\]]*\]([^,\[\]]*))?", nodelist.strip())
    prefix, first, suffix = match.groups(default="") if match else ("", "", "")
    if not prefix + first:
        raise ValueError(f"no host can be read from Slurm's host list {nodelist!r}; set MASTER_ADDR")
    return prefix + first + suffix
