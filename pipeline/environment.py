"""The environment variables and limits of the process that ``ringfeed.pipeline`` reads, in one place.

``RINGFEED_PROGRESS``: ``auto`` (a bar on a terminal, plain lines elsewhere), ``bar``, ``lines``, ``none``.
``RINGFEED_TOKEN``, ``RINGFEED_TOKEN_FILE``: the bearer token of a service, or its file (``feed_token.py``).
"""

import os
import resource
from dataclasses import dataclass, field
from pathlib import Path

__all__ = [
    "TOKEN_FILE_VARIABLE",
    "TOKEN_VARIABLE",
    "PipelineEnvironment",
    "TokenVariables",
    "available_cpus",
    "max_mapped_files",
    "read_environment",
    "read_token_variables",
]

TOKEN_VARIABLE = "RINGFEED_TOKEN"  # noqa: S105 - the name of a variable
TOKEN_FILE_VARIABLE = "RINGFEED_TOKEN_FILE"  # noqa: S105 - the name of a variable

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


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenVariables:
    """What the environment says of a service's token; an empty variable says nothing."""

    token: str | None = field(repr=False)
    file: Path | None


def read_token_variables() -> TokenVariables:
    """Read the variables of a token, and no others: a rank has no use for them."""
    file = os.environ.get(TOKEN_FILE_VARIABLE)
    return TokenVariables(token=os.environ.get(TOKEN_VARIABLE) or None, file=Path(file) if file else None)


def available_cpus() -> int:
    """Return the CPUs that this process may use: fewer than the machine's under taskset or Slurm."""
    return len(os.sched_getaffinity(0))


def max_mapped_files() -> int:
    """Return how many token files this process may keep mapped: each holds one of its file descriptors."""
    soft_limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft_limit == resource.RLIM_INFINITY:
        return _MOST_MAPPED_FILES
    return max(1, min(_MOST_MAPPED_FILES, soft_limit // 2))
