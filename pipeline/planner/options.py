"""What a user may set for a plan. Every rule between options is checked here, before any work starts.

In:   arguments of ``ringfeed plan`` (``pipeline/cli.py``)
Out:  ``PlanOptions``; ``document_multiple`` and others say what they come to
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import lcm
from pathlib import Path
from typing import TypeVar

from ringfeed.pipeline.choices import (
    Balance,
    LengthBuckets,
    Overflow,
    PackShape,
    Schedule,
    Unsupervised,
)
from ringfeed.pipeline.pack_lengths import PackLengths
from ringfeed.pipeline.planner.cost import DEFAULT_COST_MODEL, CostModel, check_costs
from ringfeed.pipeline.planner.given import check_given
from ringfeed.pipeline.planner.mixture import Mixture
from ringfeed.pipeline.planner.variable_options import VariableWork, variable_work
from ringfeed.pipeline.planner.whole_numbers import set_whole
from ringfeed.pipeline.supervision import BOUNDARY_LABELS

__all__ = ["Balance", "BlockLimits", "Overflow", "PlanOptions", "Schedule", "Unsupervised"]

_Choice = TypeVar("_Choice", bound=StrEnum)
_LARGEST_SEED = (1 << 64) - 1
_LARGEST_PACK = (1 << 31) - 1
_WHOLE = (
    "pack_tokens",
    "packs_per_step",
    "max_cp",
    "pad_multiple",
    "chunk_multiple",
    "window",
    "slate_size",
    "long_tokens",
    "seed",
    "epochs",
    "steps",
    "workers",
    "mean_tokens",
    "piece_tokens",
    "work_budget",
    "max_delay",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockLimits:
    """When a plan block is full. Where blocks are cut changes no step."""

    steps: int = 4096
    pieces: int = 1 << 20

    def __post_init__(self) -> None:
        set_whole(self, ("steps", "pieces"))
        for name in ("steps", "pieces"):
            if getattr(self, name) < 1:
                raise ValueError(f"block limit {name} must be at least 1, got {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions:
    """What to plan, and how.

    Raises:
        ValueError: if an option, or a pair of options, makes no sense; names the way out.
    """

    output: Path
    corpora: Sequence[Path] = ()
    """Corpus folders; global document ids count through them in this order."""
    lengths: Path | None = None
    """A .npy file of 1-D integers in place of corpora."""
    pack_tokens: int
    """Slots in a pack, padding included; a multiple of ``document_multiple``."""
    packs_per_step: int
    pack_shape: PackShape = PackShape.FIXED
    """``variable``: a pack is as long as its own footprint rounded up, ``pack_tokens`` at most."""
    length_buckets: LengthBuckets = LengthBuckets.NONE
    """Few lengths for variable packs."""
    max_cp: int | None = None
    """The largest cp that the plan is meant for: every piece is padded to 2 * max_cp."""
    pad_multiple: int | None = None
    """What every piece is padded to, in place of ``max_cp``."""
    chunk_multiple: int = 1
    """What ``pack_tokens`` must be a multiple of so that ranks can share a pack out, whatever documents are
    padded to (``Layout.chunk_multiple``). A check: it shapes no step."""
    balance: Balance = Balance.WORK
    window: int = 16
    """Steps of look-ahead."""
    slate_size: int | None = None
    """Packs in a slate, the dp the plan is meant for; by default ``packs_per_step``."""
    schedule: Schedule | None = None
    """How slates make steps; None is ``spread`` where there are slates of like work."""
    long_tokens: int | None = None
    """Documents of at least so many tokens are moved over the whole window, shorter ones hardly; by default a
    sixteenth of a pack."""
    overflow: Overflow = Overflow.SPLIT
    seed: int | None = None
    """None draws documents in corpus order."""
    epochs: int = 1
    """How often each document is drawn; in a mixture, of sources that do not say it themselves."""
    mixture: Mixture | None = None
    """None draws from all corpora as from one."""
    steps: int | None = None
    """Where the plan ends at the latest; None lets all documents be drawn."""
    workers: int = 1
    """Threads that draw and measure documents ahead. Changes no step."""
    positions: str = "restart"
    boundary_label: str = "next"
    mean_tokens: int | None = None
    """Of variable packs of like work: slots of a pack on average; by default 7/8 of ``pack_tokens``."""
    piece_tokens: int | None = None
    """Of such packs: the longest piece; by default ``pack_tokens``."""
    work_budget: int | None = None
    """Of such packs: what one may cost at most; None for no limit."""
    max_delay: int | None = None
    """Of such packs: steps that a long piece may wait for others like it; by default ``window - 1``."""
    unsupervised: Unsupervised = Unsupervised.REFUSE
    cost_model: CostModel = DEFAULT_COST_MODEL
    """What packs of like cost means (``cost.py``)."""
    block_limits: BlockLimits = BlockLimits()
    variable: VariableWork | None = field(init=False, default=None)
    """The numbers for variable packs of like work, with defaults filled in; None for all other plans."""

    def __post_init__(self) -> None:
        set_whole(self, _WHOLE)
        object.__setattr__(self, "balance", _choose(Balance, "balance", self.balance))
        object.__setattr__(self, "overflow", _choose(Overflow, "overflow", self.overflow))
        object.__setattr__(self, "unsupervised", _choose(Unsupervised, "unsupervised", self.unsupervised))
        if self.schedule is not None:
            object.__setattr__(self, "schedule", _choose(Schedule, "schedule", self.schedule))
        object.__setattr__(self, "pack_shape", _choose(PackShape, "pack_shape", self.pack_shape))
        buckets = _choose(LengthBuckets, "length_buckets", self.length_buckets)
        object.__setattr__(self, "length_buckets", buckets)
        _check_word("positions", self.positions, ("restart", "continue"))
        _check_word("boundary_label", self.boundary_label, BOUNDARY_LABELS)
        if bool(self.corpora) == (self.lengths is not None):
            raise ValueError("plan needs corpora or a file of lengths, one of the two")
        for name in ("pack_tokens", "packs_per_step", "window", "epochs", "workers", "chunk_multiple"):
            _check_positive(name, getattr(self, name))
        if self.steps is not None:
            _check_positive("steps", self.steps)
        if self.pack_tokens > _LARGEST_PACK:
            raise ValueError(f"pack_tokens={self.pack_tokens} is beyond {_LARGEST_PACK}: offsets are int32")
        if self.seed is not None and not 0 <= self.seed <= _LARGEST_SEED:
            raise ValueError(f"seed={self.seed} is not between 0 and {_LARGEST_SEED}")
        self._check_multiple()
        self.pack_lengths.check_budget("pack_tokens")
        self._check_slates()
        check_given(self, is_given=self.balance is Balance.GIVEN)
        variable = variable_work(self, is_work=self.balance is Balance.WORK)
        object.__setattr__(self, "variable", variable)
        check_costs(self.cost_model, pack_tokens=self.pack_tokens, packs_per_step=self.packs_per_step)

    @property
    def document_multiple(self) -> int:
        """Return m: every piece takes a multiple of m slots."""
        if self.max_cp is not None:
            return 2 * self.max_cp
        return self.pad_multiple or 1

    @property
    def pack_lengths(self) -> PackLengths:
        """Return the rule for how many slots each pack has."""
        return PackLengths(
            budget=self.pack_tokens,
            multiple=self.document_multiple,
            shape=self.pack_shape,
            buckets=self.length_buckets,
        )

    @property
    def longest_piece(self) -> int:
        """Return the tokens of the longest piece that a pack takes."""
        return self.pack_tokens if self.variable is None else self.variable.piece_tokens

    @property
    def longest_piece_field(self) -> str:
        """Return which option says how long a piece may be."""
        return "pack_tokens" if self.variable is None else "piece_tokens"

    @property
    def packs_per_slate(self) -> int:
        """Return the slate size with its default filled in."""
        return self.slate_size if self.slate_size is not None else self.packs_per_step

    @property
    def has_slates(self) -> bool:
        """Return whether fixed packs are put together by their work (``slates.py``)."""
        return self.balance is Balance.WORK and self.pack_shape is PackShape.FIXED

    @property
    def schedule_of_steps(self) -> Schedule:
        """Return ``schedule`` with its default filled in."""
        return Schedule.SPREAD if self.schedule is None else self.schedule

    @property
    def tokens_of_long(self) -> int:
        """Return ``long_tokens`` with its default filled in."""
        return self.long_tokens if self.long_tokens is not None else max(1, self.pack_tokens // 16)

    def _check_multiple(self) -> None:
        if (self.max_cp is None) == (self.pad_multiple is None):
            raise ValueError("plan needs max_cp (pads to 2 * max_cp) or pad_multiple, one of the two")
        name = "pad_multiple" if self.max_cp is None else "max_cp"
        _check_positive(name, getattr(self, name))
        reason = name if self.max_cp is None else f"2 * max_cp={self.max_cp}"
        multiple = lcm(self.document_multiple, self.chunk_multiple)
        if self.pack_tokens % multiple:
            below = self.pack_tokens // multiple * multiple
            nearest = [n for n in (below, below + multiple) if n > 0]
            both = reason if self.chunk_multiple == 1 else f"{reason}, chunk_multiple={self.chunk_multiple}"
            raise ValueError(
                f"pack_tokens={self.pack_tokens} is not a multiple of {multiple} ({both}); "
                f"nearest valid: {nearest}"
            )

    def _check_slates(self) -> None:
        size = self.packs_per_slate
        _check_positive("slate_size", size)
        if self.packs_per_step % size:
            valid = [n for n in range(1, self.packs_per_step + 1) if self.packs_per_step % n == 0]
            raise ValueError(
                f"slate_size={size} does not divide packs_per_step={self.packs_per_step}; valid: {valid}"
            )
        self._check_schedule()

    def _check_schedule(self) -> None:
        fields = {"schedule": self.schedule, "long_tokens": self.long_tokens}
        given = {name: value for name, value in fields.items() if value is not None}
        if given and not self.has_slates:
            raise ValueError(
                f"{', '.join(f'{name}={value}' for name, value in given.items())}: only for balance=work "
                f"with pack_shape=fixed, this plan has balance={self.balance}, pack_shape={self.pack_shape}; "
                "leave it out"
            )
        _check_positive("long_tokens", self.tokens_of_long)
        if self.tokens_of_long > self.pack_tokens:
            raise ValueError(
                f"long_tokens={self.long_tokens} is more than a pack holds, so that no document would be "
                f"placed ahead; use at most pack_tokens={self.pack_tokens}, or balance=best_fit"
            )


def _choose(kind: type[_Choice], name: str, value: str) -> _Choice:
    if value not in list(kind):
        _check_word(name, value, tuple(kind))
    return kind(value)


def _check_word(name: str, value: str, words: Sequence[str]) -> None:
    if value not in words:
        raise ValueError(f"{name}={str(value)!r}: must be one of {', '.join(words)}")


def _check_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
