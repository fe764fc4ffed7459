"""Who may talk to a local Ray is settled on purpose, before Ray is imported."""

import os
import subprocess
import sys

import pytest

from ringfeed.workers.environment import choose_ray_auth, read_environment, worker_environment

AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


@pytest.fixture
def without_auth(monkeypatch):
    for name in AUTH:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    return monkeypatch


def test_a_local_ray_gets_a_token_of_its_own(without_auth):
    choose_ray_auth()
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64


@pytest.mark.parametrize(
    ("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "t"), ("RAY_AUTH_TOKEN_PATH", "/t")]
)
def test_what_the_user_chose_is_kept(without_auth, name, value):
    without_auth.setenv(name, value)
    choose_ray_auth()
    assert {key: os.environ.get(key) for key in AUTH if key in os.environ} == {name: value}


def test_once_ray_is_imported_nothing_is_set(without_auth):
    without_auth.setitem(sys.modules, "ray", object())
    choose_ray_auth()
    assert "RAY_AUTH_MODE" not in os.environ


def test_the_address_is_the_users(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "head:6379")
    assert read_environment().address == "head:6379"
    monkeypatch.setenv("RAY_ADDRESS", "")
    assert read_environment().address is None


def test_workers_inherit_one_thread_and_the_caller_keeps_its_own(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("NUMBA_NUM_THREADS", raising=False)
    with worker_environment():
        assert (os.environ["OMP_NUM_THREADS"], os.environ["NUMBA_NUM_THREADS"]) == ("7", "1")
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert "NUMBA_NUM_THREADS" not in os.environ


def test_the_session_module_does_not_import_ray():
    script = (
        "import sys, ringfeed.workers.ray_session, ringfeed.workers.shard_job; print('ray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
