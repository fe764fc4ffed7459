"""The environment variables that ``ringfeed.sharding`` reads, in one place.

``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``: set by torchrun and by Ray Train.
``SLURM_PROCID``, ``SLURM_STEP_NUM_TASKS`` or ``SLURM_NTASKS``, ``SLURM_LOCALID``: set by srun.
``MASTER_ADDR``, ``MASTER_PORT``: where ranks meet. Under Slurm they follow from ``SLURM_STEP_NODELIST``
or ``SLURM_JOB_NODELIST``, and ``SLURM_JOB_ID``, when they are not set.

``mesh_environment.py`` says what they mean.
"""

import os

__all__ = ["launch_variables"]

_READ = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "SLURM_LOCALID",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_JOB_ID",
)


def launch_variables() -> dict[str, str]:
    """Return those of the variables above that are set to something."""
    return {name: os.environ[name] for name in _READ if os.environ.get(name)}
