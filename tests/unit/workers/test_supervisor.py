"""Which members there are after which events: times are arguments, so nothing here waits."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringfeed.workers.members import (
    Loss,
    LossKind,
    Phase,
    RestartPolicy,
    Role,
    Start,
    Stop,
)
from ringfeed.workers.supervisor import Supervisor

DIED = Loss(kind=LossKind.DIED, text="it died")
POLICY = RestartPolicy(
    first_wait=1.0, most_wait=8.0, stable_seconds=60.0, start_seconds=100.0, linger_seconds=30.0, max_tries=3
)


def supervisor(*, builders=2, policy=POLICY, **options):
    made = Supervisor(num_builders=builders, policy=policy, **options)
    made.see_nodes(["a", "b"])
    return made


def starts(actions):
    return {action.name: action for action in actions if isinstance(action, Start)}


def stops(actions):
    return {action.name: action for action in actions if isinstance(action, Stop)}


def begin(made, *, now=0.0, nodes=("a", "a")):
    """Bring up the service actor, the builders on ``nodes`` and their feeders; return all starts."""
    begun = starts(made.act(now))
    made.ready("service", begun["service"].life, node_id="a", now=now)
    for i, node in enumerate(nodes):
        made.ready(f"builder-{i}", begun[f"builder-{i}"].life, node_id=node, now=now)
    feeders = starts(made.act(now))
    for name, start in feeders.items():
        made.ready(name, start.life, node_id=start.node_id, now=now)
    return begun | feeders


def phase(made, name):
    return {member.name: member.phase for member in made.members}.get(name)


def test_service_and_builders_start_at_once_and_a_feeder_where_builders_are():
    made = supervisor()
    assert starts(made.act(0.0)).keys() == {"service", "builder-0", "builder-1"}
    assert made.act(0.5) == []
    made.ready("builder-0", starts_life(made, "builder-0"), node_id="b", now=1.0)
    [feeder] = made.act(1.0)
    assert (feeder.name, feeder.role, feeder.node_id) == ("feeder-b", Role.FEEDER, "b")


def starts_life(made, name):
    return {member.name: member.life for member in made.members}[name]


def test_it_is_up_once_each_role_has_a_ready_member():
    made = supervisor()
    begun = starts(made.act(0.0))
    assert not made.is_up
    made.ready("service", begun["service"].life, node_id="a", now=0.0)
    made.ready("builder-1", begun["builder-1"].life, node_id="a", now=0.0)
    [feeder] = made.act(0.0)
    assert not made.is_up
    made.ready(feeder.name, feeder.life, node_id="a", now=0.0)
    assert made.is_up


def test_waits_double_up_to_the_longest_and_are_short_again_after_a_stable_time():
    made = supervisor()
    life, now, waits = begin(made)["builder-0"].life, 0.0, []
    for _ in range(6):
        made.lost("builder-0", life, DIED, now=now)
        wait = 0.0
        while not (found := starts(made.act(now + wait))):
            wait += 0.5
        waits.append(wait)
        now += wait
        life = found["builder-0"].life
        made.ready("builder-0", life, node_id="a", now=now)
    assert waits == [1.0, 2.0, 4.0, 8.0, 8.0, 8.0]
    assert made.num_restarts == {Role.BUILDER: 6}

    now += 60.0
    made.lost("builder-0", life, DIED, now=now)
    assert starts(made.act(now + 1.0)).keys() == {"builder-0"}


def test_news_of_an_earlier_life_is_no_news():
    made = supervisor()
    old = begin(made)["builder-0"].life
    made.lost("builder-0", old, DIED, now=0.0)
    new = starts(made.act(1.0))["builder-0"].life
    assert new > old
    made.lost("builder-0", old, DIED, now=1.0)
    made.ready("builder-0", old, node_id="b", now=1.0)
    assert phase(made, "builder-0") is Phase.STARTING
    made.lost("builder-9", 1, DIED, now=1.0)


def test_a_member_that_is_not_ready_in_time_is_stopped_and_started_again_when_it_is_gone():
    made = supervisor(builders=1)
    life = starts(made.act(0.0))["builder-0"].life
    assert made.act(99.9) == []
    assert stops(made.act(100.0)).keys() == {"service", "builder-0"}
    assert made.act(120.0) == []
    # Too late: it is being ended.
    made.ready("builder-0", life, node_id="a", now=120.0)
    assert phase(made, "builder-0") is Phase.STOPPING
    made.lost("builder-0", life, DIED, now=120.0)
    assert starts(made.act(120.5)).keys() == set()
    assert starts(made.act(121.0)).keys() == {"builder-0"}
    [told] = [member.last_loss for member in made.members if member.name == "builder-0"]
    assert told == "builder-0 was not ready within 100 s"


@pytest.mark.parametrize("kind", list(LossKind))
def test_a_member_that_is_never_ready_ends_the_service_with_what_it_said(kind):
    made = supervisor(builders=1)
    loss, now = Loss(kind=kind, text="no such plan"), 0.0
    for tried in range(3):
        assert made.failure is None
        life = starts(made.act(now))["builder-0"].life
        made.lost("builder-0", life, loss, now=now)
        now += 2.0**tried
    assert made.failure == loss
    assert made.act(now + 100.0) == []


def test_one_bad_builder_among_good_ones_ends_nothing():
    made = supervisor(builders=2)
    begun, now = starts(made.act(0.0)), 0.0
    made.ready("builder-1", begun["builder-1"].life, node_id="a", now=now)
    life = begun["builder-0"].life
    for _ in range(5):
        made.lost("builder-0", life, DIED, now=now)
        now += 8.0
        life = starts(made.act(now))["builder-0"].life
    assert made.failure is None


def test_a_member_that_was_ready_once_is_started_again_for_ever():
    made = supervisor(builders=1)
    life, now = begin(made, nodes=("a",))["builder-0"].life, 0.0
    for _ in range(20):
        made.lost("builder-0", life, DIED, now=now)
        now += 8.0
        life = starts(made.act(now))["builder-0"].life
    assert made.failure is None


def test_a_feeder_stays_a_while_when_the_last_builder_of_its_node_is_gone():
    made = supervisor(builders=2)
    begun = begin(made, nodes=("a", "b"))
    made.act(10.0)
    made.lost("builder-1", begun["builder-1"].life, DIED, now=10.0)
    life = starts(made.act(11.0))["builder-1"].life
    made.ready("builder-1", life, node_id="a", now=11.0)
    assert stops(made.act(40.0)) == {}
    assert stops(made.act(40.1)).keys() == {"feeder-b"}
    made.lost("feeder-b", begun["feeder-b"].life, DIED, now=41.0)
    assert made.act(41.0) == []
    assert phase(made, "feeder-b") is None


def test_a_feeder_that_is_wanted_again_while_it_stops_waits_for_its_end():
    made = supervisor(builders=2)
    begun = begin(made, nodes=("a", "b"))
    made.lost("builder-1", begun["builder-1"].life, DIED, now=0.0)
    life = starts(made.act(31.0))["builder-1"].life
    assert phase(made, "feeder-b") is Phase.STOPPING
    made.ready("builder-1", life, node_id="b", now=32.0)
    assert made.act(32.0) == []
    made.lost("feeder-b", begun["feeder-b"].life, DIED, now=33.0)
    [start] = made.act(33.0)
    assert (start.name, start.node_id) == ("feeder-b", "b")


def test_a_node_that_left_has_no_feeder_and_one_that_joins_has():
    made = supervisor(builders=2)
    begun = begin(made, nodes=("a", "b"))
    made.see_nodes(["a"])
    assert stops(made.act(1.0)).keys() == {"feeder-b"}
    for name in ("feeder-b", "builder-1"):
        made.lost(name, begun[name].life, DIED, now=1.0)
    assert starts(made.act(2.0)).keys() == {"builder-1"}
    made.see_nodes(["a", "c"])
    made.ready("builder-1", starts_life(made, "builder-1"), node_id="c", now=3.0)
    assert starts(made.act(3.0)).keys() == {"feeder-c"}


def test_a_planner_is_wanted_until_its_work_is_done():
    made = Supervisor(num_builders=1, num_planners=1, feeder_node="a", policy=POLICY)
    made.see_nodes(["a"])
    begun = starts(made.act(0.0))
    for name in ("service", "builder-0", "feeder-a"):
        made.ready(name, begun[name].life, node_id="a", now=0.0)
    assert not made.is_up
    made.ready("planner", begun["planner"].life, node_id="a", now=0.0)
    assert made.is_up
    made.lost("planner", begun["planner"].life, DIED, now=1.0)
    life = starts(made.act(2.0))["planner"].life
    made.dismiss("planner")
    assert stops(made.act(3.0)).keys() == {"planner"}
    made.lost("planner", life, DIED, now=3.0)
    assert made.act(20.0) == []
    assert phase(made, "planner") is None
    assert made.is_up


def test_on_one_machine_there_is_one_feeder_wherever_builders_are():
    made = supervisor(builders=2, feeder_node="b")
    assert "feeder-b" in starts(made.act(0.0))
    made.ready("builder-0", starts_life(made, "builder-0"), node_id="a", now=0.0)
    assert made.act(0.0) == []


@pytest.mark.parametrize(
    "wrong", [{"first_wait": 0}, {"most_wait": -1}, {"stable_seconds": math.nan}, {"max_tries": 0}]
)
def test_a_policy_that_makes_no_sense_is_refused(wrong):
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* must be"):
        RestartPolicy(**wrong)


def test_a_service_without_builders_is_refused():
    with pytest.raises(ValueError, match="builders=0 must be at least 1"):
        Supervisor(num_builders=0)


class World:
    """Does what a supervisor says, and breaks things; checks what must hold at any time."""

    def __init__(self, num_builders, feeder_node):
        self.made = Supervisor(num_builders=num_builders, feeder_node=feeder_node, policy=POLICY)
        self.nodes = {"a"}
        self.alive: dict[str, Start] = {}
        self.told: dict[int, str] = {}
        self.where: dict[str, str] = {}
        self.now = 0.0
        self.made.see_nodes(self.nodes)

    def act(self):
        for action in self.made.act(self.now):
            if isinstance(action, Start):
                assert action.name not in self.alive, "two lives of one name"
                assert action.life not in self.told
                assert action.node_id is None or action.node_id in self.nodes
                self.alive[action.name] = action
                if action.node_id is not None:
                    self.where[action.name] = action.node_id
                self.told[action.life] = action.name
            else:
                assert self.alive[action.name].life == action.life

    def pick(self, number):
        return sorted(self.alive.items())[number % len(self.alive)] if self.alive else (None, None)

    def do(self, event: str, number: int):
        name, start = self.pick(number)
        if event == "pass":
            self.now += number / 4
        elif event == "join":
            self.nodes.add("abc"[number % 3])
        elif event == "leave" and len(self.nodes) > 1:
            self.lose_node(sorted(self.nodes)[number % len(self.nodes)])
        elif event == "die" and name is not None:
            self.lose(name)
        elif event == "ready" and name is not None:
            self.get_ready(name, start, sorted(self.nodes)[number % len(self.nodes)])
        elif event == "stale" and self.told:
            life = sorted(self.told)[number % len(self.told)]
            if life not in {start.life for start in self.alive.values()}:
                self.made.lost(self.told[life], life, DIED, now=self.now)
        self.made.see_nodes(self.nodes)
        self.act()
        self.check()

    def lose(self, name):
        self.where.pop(name, None)
        self.made.lost(name, self.alive.pop(name).life, DIED, now=self.now)

    def lose_node(self, node):
        """A node leaves, with all who are there."""
        self.nodes.discard(node)
        for name in [name for name, there in self.where.items() if there == node]:
            self.lose(name)

    def get_ready(self, name, start, node):
        self.where.setdefault(name, start.node_id or node)
        self.made.ready(name, start.life, node_id=self.where[name], now=self.now)

    def check(self):
        for member in self.made.members:
            is_alive = self.alive.get(member.name)
            assert (is_alive is not None) == (member.phase is not Phase.WAITING)
            assert is_alive is None or is_alive.life == member.life


EVENTS: Any = st.lists(
    st.tuples(st.sampled_from(["pass", "join", "leave", "die", "ready", "stale"]), st.integers(0, 300)),
    max_size=80,
)


@settings(max_examples=300)
@given(events=EVENTS, num_builders=st.integers(1, 3), feeder_node=st.sampled_from([None, "a"]))
def test_after_any_events_each_name_has_one_life_and_comes_back_within_the_longest_wait(
    events, num_builders, feeder_node
):
    world = World(num_builders, feeder_node)
    world.act()
    for event, number in events:
        world.do(event, number)
    if world.made.failure is not None:
        # Nothing of that role was ever ready, and is not now.
        return
    world.now += POLICY.most_wait
    world.act()
    wanted = {"service", *(f"builder-{i}" for i in range(num_builders))}
    assert wanted <= world.alive.keys()
    # All get ready, and the feeders of their nodes come up and stay.
    for _ in range(4):
        for name, start in list(world.alive.items()):
            if phase(world.made, name) is Phase.STOPPING:
                world.lose(name)
            else:
                world.get_ready(name, start, min(world.nodes))
        world.now += POLICY.most_wait
        world.act()
    is_up = world.made.is_up or (feeder_node is not None and feeder_node not in world.nodes)
    assert is_up or world.made.failure is not None
