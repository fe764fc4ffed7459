"""Which Ray a session takes; a real one is in tests/ray/test_shard_job.py."""

import socket
from contextlib import contextmanager

import pytest

from ringfeed.pipeline.executor import JobFailedError
from ringfeed.workers import ray_session as module
from ringfeed.workers.ray_session import ray_session


class FakeRay:
    """Records calls; stands in for the ray module."""

    def __init__(self, *, running=False, error=None):
        self.running, self.error, self.calls = running, error, []

    def is_initialized(self):
        return self.running

    def init(self, **arguments):
        if self.error is not None:
            raise self.error
        self.calls.append(arguments)

    def cluster_resources(self):
        return {"CPU": 3.0}

    def shutdown(self):
        self.calls.append("shutdown")


class Journal:
    """Records, in the same list as Ray; the real one is in test_process_journal.py."""

    def __init__(self, calls):
        self.calls = calls

    def follow(self):
        self.calls.append("follow")

    def close(self):
        self.calls.append("close")


@pytest.fixture
def use(monkeypatch):
    def install(fake, address=""):
        import ray

        monkeypatch.setenv("RAY_ADDRESS", address)
        monkeypatch.setattr(module, "ProcessJournal", lambda _: Journal(fake.calls))
        for name in ("is_initialized", "init", "cluster_resources", "shutdown"):
            monkeypatch.setattr(ray, name, getattr(fake, name))
        return fake

    return install


def test_a_local_ray_is_started_and_stopped(use):
    fake = use(FakeRay())
    with ray_session(num_cpus=2) as session:
        assert (session.num_cpus, session.address) == (3, "local")
    followed, started, *stopped = fake.calls
    assert followed == "follow"
    assert (started["address"], started["num_cpus"], started["include_dashboard"]) == ("local", 2, False)
    assert stopped == ["shutdown", "close"]


def test_sessions_that_overlap_share_a_ray_until_the_last_one_ends(use):
    class Started(FakeRay):
        def init(self, **arguments):
            super().init(**arguments)
            self.running = True

        def shutdown(self):
            super().shutdown()
            self.running = False

    fake = use(Started())
    first, second = ray_session(), ray_session()
    with second_ends_later(first, second) as addresses:
        assert addresses == ["local", "running"]
        assert not {"shutdown", "close"} & set(map(str, fake.calls))
    assert fake.calls[2:] == ["shutdown", "close"]
    with ray_session() as again:
        assert again.address == "local"


@contextmanager
def second_ends_later(first, second):
    addresses = [first.__enter__().address, second.__enter__().address]
    first.__exit__(None, None, None)
    yield addresses
    second.__exit__(None, None, None)


def test_a_ray_is_stopped_after_an_error(use):
    fake = use(FakeRay())
    with pytest.raises(KeyError), ray_session():
        raise KeyError
    assert fake.calls[-2:] == ["shutdown", "close"]


def test_a_ray_that_runs_already_is_left_running(use):
    fake = use(FakeRay(running=True))
    with ray_session() as session:
        assert session.address == "running"
    assert fake.calls == []


def test_the_cluster_of_the_environment_is_joined(use):
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        fake = use(FakeRay(), address)
        with ray_session(num_cpus=2) as session:
            assert session.address == address
    joined, stopped = fake.calls
    assert joined["address"] == address
    assert "num_cpus" not in joined
    assert stopped == "shutdown"


def test_a_cluster_that_is_not_there_is_told_at_once(use, monkeypatch):
    fake = use(FakeRay(), "127.0.0.1:9")
    monkeypatch.setattr(module, "_SECONDS_TO_REACH", 1.0)
    with pytest.raises(JobFailedError, match=r"RAY_ADDRESS='127.0.0.1:9' cannot be joined"), ray_session():
        pass
    assert fake.calls == []


def test_a_ray_that_does_not_start_is_one_error(use):
    fake = use(FakeRay(error=RuntimeError("no room in /dev/shm")))
    with pytest.raises(JobFailedError, match="a local Ray cannot be started: no room"), ray_session():
        pass
    assert fake.calls == ["follow", "close"]


def test_what_a_ray_left_that_somebody_else_stopped_is_ended_before_the_next_one_starts(use):
    fake = use(FakeRay())
    with ray_session():
        first = len(fake.calls)
        with ray_session():
            assert [str(call) for call in fake.calls[first : first + 2]] == ["close", "follow"]


def test_a_metrics_port_that_is_taken_is_refused_before_ray_starts(use):
    fake = use(FakeRay())
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with (
            pytest.raises(ValueError, match=rf"metrics_port={port} cannot be had: Address already in use"),
            ray_session(metrics_port=port),
        ):
            pass
    assert fake.calls == []
