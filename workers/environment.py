"""The environment variables that ``ringfeed.workers`` reads and sets, in one place.

``RAY_ADDRESS``: join that cluster; without it a local Ray is started and stopped again.
``RAY_AUTH_MODE``: the user's own setting is kept. Ray reads it when it is imported, and never again.
"""

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["WORKER_THREADS", "RayEnvironment", "choose_ray_auth", "read_environment", "worker_environment"]

_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")

WORKER_THREADS = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
"""One thread each: there is a worker per CPU already."""

_INHERITED = {
    **WORKER_THREADS,
    # Under `uv run` every worker would start through uv again, which may reach for the network.
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class RayEnvironment:
    """What the environment says about Ray."""

    address: str | None
    """The cluster to join, None for a local Ray."""


def read_environment() -> RayEnvironment:
    """Read the variables."""
    return RayEnvironment(address=os.environ.get("RAY_ADDRESS") or None)


def choose_ray_auth() -> None:
    """Settle who may talk to a local Ray. Comes before ``import ray``, which reads it once for ever.

    A local Ray listens on this machine, where others may have accounts, so its calls need a token: one
    of this process alone, unless the user chose otherwise. Left to itself Ray would write one to
    ``~/.ray``, which fails where the home folder is read-only, and would keep it for ever.
    """
    # Once Ray is imported it is too late: a mode set now would be believed by half of it.
    if "ray" not in sys.modules and not any(name in os.environ for name in _AUTH):
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextmanager
def worker_environment() -> Iterator[None]:
    """For the block, have the variables that the workers of a Ray started in it inherit."""
    added = {name: value for name, value in _INHERITED.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
