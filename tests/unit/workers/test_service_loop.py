"""The supervisor's loop where no Ray is needed; with one it is tested in tests/ray/test_service.py."""

import threading
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from ray.exceptions import RayTaskError

from ringfeed.pipeline.executor import JobFailedError
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.workers.members import LossKind
from ringfeed.workers.service_crew import loss_of
from ringfeed.workers.service_loop import ServiceLoop
from ringfeed.workers.supervisor import Supervisor

FACTS: Any = SimpleNamespace(fingerprint="f", to_json=lambda: b"{}")


class Crew:
    """Cannot do anything."""

    metrics = SimpleNamespace(see_restarts=lambda totals: totals)

    def __init__(self, *, trouble=None, error=None):
        self._trouble, self._error = trouble, error

    def nodes(self):
        if self._trouble is not None:
            raise self._trouble

    def make(self, start):
        del start
        raise self._error


def ended(crew: Any):
    loop = ServiceLoop(Supervisor(num_builders=1), crew, FACTS, tell=lambda text: text)
    loop.start()
    assert loop.has_ended.wait(30)
    assert not loop.is_up.is_set()
    loop.stop()
    return loop.error


def test_a_service_without_its_ray_ends_at_once_and_says_so():
    trouble = JobFailedError("the Ray node of this process is dead")
    assert ended(Crew(trouble=trouble)) is trouble


def test_another_thread_sees_how_members_are_without_asking_the_supervisor():
    class Watched(Supervisor):
        askers: ClassVar[set[str]] = set()

        @property
        def members(self):
            self.askers.add(threading.current_thread().name)
            return super().members

    crew: Any = Crew(error=ValueError("no room"))
    loop = ServiceLoop(Watched(num_builders=1), crew, FACTS, tell=lambda text: text)
    before = loop.status
    loop.start()
    assert loop.has_ended.wait(30)
    assert before.members == ()
    [(builder, pid), (service, _)] = loop.status.members
    assert (builder.name, service.name, pid) == ("builder-0", "service", None)
    assert builder.life > 1
    assert loop.status.num_restarts["builder"] == builder.num_restarts
    assert Watched.askers == {"ringfeed-supervisor"}


@pytest.mark.parametrize("kind", [ValueError, CorruptDataError])
def test_what_cannot_be_started_ends_the_service_as_the_error_that_it_is(kind):
    error = ended(Crew(error=kind("there is another one")))
    assert type(error) is kind
    assert str(error) == "there is another one"


def test_a_fault_of_the_loop_is_told_and_ends_it(caplog):
    error = ended(Crew(error=KeyError("x")))
    assert isinstance(error, JobFailedError)
    assert "the service's supervisor failed: KeyError" in str(error)
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (ValueError("no such\nplan"), LossKind.MISTAKE, "no such plan"),
        (CorruptDataError("damaged"), LossKind.DAMAGED, "damaged"),
        (RuntimeError(), LossKind.DIED, "RuntimeError"),
        (RayTaskError("hello", "traceback", ValueError("no plan")), LossKind.MISTAKE, "no plan"),
    ],
)
def test_errors_of_actors_become_losses_in_one_line(error, kind, text):
    loss = loss_of(error)
    assert (loss.kind, loss.text) == (kind, text)
