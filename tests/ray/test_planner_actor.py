"""Planning on the fly on a real Ray: ranks train on the first blocks while later ones are planned."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_growth import follow_plan
from ringfeed.pipeline.planner.options import Balance, BlockLimits, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.block_builder import PlanOpener
from ringfeed.workers.builder_actor import BuilderActor, BuilderSettings
from ringfeed.workers.builder_calls import BuilderLostError
from ringfeed.workers.plan_ahead import PlanAhead
from ringfeed.workers.planner_actor import PlannerActor
from ringfeed.workers.ray_session import ray_session
from ringfeed.workers.roster import BuilderMember, Roster
from ringfeed.workers.service_actor import ServiceActor

pytestmark = pytest.mark.ray

STEPS_A_BLOCK = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    rng = np.random.default_rng(2)
    write_corpus(folder / "corpus", [rng.integers(0, 300, n) for n in rng.integers(1, 200, 300)], name="c")
    return folder


@pytest.fixture(scope="module")
def local_ray():
    with ray_session(num_cpus=4):
        import ray

        yield ray


def options_of(folder, name):
    return PlanOptions(
        output=folder / name,
        corpora=[folder / "corpus"],
        pack_tokens=128,
        packs_per_step=4,
        max_cp=2,
        balance=Balance.BEST_FIT,
        window=2,
        seed=5,
        block_limits=BlockLimits(steps=STEPS_A_BLOCK),
    )


class Planner:
    """What the service's loop does: a planner that is kept alive and ahead."""

    def __init__(self, ray, options):
        self.ray, self.options = ray, options
        self.ahead = PlanAhead(steps_ahead=STEPS_A_BLOCK)
        self.start()

    def start(self):
        self.actor = self.ray.remote(num_cpus=0.1, max_restarts=0)(PlannerActor).remote(self.options)
        self.hear(self.call("hello"))

    def call(self, method, *arguments):
        from ringfeed.workers.ray_builders import call_actor

        start = getattr(self.actor, method).remote
        return call_actor(lambda: start(*arguments), who="planner", seconds=60, stop=threading.Event())

    def hear(self, hello):
        self.said = hello
        self.ahead.planned(hello.num_steps, is_finished=hello.is_finished)

    def follow(self, builders):
        """Do what is due, once."""
        for stats in self.ray.get([actor.stats.remote() for actor in builders]):
            self.ahead.asked(stats.highest_step)
        if (until := self.ahead.until_step) is not None:
            try:
                self.hear(self.call("advance", until))
            except BuilderLostError:
                self.start()


def load(source, *, cp=(0, 2), **options):
    return Loader(source, dp_rank=1, dp_size=2, cp_rank=cp[0], cp_size=cp[1], max_documents=200, **options)


def assert_same_batches(found, expected):
    for batch, other in zip(found, expected, strict=True):
        assert batch.info == other.info
        assert all(batch.tensors[name].equal(tensor) for name, tensor in other.tensors.items())


def test_ranks_train_while_the_plan_is_made_and_its_planner_is_killed(folder, local_ray):
    ray = local_ray
    run_plan(replace(options_of(folder, "whole"), block_limits=BlockLimits()))
    whole = Plan.open(folder / "whole")
    planner = Planner(ray, options_of(folder, "growing"))
    assert (planner.said.num_steps, planner.said.is_finished) == (0, False)
    growing = follow_plan(folder / "growing")
    asked = OpenOptions(layout=make_layout("te"), cp_size=2)
    opener = PlanOpener(plan=folder / "growing", spec=open_spec(growing, asked, pad_id=0))
    settings = BuilderSettings(open_source=opener, block_bytes=1024, keep_bytes=1 << 20)
    builders = [ray.remote(num_cpus=0.1)(BuilderActor).remote(settings) for _ in range(2)]
    hellos = ray.get([actor.hello.remote() for actor in builders])
    members = tuple(
        BuilderMember(name=f"builder-{i}", node_id=hello.node_id, actor=actor)
        for i, (actor, hello) in enumerate(zip(builders, hellos, strict=True))
    )
    service = ray.remote(num_cpus=0)(ServiceActor).options(name="growing", namespace="plans").remote()
    ray.get(service.set_roster.remote(Roster(version=1, facts_json=hellos[0].facts_json, builders=members)))
    over = threading.Event()

    def follow():
        while not over.wait(0.05):
            planner.follow(builders)

    found: list[Any] = []
    known = []
    with (
        ThreadPoolExecutor(1) as threads,
        load("ray-actor://plans/growing", prefetch_bytes=1 << 14) as loader,
    ):
        loop = threads.submit(follow)
        try:
            for batch in loader:
                found.append(batch)
                known.append(planner.said.num_steps)
                if len(found) == 8:
                    os.kill(planner.said.pid, signal.SIGKILL)
                if loop.done():
                    loop.result()
        finally:
            over.set()
        loop.result()

    # The first batch came long before the end was planned.
    assert known[0] < whole.num_steps / 2
    assert (len(found), planner.said.is_finished) == (2 * whole.num_steps, True)
    assert_same_batches(found, load(folder / "whole", layout="te"))
    # The planner that was started again went on with what was there.
    assert Plan.open(folder / "growing").chain(whole.num_steps - 1) == whole.chain(whole.num_steps - 1)


def test_a_mistake_of_the_user_comes_back_as_itself(folder, local_ray):
    planner = Planner(local_ray, replace(options_of(folder, "short"), overflow="error"))
    with pytest.raises(ValueError, match=r"has \d+ tokens, more than pack_tokens=128, and overflow=error"):
        planner.call("advance", None)


def test_options_that_cannot_be_planned_are_told_by_hello(folder, local_ray):
    with pytest.raises(ValueError, match="nowhere"):
        Planner(local_ray, replace(options_of(folder, "none"), corpora=[folder / "nowhere"]))
