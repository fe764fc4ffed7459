"""A Ray to run on: one that is started here and stopped again, or the cluster of ``RAY_ADDRESS``.

In:   ``RAY_ADDRESS`` (``environment.py``) and how many CPUs to use
Out:  a ``RaySession`` for the length of a ``with`` block

A session that finds Ray running in this process uses it and leaves it running. What a Ray that was started
here leaves behind is ended with it, or by the next one (``process_journal.py``). A trainer rank only joins:
``join_ray`` starts nothing and stops nothing.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ringfeed.pipeline.environment import available_cpus
from ringfeed.pipeline.executor import JobFailedError
from ringfeed.workers.environment import choose_ray_auth, read_environment, worker_environment
from ringfeed.workers.process_journal import ProcessJournal

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["RaySession", "join_ray", "ray_session"]

# Jobs here send paths and digests, not data: Ray's default of 30 % of memory is not needed.
_OBJECT_STORE_BYTES = 128 << 20
_SECONDS_TO_REACH = 20.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RaySession:
    """A Ray that is connected."""

    num_cpus: int
    """CPUs of the whole cluster."""
    address: str
    """``local``, the cluster's address, or ``running`` for one that was there before."""


class _OwnRay:
    """A Ray that a session of this process connected to. Sessions may end in any order."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.is_ours = False
        self.num_sessions = 0
        self.journal: ProcessJournal | None = None
        """Of the processes of a Ray that was started here, none of one that was joined."""

    def close_journal(self) -> None:
        """End what Ray has left, if it was started here."""
        if self.journal is not None:
            self.journal.close()
            self.journal = None


_OWN = _OwnRay()


@contextmanager
def ray_session(
    *, num_cpus: int | None = None, object_store_bytes: int | None = None, metrics_port: int = 0
) -> Iterator[RaySession]:
    """Connect to Ray, and disconnect at the end; a Ray that was started here is stopped.

    Sessions of one process share what the first one connected to; it lasts as long as the last of them.

    Args:
        num_cpus: CPUs of a local Ray, by default those that this process may use; a cluster has its own.
        object_store_bytes: memory for objects of a local Ray, for who moves data through it: it never spills
            to disk then, and whoever puts too much waits. None: little memory, for jobs that move none.
        metrics_port: where a local Ray shows its metrics; 0 takes any that is free.

    Raises:
        ValueError: if the metrics port is taken, or Ray runs already and has another one.
        JobFailedError: if no Ray can be started or reached.
    """
    address = read_environment().address
    if address is None:
        choose_ray_auth()
    import ray

    where = "running"
    with _OWN.lock:
        if metrics_port:
            _check_metrics_port(metrics_port, is_own=address is None and not ray.is_initialized())
        if not ray.is_initialized():
            # Of a Ray that somebody else has stopped.
            _OWN.close_journal()
            if address is None:
                _start(num_cpus, object_store_bytes, metrics_port)
            else:
                _join(address)
            _OWN.num_sessions = 0
            _OWN.is_ours = True
            where = address or "local"
        is_held = _OWN.is_ours
        _OWN.num_sessions += is_held
    try:
        yield RaySession(num_cpus=_cluster_cpus(), address=where)
    finally:
        if is_held:
            _leave()


def _leave() -> None:
    """End one session on a Ray that was started, or joined, here; the last one disconnects."""
    import ray

    with _OWN.lock:
        _OWN.num_sessions -= 1
        if _OWN.num_sessions == 0:
            _OWN.is_ours = False
            try:
                ray.shutdown()
            finally:
                _OWN.close_journal()


def join_ray() -> None:
    """Connect this process to the Ray of ``RAY_ADDRESS``, or the one on this machine, unless it is connected.

    It stays connected until it ends: others in the process may use Ray by then.

    Raises:
        ConnectionError: if there is none, or it does not let this process in.
    """
    address = read_environment().address or "auto"
    import ray

    if ray.is_initialized():
        return
    try:
        _reach(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, OSError, RuntimeError, ray.exceptions.RayError) as error:
        where = "on this machine" if address == "auto" else f"at RAY_ADDRESS={address!r}"
        raise ConnectionError(
            f"no Ray can be joined {where}: {(str(error).splitlines() or [''])[0]}; a rank needs a raylet on "
            "its own machine and, where Ray asks for a token, RAY_AUTH_MODE=token with RAY_AUTH_TOKEN or "
            "RAY_AUTH_TOKEN_PATH as the service has them; or load over flight://, which needs no Ray"
        ) from error


def _join(address: str) -> None:
    import ray

    try:
        _reach(address)
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, OSError, RuntimeError, ray.exceptions.RayError) as error:
        raise JobFailedError(f"RAY_ADDRESS={address!r} cannot be joined: {error}") from error


def _start(num_cpus: int | None, object_store_bytes: int | None, metrics_port: int) -> None:
    import ray

    try:
        _OWN.journal = ProcessJournal(_own_ray_command())
        _OWN.journal.follow()
        # Not a bare init(): that would join any other Ray on this machine.
        with worker_environment():
            ray.init(
                address="local",
                num_cpus=num_cpus or available_cpus(),
                object_store_memory=object_store_bytes or _OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                _metrics_export_port=metrics_port or None,
                _system_config={"automatic_object_spilling_enabled": object_store_bytes is None},
            )
    except BaseException as error:
        _OWN.close_journal()
        if isinstance(error, (OSError, RuntimeError, ray.exceptions.RayError)):
            raise JobFailedError(f"a local Ray cannot be started: {error}") from error
        raise


def _own_ray_command() -> re.Pattern[str]:
    """Return what the command lines of the processes have in common that a Ray of this process starts.

    Ray calls its session by the time and the process that began it.
    """
    return re.compile(rf"/session_[\d_-]+_{os.getpid()}\b")


def _check_metrics_port(port: int, *, is_own: bool) -> None:
    """Refuse a port that Ray would not have: it says nothing, and shows nothing."""
    if not is_own:
        raise ValueError(
            f"metrics_port={port} is for a Ray that is started here; one that runs already has its own (ray "
            "start --metrics-export-port): leave it out"
        )
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"metrics_port={port} cannot be had: {reason}; take another one") from None


def _reach(address: str) -> None:
    """Connect once to ``host:port``, for an error at once: Ray goes on trying for many minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "//" not in address:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_SECONDS_TO_REACH).close()


def _cluster_cpus() -> int:
    import ray

    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return max(1, int(resources.get("CPU", 1)))
