"""Members of a service as values: what they do, how they are, and what is to be done about them.

In:   nothing
Out:  the words between ``workers/supervisor.py``, which decides, and ``workers/service_loop.py``, which does
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Loss", "LossKind", "MemberView", "Phase", "RestartPolicy", "Role", "Start", "Stop"]


class Role(StrEnum):
    """What a member does."""

    SERVICE = "service"
    """The named actor that others find the roster at."""
    BUILDER = "builder"
    FEEDER = "feeder"
    PLANNER = "planner"
    """Extends the plan ahead of its readers, until it is finished."""


class Phase(StrEnum):
    """Where a member is in its life."""

    STARTING = "starting"
    READY = "ready"
    WAITING = "waiting"
    """For its next start."""
    STOPPING = "stopping"


class LossKind(StrEnum):
    """Why a member was lost, as far as it matters to a user."""

    DIED = "died"
    DAMAGED = "damaged"
    """What it reads is damaged."""
    MISTAKE = "mistake"
    """What it was told to do cannot be done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """How a member was lost."""

    kind: LossKind
    text: str
    """One line for a human."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Start a member: an action."""

    name: str
    role: Role
    life: int
    """Rises with every start of a service: what is told of an earlier life is no news."""
    node_id: str | None
    """Where it must run; None is anywhere."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """End a member, and tell when it is lost: an action."""

    name: str
    life: int


@dataclass(frozen=True, kw_only=True, slots=True)
class MemberView:
    """A member, for whoever looks."""

    name: str
    role: Role
    phase: Phase
    life: int
    node_id: str | None
    num_restarts: int
    last_loss: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RestartPolicy:
    """How patient a supervisor is.

    Raises:
        ValueError: if a number is out of range.
    """

    first_wait: float = 0.1
    """Seconds before a member that was lost is started again; doubled with each loss."""
    most_wait: float = 10.0
    stable_seconds: float = 20.0
    """A member that was ready for so long begins again with the first wait."""
    start_seconds: float = 300.0
    """For a member to get ready, waiting for a free CPU or a new node included."""
    linger_seconds: float = 30.0
    """A node's feeder stays for so long after the last builder there."""
    max_tries: int = 6
    """Starts of a member that is never ready, while no other has its role."""

    def __post_init__(self) -> None:
        for name in ("first_wait", "most_wait", "stable_seconds", "start_seconds", "linger_seconds"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.max_tries < 1:
            raise ValueError(f"max_tries={self.max_tries} must be at least 1")
