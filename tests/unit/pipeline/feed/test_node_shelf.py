"""Which blocks of a node group are fetched, kept, served, given up: decisions without threads or clocks."""

import itertools
from typing import Any

import numpy as np

from ringfeed.pipeline.node_shelf import Cancel, Fetch, Free, Serve, Shelf, Want
from ringfeed.pipeline.shm_slots import SlotNote

SIZE = 10
PATIENCE = 5.0


class Group:
    """A shelf whose actions are carried out at once: fetches wait until ``arrive``."""

    def __init__(self, members=2, *, budget=4 * SIZE, reach=100):
        self.shelf = Shelf(members, budget=budget, reach=reach, patience=PATIENCE)
        self.now = 0.0
        self.numbers = itertools.count()
        self.fetching: dict[int, Any] = {}
        self.fetched: list[int] = []
        self.files: dict[str, int] = {}
        self.had: dict[int, dict[int, int]] = {member: {} for member in range(members)}
        self.unclean: list[str] = []
        self.file_size = SIZE

    def ask(self, member, index):
        number = next(self.numbers)
        want: Any = Want(member=member, number=number, request=("block", index), index=index, size=SIZE)  # type: ignore[arg-type]
        self.do(self.shelf.ask(want, self.now))
        return number

    def let_go(self, member, number):
        self.had[member].pop(number, None)
        self.do(self.shelf.let_go(member, number, self.now))

    def leave(self, member):
        self.do(self.shelf.leave(member, self.now))

    def arrive(self):
        while self.fetching:
            ticket, index = next(iter(self.fetching.items()))
            del self.fetching[ticket]
            name = f"file-{ticket}"
            self.files[name] = index
            note = SlotNote(name=name, generation=1, size=SIZE)
            self.do(self.shelf.arrived(ticket, note, self.now, size=self.file_size))

    def wait(self, seconds):
        self.now += seconds
        self.do(self.shelf.tick(self.now))

    def do(self, actions):
        for action in actions:
            match action:
                case Fetch(ticket, want):
                    self.fetching[ticket] = want.index
                    self.fetched.append(want.index)
                case Cancel(ticket):
                    del self.fetching[ticket]
                case Serve(member, number, note):
                    self.had[member][number] = self.files[note.name]
                case Free(name, is_clean):
                    del self.files[name]
                    self.unclean += [] if is_clean else [name]


def test_a_block_is_fetched_once_and_goes_when_all_have_let_go_of_it():
    group = Group()
    first = group.ask(0, 0)
    group.arrive()
    second = group.ask(1, 0)
    assert group.fetched == [0]
    assert (group.had[0], group.had[1]) == ({first: 0}, {second: 0})
    group.let_go(0, first)
    assert group.files
    group.let_go(1, second)
    assert not group.files
    assert group.unclean == []


def test_a_block_stays_for_one_that_comes_later():
    group = Group()
    first = group.ask(0, 0)
    group.arrive()
    group.let_go(0, first)
    # It did not want this one after all; the other will.
    group.let_go(0, group.ask(0, 1))
    group.arrive()
    assert list(group.files.values()) == [0, 1]
    for index in range(2):
        group.let_go(1, group.ask(1, index))
    assert group.fetched == [0, 1]
    assert list(group.files.values()) == []


def test_one_that_is_ahead_waits_while_the_budget_is_full_and_no_longer_than_patience():
    group = Group(budget=3 * SIZE)
    for index in range(3):
        number = group.ask(0, index)
        group.arrive()
        group.let_go(0, number)
    last = group.ask(0, 3)
    group.arrive()
    assert group.fetched == [0, 1, 2]
    group.wait(PATIENCE - 1)
    assert group.fetched == [0, 1, 2]
    # The other one takes the first block: there is room.
    group.let_go(1, group.ask(1, 0))
    group.arrive()
    assert group.had[0] == {last: 3}
    group.let_go(0, last)
    # It stops. What it has not had goes, the farthest away first, and it is not waited for again.
    group.ask(0, 4)
    group.wait(PATIENCE)
    group.arrive()
    assert sorted(group.files.values()) == [4]
    group.ask(0, 5)
    assert group.fetched == [0, 1, 2, 3, 4, 5]
    # It comes back, and fetches anew what it missed.
    group.ask(1, 1)
    group.arrive()
    assert list(group.had[1].values()) == [1]
    assert group.fetched.count(1) == 2


def test_a_member_that_has_nothing_gets_a_block_whatever_it_takes():
    group = Group(budget=0)
    held = group.ask(0, 0)
    group.ask(1, 7)
    group.arrive()
    assert sorted(index for had in group.had.values() for index in had.values()) == [0, 7]
    group.ask(0, 1)
    group.arrive()
    assert 1 not in group.had[0].values()
    group.let_go(0, held)
    group.wait(PATIENCE)
    group.arrive()
    assert 1 in group.had[0].values()


def test_one_that_leaves_is_not_waited_for_and_what_it_had_is_not_written_again():
    group = Group()
    group.ask(1, 0)
    number = group.ask(0, 0)
    group.arrive()
    waiting = group.ask(0, 1)
    group.arrive()
    group.leave(1)
    group.let_go(0, number)
    assert group.unclean == ["file-1"]
    group.let_go(0, waiting)
    assert not group.files
    group.leave(0)
    assert not group.shelf.members


def test_a_fetch_that_nobody_wants_any_more_is_cancelled_and_late_blocks_go():
    group = Group(members=1)
    number = group.ask(0, 0)
    ticket = next(iter(group.fetching))
    group.let_go(0, number)
    assert not group.fetching
    late = SlotNote(name="late", generation=1, size=SIZE)
    assert group.shelf.arrived(ticket, late, 0.0, size=SIZE) == [Free("late", is_clean=True)]


def test_a_failure_is_told_to_all_that_wait_and_the_block_may_be_asked_for_again():
    group = Group()
    numbers = [(member, group.ask(member, 0)) for member in (0, 1)]
    (ticket,) = group.fetching
    waiting, actions = group.shelf.failed(ticket, 0.0)
    assert (waiting, actions) == (numbers, [])
    group.fetching.clear()
    group.ask(0, 0)
    group.arrive()
    assert list(group.had[0].values()) == [0]


def test_who_asks_again_for_what_it_has_gets_it_anew():
    group = Group()
    group.ask(0, 0)
    other = group.ask(1, 0)
    group.arrive()
    group.ask(0, 0)
    assert group.fetched == [0, 0]
    group.arrive()
    assert sorted(group.files) == ["file-1", "file-2"]
    group.let_go(1, other)
    assert len(group.had[0]) == 2


def test_a_seek_gives_up_what_was_left_for_others():
    group = Group()
    for index in (10, 11):
        number = group.ask(0, index)
        group.arrive()
        group.let_go(0, number)
    assert sorted(group.files.values()) == [10, 11]
    group.ask(0, 0)
    assert not group.files


def test_a_block_counts_what_its_file_takes():
    group = Group(1)
    group.file_size = 2 * SIZE
    for index in range(3):
        group.ask(0, index)
        group.arrive()
    assert group.fetched == [0, 1]
    assert group.shelf.bytes_used() == 4 * SIZE


def test_members_of_any_speed_get_all_blocks_in_order_within_the_budget():
    rng = np.random.default_rng(0)
    for _ in range(30):
        members, budget = int(rng.integers(1, 5)), int(rng.integers(1, 7))
        group = Group(members, budget=budget * SIZE, reach=int(rng.choice([2, 100])))
        following = [0] * members
        for _ in range(10_000):
            if min(following) == 20:
                break
            member = int(rng.integers(members))
            if member not in group.shelf.waiting_members() and following[member] < 20:
                for number in list(group.had[member]):
                    group.let_go(member, number)
                group.ask(member, following[member])
                following[member] += 1
            group.arrive()
            assert group.shelf.bytes_used() == len(group.files) * SIZE <= max(budget, members) * SIZE
            if rng.integers(2):
                group.wait(PATIENCE)
                group.arrive()
                assert not group.shelf.waiting_members()
        assert min(following) == 20
        for member in range(members):
            group.leave(member)
        assert not group.files
