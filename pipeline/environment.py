"""The environment variables and limits of the process that ``ringfeed.pipeline`` reads, in one place.

``RINGFEED_PROGRESS``: ``auto`` (a bar on a terminal, plain lines elsewhere), ``bar``, ``lines``, ``none``.
"""

import os
import resource
from dataclasses import dataclass

__all__ = ["PipelineEnvironment", "available_cpus", "max_mapped_files", "read_environment"]

_MOST_MAPPED_FILES = 1024
"""A shuffled plan reads from 256 places of its corpora at a time, each perhaps in a file of its own."""

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


def max_mapped_files() -> int:
    """Return how many token files this process may keep mapped: each holds one of its file descriptors."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return _MOST_MAPPED_FILES
    return max(1, min(_MOST_MAPPED_FILES, soft_limit // 2))
