"""Call builders, and find the service, over Ray; Ray's many errors become the few that matter.

In:   handles of actors (``workers/roster.py``), or the name of a service actor
Out:  ``RayBuilderCalls`` for ``workers/builder_pool.py``, and ``RosterLookup``, which tells it whom to call

Whoever imports this has settled how Ray authenticates (``workers/environment.py``) and is connected.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError

from ringfeed.workers.builder_calls import BuilderError, BuilderLostError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ringfeed.workers.roster import BuilderMember, Roster

__all__ = ["RayBuilderCalls", "RosterLookup", "call_actor"]

# How soon a waiting thread notices that nobody wants the answer. An answer ends the wait at once.
_NOTICE_SECONDS = 0.5
_LOOKUP_SECONDS = 10.0


class RayBuilderCalls:
    """``BuilderCalls`` over ``BuilderActor``s (``workers/builder_actor.py``)."""

    def facts(self, builder: BuilderMember, *, seconds: float, stop: threading.Event) -> bytes:
        answer: bytes = call_actor(builder.actor.facts.remote, who=builder.name, seconds=seconds, stop=stop)
        return answer

    def block(self, builder: BuilderMember, request: bytes, *, seconds: float, stop: threading.Event) -> Any:
        # Ray keeps what it returned alive as long as the batch is: its buffers lie in the object store.
        return call_actor(
            lambda: builder.actor.block.remote(request), who=builder.name, seconds=seconds, stop=stop
        )


class RosterLookup:
    """Asks the service actor for its roster; finds it by name again when it was lost."""

    def __init__(self, service: str, namespace: str, *, seconds: float = _LOOKUP_SECONDS) -> None:
        """Look for nobody yet.

        Args:
            service: name of the service actor.
            namespace: of Ray, in which it has this name.
            seconds: for an answer.
        """
        self._service = service
        self._namespace = namespace
        self._seconds = seconds
        self._lock = threading.Lock()
        self._actor: Any = None

    def __call__(self) -> Roster:
        """Return who is there now.

        Raises:
            ConnectionError: if there is no such actor, or it does not answer.
        """
        roster: Roster = self.ask("roster")
        return roster

    def ask(self, method: str, *arguments: object) -> Any:
        """Return what a method of the service actor returns; errors of its own come as they are.

        Raises:
            ConnectionError: if there is no such actor, or it does not answer.
        """
        known = self._actor
        if known is not None:
            try:
                return self._call(known, method, arguments)
            except BuilderLostError:
                # Another actor may have the name by now.
                pass
        try:
            return self._call(self._find(known), method, arguments)
        except BuilderLostError as error:
            raise ConnectionError(str(error)) from None

    def _call(self, actor: Any, method: str, arguments: tuple[object, ...]) -> Any:
        start = getattr(actor, method).remote
        who = f"service {self._service!r}"
        return call_actor(lambda: start(*arguments), who=who, seconds=self._seconds, stop=threading.Event())

    def _find(self, lost: Any) -> Any:
        with self._lock:
            if self._actor is lost:
                self._actor = None
                self._actor = self._named()
            return self._actor

    def _named(self) -> Any:
        try:
            return ray.get_actor(self._service, namespace=self._namespace)
        except ValueError:
            raise ConnectionError(
                f"no service is called {self._service!r} in namespace {self._namespace!r} of this Ray; is "
                f"`ringfeed serve --name {self._service} --namespace {self._namespace}` running on it?"
            ) from None
        except RayError as error:
            raise ConnectionError(f"Ray does not answer: {_first_line(error)}") from None


def call_actor(start: Callable[[], Any], *, who: str, seconds: float, stop: threading.Event) -> Any:
    """Call a method of an actor and wait for the answer.

    Args:
        start: begins the call: a ``.remote`` with its arguments.
        who: names the actor in errors.
        seconds: to wait.
        stop: ends the wait when it is set, from another thread.

    Raises:
        ValueError: the actor's own, with its text; also CorruptDataError.
        BuilderError: if its code failed otherwise.
        BuilderLostError: if it is dead, silent, without memory, or ``stop`` was set.
    """
    try:
        reference = start()
        until = time.monotonic() + seconds
        while True:
            try:
                return ray.get(reference, timeout=max(0.0, min(_NOTICE_SECONDS, until - time.monotonic())))
            except GetTimeoutError:
                if stop.is_set() or time.monotonic() >= until:
                    ray.cancel(reference)
                    raise BuilderLostError(f"{who} did not answer within {seconds:g} s") from None
    except RayTaskError as error:
        raise _as_own(error, who) from None
    except RayError as error:
        raise BuilderLostError(f"{who}: {type(error).__name__}: {_first_line(error)}") from None


def _as_own(error: RayTaskError, who: str) -> Exception:
    """Return what was raised in the actor, without the traceback that Ray wraps it in."""
    cause: Any = error.cause
    if isinstance(cause, ValueError):
        return cause
    if isinstance(cause, RayError):
        return BuilderLostError(f"{who}: {type(cause).__name__}: {_first_line(cause)}")
    return BuilderError(f"{who} failed: {type(cause).__name__}: {_first_line(cause)}")


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0][:300]
