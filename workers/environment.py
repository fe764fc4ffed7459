"""The environment variables that ``ringfeed.workers`` reads and sets, in one place.

``RAY_ADDRESS``: join that cluster; without it a local Ray is started and stopped again.
``RAY_AUTH_MODE``: the user's own setting is kept. Ray reads it when it is imported, and never again.
"""

import os
import secrets
import sys
from dataclasses import dataclass

__all__ = ["RayEnvironment", "prepare_local_ray", "read_environment"]

# One thread each: Ray runs a worker per CPU, and a busy host is what more threads would measure.
_ONE_THREAD = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True, kw_only=True, slots=True)
class RayEnvironment:
    """What the environment says about Ray."""

    address: str | None
    """The cluster to join, None for a local Ray."""


def read_environment() -> RayEnvironment:
    """Read the variables."""
    return RayEnvironment(address=os.environ.get("RAY_ADDRESS") or None)


def prepare_local_ray() -> None:
    """Set what a Ray that is started here, and its workers, inherit. Comes before ``import ray``.

    A local Ray listens on this machine, where others may have accounts, so its calls need a token:
    one of this session alone, unless the user chose otherwise. Left to itself Ray would write one to
    ``~/.ray``, which fails where the home folder is read-only, and would keep it for ever.
    """
    for name in _ONE_THREAD:
        os.environ.setdefault(name, "1")
    # Under `uv run` every worker would start through uv again, which may reach for the network.
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
    # Once Ray is imported it is too late: a mode set now would be believed by half of it.
    chosen = any(name in os.environ for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"))
    if "ray" not in sys.modules and not chosen:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
