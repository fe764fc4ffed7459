"""The service on a real Ray, in real processes: the same bytes, whoever is killed, and nothing left."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import BlockLimits, Overflow, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.shm_files import SHARED_MEMORY
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers import serve
from ringfeed.workers.flight_options import ServerTls
from ringfeed.workers.members import RestartPolicy
from ringfeed.workers.plan_ahead import PlanAhead
from ringfeed.workers.plan_opening import PlanChoice, open_checked
from ringfeed.workers.ray_session import ray_session
from ringfeed.workers.supervisor import Supervisor

pytestmark = pytest.mark.ray

SMALL: dict[str, Any] = {"block_bytes": 1024, "node_bytes": 320 << 20}
TOKEN = "a-token-of-ranks"  # noqa: S105
COMMAND = [sys.executable, "-m", "ringfeed.workers.cli", "serve"]


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """300 documents in steps of 8 packs of 128 slots."""
    folder = tmp_path_factory.mktemp("served")
    rng = np.random.default_rng(2)
    documents = [rng.integers(0, 300, n) for n in rng.integers(1, 200, 300)]
    write_corpus(folder / "corpus", documents, name="corpus", pad_id=5)
    options: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 8, "max_cp": 4, "window": 2}
    run_plan(PlanOptions(output=folder / "plan", corpora=[folder / "corpus"], **options))
    return folder / "plan"


@pytest.fixture(scope="module")
def local_ray():
    with ray_session(num_cpus=3, object_store_bytes=80 << 20) as session:
        yield session


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """A folder of PEM files: a CA, and a server's and a rank's certificate that it signed."""
    folder = tmp_path_factory.mktemp("certificates")
    program = shutil.which("openssl")
    assert program, "openssl is needed to make certificates"
    own = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-addext", "subjectAltName=IP:127.0.0.1"]
    for name, more in (("ca", []), ("server", signed), ("rank", signed)):
        files = ["-subj", f"/CN={name}", "-keyout", f"{name}.key", "-out", f"{name}.pem"]
        command = [program, *own, *more, *files]
        subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=60)
    return folder


def load(source, *, cp=(0, 2), dp=(1, 2), **options):
    return Loader(source, dp_rank=dp[0], dp_size=dp[1], cp_rank=cp[0], cp_size=cp[1], **options)


def assert_same_batches(found, expected):
    count = 0
    for batch, other in zip(found, expected, strict=True):
        assert batch.info == other.info
        assert batch.tensors.keys() == other.tensors.keys()
        assert all(batch.tensors[name].equal(tensor) for name, tensor in other.tensors.items())
        count += 1
    assert count


def loop_of(running):
    assert running._loop is not None
    return running._loop


def member(running, role):
    """Return a member with this role that is ready."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        for one in running.status().members:
            if one.role == role and one.pid is not None:
                return one
        time.sleep(0.05)
    raise AssertionError(f"no {role} got ready: {running.status()}")


@pytest.mark.parametrize("layout", ["te", "head_tail", "whole_document", "magi"])
def test_ranks_get_the_bytes_of_the_plan(plan, local_ray, layout):
    with serve(plan, cp_size=2, layout=layout, builders=1, **SMALL) as running:
        for rank in range(2):
            expected = list(load(plan, layout=layout, cp=(rank, 2)))
            for url in (running.url, running.ray_url):
                with load(url, cp=(rank, 2)) as loader:
                    assert_same_batches(loader, expected)


def test_an_encrypted_service_wants_certificate_and_token_at_directory_and_feeder(
    plan, local_ray, certificates
):
    own = ServerTls(
        cert=certificates / "server.pem", key=certificates / "server.key", client_ca=certificates / "ca.pem"
    )
    rank = {name: certificates / f"rank.{end}" for name, end in (("cert", "pem"), ("key", "key"))}
    tls = {"ca": certificates / "ca.pem", **rank}
    with serve(plan, cp_size=2, layout="te", builders=1, tls=own, token=TOKEN, **SMALL) as running:
        assert running.url.startswith("grpc+tls://127.0.0.1:")
        assert next(one.url for one in loop_of(running).roster.feeders).startswith("grpc+tls://127.0.0.1:")
        with load(running.url, token=TOKEN, tls=tls) as loader:
            assert_same_batches(loader, load(plan, layout="te"))
        for refused in ({"token": "another-token-x", "tls": tls}, {"tls": tls}):
            with pytest.raises(ConnectionError, match="token"):
                load(running.url, **refused)
        with pytest.raises(ConnectionError, match=r"certificate|closes the connection"):
            load(running.url, token=TOKEN, tls=certificates / "ca.pem")


def test_builders_and_feeders_killed_in_the_middle_change_no_byte(plan, local_ray):
    expected = list(load(plan, layout="te"))
    with serve(plan, cp_size=2, layout="te", builders=2, **SMALL) as running:
        found = []
        with load(running.url, prefetch_bytes=8192) as loader:
            for number, batch in enumerate(loader):
                found.append(batch)
                if number in (5, 30):
                    os.kill(member(running, "builder").pid, signal.SIGKILL)
                if number in (15, 30):
                    os.kill(member(running, "feeder").pid, signal.SIGKILL)
        assert_same_batches(found, expected)
        for role in ("builder", "feeder"):
            member(running, role)
        assert running.status().num_restarts == {"builder": 2, "feeder": 2}
        assert {one.num_restarts for one in running.status().members if one.role == "feeder"} == {2}


def test_a_death_is_noticed(plan, local_ray):
    """The bound is for a machine that is busy."""
    with serve(plan, cp_size=2, layout="te", builders=1, **SMALL) as running:
        feeder = member(running, "feeder")
        killed = time.monotonic()
        os.kill(feeder.pid, signal.SIGKILL)
        while loop_of(running).roster.feeders:
            assert time.monotonic() - killed < 30.0
            time.sleep(0.01)


def test_builders_import_no_torch_and_use_one_thread(plan, local_ray):
    import ray

    def look(self):
        import numba
        import pyarrow as pa

        threads = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]
        return "torch" in sys.modules, threads, pa.cpu_count(), os.environ["OMP_NUM_THREADS"]

    with serve(plan, cp_size=2, layout="te", builders=1, **SMALL) as running:
        builder = loop_of(running).roster.builders[0].actor
        assert ray.get(builder.__ray_call__.remote(look)) == (False, 1, 1, "1")
        found = {one.role: maps_torch(one.pid) for one in running.status().members}
        assert found == {"service": False, "builder": False, "feeder": False}
        assert maps_torch(os.getpid())


def maps_torch(number):
    return "libtorch" in Path(f"/proc/{number}/maps").read_text()


def test_two_services_of_one_name_on_one_ray_are_refused_and_of_two_names_live(plan, local_ray):
    with serve(plan, cp_size=2, layout="te", builders=1, **SMALL) as running:
        with pytest.raises(ValueError, match=r"name='feed': a service of this name runs .* --name"):
            serve(plan, cp_size=2, layout="te", builders=1, **SMALL)
        with serve(plan, cp_size=2, layout="magi", builders=1, name="other", **SMALL) as other:
            for url, layout in ((running.url, "te"), (other.url, "magi")):
                with load(url) as loader:
                    assert_same_batches(loader, load(plan, layout=layout))


def test_what_builders_cannot_do_ends_the_start_with_what_they_say(plan, local_ray, monkeypatch):
    here = os.getpid()

    class ElsewhereMissing:
        def __init__(self, opener):
            self.opener = opener

        def __call__(self):
            if os.getpid() != here:
                raise ValueError("the plan is not on this node")
            return self.opener()

    opener = ElsewhereMissing(open_checked(PlanChoice(plan=plan, layout=make_layout("te"), cp_size=2)))
    monkeypatch.setattr("ringfeed.workers.service.open_checked", lambda _: opener)
    impatient = partial(Supervisor, policy=RestartPolicy(max_tries=2))
    monkeypatch.setattr("ringfeed.workers.service.Supervisor", impatient)
    with pytest.raises(ValueError, match=r"^the plan is not on this node$"):
        serve(plan, cp_size=2, layout="te", builders=1, **SMALL)


def plan_options(plan, name, **more):
    fixed: dict[str, Any] = {"pack_tokens": 128, "packs_per_step": 8, "max_cp": 4, "window": 2}
    output, corpora = plan.with_name(name), [plan.with_name("corpus")]
    return PlanOptions(
        output=output, corpora=corpora, seed=4, block_limits=BlockLimits(steps=3), **fixed, **more
    )


def test_ranks_train_while_the_plan_is_made_and_a_planner_that_is_killed_goes_on(
    plan, local_ray, monkeypatch, eventually
):
    monkeypatch.setattr("ringfeed.workers.plan_keeper.PlanAhead", partial(PlanAhead, steps_ahead=4))
    run_plan(plan_options(plan, "at-once"))
    options = plan_options(plan, "meanwhile")
    with serve(options.output, cp_size=2, layout="te", builders=1, plan_from=options, **SMALL) as running:
        found = []
        with load(running.url, prefetch_bytes=8192) as loader:
            for batch in islice(loader, 6):
                found.append(batch)
            assert not options.output.exists()
            os.kill(member(running, "planner").pid, signal.SIGKILL)
            found += loader
        assert_same_batches(found, load(plan.with_name("at-once"), layout="te"))
        # One that is done leaves when the loop looks again.
        eventually(lambda: all(one.role != "planner" for one in running.status().members))
        assert running.status().num_restarts == {"planner": 1}
        assert Plan.open(options.output).num_steps > 5


def test_a_mistake_that_the_planner_finds_ends_the_service(plan, local_ray, tmp_path):
    options = plan_options(plan, "mistaken", overflow=Overflow.ERROR)
    started = partial(serve, options.output, cp_size=2, layout="te", builders=1, plan_from=options)
    with pytest.raises(ValueError, match="overflow"), started(**SMALL) as running:
        running.wait(60)


class Command:
    """``ringfeed serve`` in a process of its own, and without an address on a Ray of its own with a token."""

    def __init__(self, plan, *flags, address=None):
        variables = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        if address is not None:
            variables |= {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
        flags = ("--builders", "1", "--block-bytes", "1024", "--node-bytes", str(320 << 20), *flags)
        self.process = subprocess.Popen(
            [*COMMAND, str(plan), "--cp", "2", "--layout", "te", "--json", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=variables,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        told = self.process.stdout.readline()
        assert told, self.process.communicate()
        self.facts = json.loads(told)

    def end(self, number):
        """Send a signal; return the exit code, and what was said after the first line."""
        self.process.send_signal(number)
        out, _ = self.process.communicate(timeout=60)
        return self.process.returncode, out


def session_of(command):
    """Return the processes of the session that a command leads, zombies aside."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == command.process.pid and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def folders_of(command):
    """Return the folders whose owners are processes of the session that a command leads."""
    held: set[Path] = set()
    for number in session_of(command):
        # Processes and files come and go.
        with suppress(FileNotFoundError):
            held.update(Path(f"/proc/{number}/fd").iterdir())
    owners = {Path(os.path.realpath(link)) for link in held}
    return [folder for folder in SHARED_MEMORY.glob("ringfeed-*") if folder / "owner" in owners]


def test_the_command_joins_a_cluster_asks_for_its_token_and_leaves_nothing_there(plan, local_ray, tmp_path):
    import ray

    token = "a-token-of-ranks"  # noqa: S105
    (tmp_path / "token").write_text(token)

    with serve(plan, cp_size=2, layout="te", builders=1, **SMALL) as running:
        address = ray.get_runtime_context().gcs_address
        told = ("--name", "other", "--token-file", str(tmp_path / "token"))
        command = Command(plan, *told, address=address)
        try:
            assert command.facts["ray_url"] == "ray-actor://ringfeed/other"
            assert command.facts["ray_address"] == address
            url = command.facts["url"]
            with load(url, token=token) as loader, load(command.facts["ray_url"]) as other:
                assert_same_batches(loader, other)
            with pytest.raises(ConnectionError, match="refuses this rank"):
                load(url, token=f"not-{token}")
        finally:
            code, out = command.end(signal.SIGTERM)
        assert (code, out) == (0, "")
        with pytest.raises(ValueError, match="other"):
            ray.get_actor("other", namespace="ringfeed")
        with load(running.url) as loader:
            assert_same_batches(loader, load(plan, layout="te"))


def test_ranks_wait_for_a_service_that_was_killed_and_the_next_one_clears_away_what_is_left(plan):
    killed = Command(plan)
    port = killed.facts["url"].rpartition(":")[2]
    expected, found = list(load(plan, layout="te")), []
    with load(killed.facts["url"], prefetch_bytes=8192) as loader:
        found += list(islice(loader, 10))
        assert len(session_of(killed)) > 5
        folders = folders_of(killed)
        assert len(folders) == 1
        assert killed.end(signal.SIGKILL)[0] == -signal.SIGKILL
        rest = threading.Thread(target=lambda: found.extend(loader), daemon=True)
        rest.start()
        again = Command(plan, "--port", port)
        try:
            assert session_of(killed) == []
            folders += folders_of(again)
            assert len(folders) == 2
            assert again.facts["url"] == killed.facts["url"]
            rest.join(timeout=60)
            assert not rest.is_alive()
        finally:
            # As Ctrl-C on a terminal does: to all processes of the group.
            os.killpg(again.process.pid, signal.SIGINT)
            code, out = again.end(0)
    assert_same_batches(found, expected)
    assert (code, out) == (0, "")
    assert session_of(again) == []
    assert not any(folder.exists() for folder in folders)
