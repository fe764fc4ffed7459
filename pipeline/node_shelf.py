"""Which blocks a node group has in common, who uses them, and what may be fetched next.

In:   what members ask for and let go of, blocks that arrived (``pipeline/node_hub.py``)
Out:  actions: fetch, cancel, serve, free

A block stays until every member that is on its way to it has had it, so that it is fetched once. A member
that is ahead waits while the budget is full of blocks for others, and no longer than ``patience``: one that
has stopped is not waited for, and fetches anew what it missed. A member that has nothing always gets a block.
No thread, no socket, no clock: time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

    from ringfeed.pipeline.feed_request import BlockRequest
    from ringfeed.pipeline.shm_slots import SlotNote

__all__ = ["Action", "Cancel", "Fetch", "Free", "Serve", "Shelf", "Want"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Want:
    """One block, as a member asks for it."""

    member: int
    number: int
    """Of the request, as the member counts."""
    request: BlockRequest
    """The same for all members that want this block."""
    index: int
    """How many micro-batches of the plan come before it: members ask upwards, unless they seek."""
    size: int
    """Bytes that it takes at most."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Get the block that this want is for."""

    ticket: int
    want: Want


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody wants the block of this ticket any more."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Serve:
    """Tell a member where its block is."""

    member: int
    number: int
    note: SlotNote


@dataclass(frozen=True, slots=True)
class Free:
    """A file is not needed any more."""

    name: str
    is_clean: bool
    """Whether all that had it have let go of it; else it must not be written again."""


Action = Fetch | Cancel | Serve | Free


@dataclass(slots=True, eq=False)
class _Block:
    key: Hashable
    want: Want
    """The first one."""
    since: float
    size: int
    ticket: int | None = None
    """Once it may be fetched."""
    note: SlotNote | None = None
    """Once it is here."""
    waiting: list[tuple[int, int]] = field(default_factory=list)
    held: set[tuple[int, int]] = field(default_factory=set)
    had: set[int] = field(default_factory=set)
    is_clean: bool = True

    @property
    def is_idle(self) -> bool:
        """Whether it is here, for members that have yet to ask."""
        return self.note is not None and not self.held and not self.waiting


class Shelf:
    """The blocks of one group. Every method returns what to do; one thread at a time."""

    def __init__(self, members: int, *, budget: int, reach: int, patience: float) -> None:
        """Begin empty.

        Args:
            members: how many; they are numbered from 0.
            budget: bytes of all blocks that are here or under way.
            reach: micro-batches that a member may be behind and still be waited for.
            patience: seconds that a member which has nothing waits for the others.
        """
        self._budget = budget
        self._reach = reach
        self._patience = patience
        self._blocks: dict[Hashable, _Block] = {}
        self._tickets = 0
        self._members = set(range(members))
        self._stopped: set[int] = set()
        """Members that are not waited for until they ask again."""
        self._last: dict[int, int] = {}
        """Index of what a member asked for last."""

    def ask(self, want: Want, now: float) -> list[Action]:
        """A member wants a block."""
        self._stopped.discard(want.member)
        has_gone_back = want.index < self._last.get(want.member, -1)
        self._last[want.member] = want.index
        actions: list[Action] = []
        if has_gone_back:
            # It seeks: what others left for it lies somewhere else.
            for block in [one for one in self._blocks.values() if one.is_idle]:
                actions += self._remove(block)
        known = self._blocks.get(want.request)
        if known is not None and want.member in known.had:
            # It had this one and asks again: what is here may be damaged. Who has it keeps it.
            known.key = (known.ticket, want.request)
            known.had |= self._members
            self._blocks[known.key] = self._blocks.pop(want.request)
        block = self._blocks.setdefault(want.request, _Block(want.request, want, now, want.size))
        block.waiting.append((want.member, want.number))
        return actions + self._settle(now)

    def let_go(self, member: int, number: int, now: float) -> list[Action]:
        """A member does not want a block any more, had or not."""
        for block in self._blocks.values():
            if (member, number) in block.held:
                block.held.discard((member, number))
            elif (member, number) in block.waiting:
                block.waiting.remove((member, number))
        return self._settle(now)

    def leave(self, member: int, now: float) -> list[Action]:
        """A member is gone, well or not; what it had mapped may be mapped still."""
        self._members.discard(member)
        for block in self._blocks.values():
            kept = {entry for entry in block.held if entry[0] != member}
            block.is_clean = block.is_clean and len(kept) == len(block.held)
            block.held = kept
            block.waiting = [entry for entry in block.waiting if entry[0] != member]
        return self._settle(now)

    def arrived(self, ticket: int, note: SlotNote, now: float, *, size: int) -> list[Action]:
        """A block is in a file, which takes ``size`` bytes."""
        block = self._find(ticket)
        if block is None:
            return [Free(note.name, is_clean=True)]
        block.note, block.size = note, size
        return self._settle(now)

    def failed(self, ticket: int, now: float) -> tuple[list[tuple[int, int]], list[Action]]:
        """A block cannot be had; return who waited for it, as (member, number), and what to do."""
        block = self._find(ticket)
        if block is None:
            return [], []
        del self._blocks[block.key]
        return block.waiting, self._settle(now)

    def tick(self, now: float) -> list[Action]:
        """Time has passed."""
        return self._settle(now)

    @property
    def members(self) -> set[int]:
        """Those that have not left."""
        return set(self._members)

    def bytes_used(self) -> int:
        """Return the bytes of all blocks that are here or under way, the latter at most."""
        return sum(block.size for block in self._asked())

    def bytes_by_member(self) -> dict[int, int]:
        """Return the bytes of the blocks that each member has now."""
        found = dict.fromkeys(sorted(self._members), 0)
        for block in self._blocks.values():
            for member in {entry[0] for entry in block.held}:
                found[member] = found.get(member, 0) + block.size
        return found

    def waiting_members(self) -> set[int]:
        """Return who waits for a block."""
        return {member for block in self._blocks.values() for member, _ in block.waiting}

    def _settle(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for block in list(self._blocks.values()):
            if block.note is not None:
                for member, number in block.waiting:
                    actions.append(Serve(member, number, block.note))
                    block.held.add((member, number))
                    block.had.add(member)
                block.waiting = []
            if not block.waiting and not block.held and not self._is_awaited(block):
                actions += self._remove(block)
        for block in sorted(self._blocks.values(), key=lambda one: one.want.index):
            if block.ticket is None:
                actions += self._admit(block, now)
        return actions

    def _admit(self, block: _Block, now: float) -> list[Action]:
        actions: list[Action] = []
        is_starving = any(not self._has_any(member) for member, _ in block.waiting)
        if is_starving and now - block.since >= self._patience:
            for idle in self._idle():
                if self._fits(block):
                    break
                self._stopped |= {member for member in self._members if self._is_for(idle, member)}
                actions += self._remove(idle)
        if self._fits(block) or (is_starving and not self._idle()):
            self._tickets += 1
            block.ticket = self._tickets
            actions.append(Fetch(block.ticket, block.want))
        return actions

    def _fits(self, block: _Block) -> bool:
        return self.bytes_used() + block.size <= self._budget

    def _idle(self) -> list[_Block]:
        """Return what nobody uses now, that which is wanted last first."""
        return sorted((b for b in self._blocks.values() if b.is_idle), key=lambda b: -b.want.index)

    def _asked(self) -> Iterator[_Block]:
        return (block for block in self._blocks.values() if block.ticket is not None)

    def _has_any(self, member: int) -> bool:
        return any(member == entry[0] for block in self._asked() for entry in (*block.held, *block.waiting))

    def _is_awaited(self, block: _Block) -> bool:
        return block.ticket is not None and any(self._is_for(block, member) for member in self._members)

    def _is_for(self, block: _Block, member: int) -> bool:
        """Return whether a member is on its way to a block that it has not had."""
        if member in block.had or member in self._stopped:
            return False
        last = self._last.get(member)
        return last is None or 0 < block.want.index - last <= self._reach

    def _remove(self, block: _Block) -> list[Action]:
        del self._blocks[block.key]
        if block.note is not None:
            return [Free(block.note.name, is_clean=block.is_clean)]
        return [] if block.ticket is None else [Cancel(block.ticket)]

    def _find(self, ticket: int) -> _Block | None:
        return next((block for block in self._asked() if block.ticket == ticket), None)
