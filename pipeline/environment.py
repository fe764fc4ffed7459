"""The environment variables that ``ringfeed.pipeline`` reads, in one place.

``RINGFEED_PROGRESS``: ``auto`` (a bar on a terminal, plain lines elsewhere), ``bar``, ``lines``, ``none``.
"""

import os
from dataclasses import dataclass

__all__ = ["PipelineEnvironment", "available_cpus", "read_environment"]

_PROGRESS = ("auto", "bar", "lines", "none")


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineEnvironment:
    """What the environment says."""

    progress: str = "auto"


def read_environment() -> PipelineEnvironment:
    """Read the variables.

    Raises:
        ValueError: if one has a value that means nothing.
    """
    progress = os.environ.get("RINGFEED_PROGRESS", "auto")
    if progress not in _PROGRESS:
        raise ValueError(f"RINGFEED_PROGRESS={progress!r}: must be one of {', '.join(_PROGRESS)}")
    return PipelineEnvironment(progress=progress)


def available_cpus() -> int:
    """Return the CPUs that this process may use: fewer than the machine's under taskset or Slurm."""
    return len(os.sched_getaffinity(0))
