"""The models of the commands around planning: plan, extend, fit-cost, and the report of an existing plan.

In:   flags and a section of a config file, as for all commands (``config.py``)
Out:  checked models; ``to_options`` and ``to_extension`` give what the planner takes
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (pydantic needs it at run time)
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from ringfeed.pipeline.config_base import CommandConfig, Count, Flag, Natural, Text
from ringfeed.pipeline.mixture_config import Weight, read_mixture
from ringfeed.pipeline.pack_lengths import LengthBuckets, PackShape
from ringfeed.pipeline.planner.cost import cost_model_of
from ringfeed.pipeline.planner.cost_fit import Basis
from ringfeed.pipeline.planner.mixture import Mixture, MixtureSource
from ringfeed.pipeline.planner.options import (
    Balance,
    BlockLimits,
    Overflow,
    PlanOptions,
    Schedule,
    Unsupervised,
)
from ringfeed.pipeline.ranks import num_micro_batches

if TYPE_CHECKING:
    from ringfeed.pipeline.planner.extend import Extension

__all__ = ["ExtendConfig", "FitCostConfig", "PlanConfig", "ReportConfig"]

_TWO_WAYS = "mixture and weights say the same thing in two ways; give one of the two"


class ReportConfig(CommandConfig):
    """What the commands that report on a plan share."""

    report: Flag = Field(default=False, description="measure fill and balance, beside what is possible")
    report_dp: tuple[Count, ...] = Field((), description="dp sizes to measure, beside the plan's own")
    report_cost_model: tuple[Text, ...] = Field(
        (), description="cost models to measure by, beside the plan's own"
    )
    plot: Path | None = Field(None, description="a picture of the plan: a .png, .svg or .pdf file")

    @property
    def wants_report(self) -> bool:
        """Is there anything to measure?"""
        return bool(self.report or self.report_dp or self.report_cost_model or self.plot)

    @field_validator("report_dp", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        # What is no number stays as it is, and is refused as such.
        return [int(part) if part.strip().isdecimal() else part for part in value.split(",")]

    @model_validator(mode="after")
    def _check_report(self) -> Self:
        for spec in self.report_cost_model:
            cost_model_of(spec)
        if self.plot is not None:
            from ringfeed.pipeline.planner.plot import check_plot

            check_plot(self.plot)
        return self


class PlanConfig(ReportConfig):
    """``ringfeed plan``: a corpus's lengths into steps of packs."""

    arguments: ClassVar[dict[str, str]] = {"corpora": "CORPUS...", "output": "-o PLAN"}
    alternatives = (
        frozenset({"corpora", "lengths"}),
        frozenset({"max_cp", "pad_multiple"}),
        frozenset({"mixture", "weights"}),
    )

    corpora: tuple[Path, ...] = Field((), description="corpus folders; document ids follow this order")
    lengths: Path | None = Field(None, description="a .npy file of 1-D integers, in place of corpora")
    output: Path = Field(description="the plan folder to make")
    pack_tokens: Count = Field(
        description="token slots in a pack, padding included: the most where packs vary"
    )
    packs_per_step: Count = Field(description="packs in one global batch")
    pack_shape: PackShape = Field(
        PackShape.FIXED, description="whether all packs have pack_tokens slots, or their own footprint's"
    )
    length_buckets: LengthBuckets = Field(
        LengthBuckets.NONE, description="the few lengths that variable packs are rounded up to"
    )
    mean_tokens: Count | None = Field(None, description="slots of a variable pack on average")
    piece_tokens: Count | None = Field(None, description="the longest piece in variable packs")
    work_budget: Count | None = Field(None, description="the most that a variable pack may cost")
    max_delay: Natural | None = Field(
        None, description="steps that a long document may wait for others like it"
    )
    max_cp: Count | None = Field(None, description="the largest cp; documents are padded to 2 * max_cp")
    pad_multiple: Count | None = Field(None, description="the multiple that documents are padded to")
    chunk_multiple: Count = Field(1, description="what pack_tokens must be a multiple of: cp * tp * unit")
    balance: Balance = Field(Balance.WORK, description="how packs are filled")
    window: Count = Field(16, description="steps of look-ahead")
    slate_size: Count | None = Field(None, description="packs in a slate: the dp it is meant for")
    schedule: Schedule | None = Field(None, description="how slates make steps, with balance=work")
    long_tokens: Count | None = Field(
        None, description="documents of so many tokens are moved over the whole window"
    )
    overflow: Overflow = Field(Overflow.SPLIT, description="what to do with a document longer than a pack")
    mixture: Path | None = Field(None, description="a YAML file of weights, schedules and a curriculum")
    weights: dict[str, Weight] = Field({}, description="a weight in tokens for each corpus, by name")
    seed: Natural | None = Field(None, description="shuffles the documents; without it, corpus order")
    epochs: Count = Field(1, description="how often every document is drawn")
    steps: Count | None = Field(None, description="where the plan ends at the latest")
    positions: Literal["restart", "continue"] = Field(
        "restart", description="positions of the later pieces of a split document"
    )
    boundary_label: Literal["next", "ignore"] = Field(
        "next", description="the last label of a piece whose document goes on"
    )
    unsupervised: Unsupervised = Field(
        Unsupervised.REFUSE, description="what to do with a step in which nothing is trained on"
    )
    cost_model: Text = Field("7b", description="what a document costs: 7b, 70b, tokens, or a model")
    block_steps: Count = Field(4096, description="steps in a block, the portion that can be read ahead")
    workers: Count = Field(1, description="threads that draw documents ahead")

    _options: PlanOptions = PrivateAttr()

    def to_options(self) -> PlanOptions:
        """Return what the planner takes, made once: files that it was read from may change meanwhile."""
        return self._options

    def _make_options(self) -> PlanOptions:
        """Return what the planner takes; it has the rules between fields."""
        own = {*ReportConfig.model_fields, "mixture", "weights", "block_steps", "cost_model"}
        given = {name: value for name, value in self if name not in own}
        return PlanOptions(
            **given,
            cost_model=cost_model_of(self.cost_model),
            mixture=self._mixture(),
            block_limits=BlockLimits(steps=self.block_steps),
        )

    def _mixture(self) -> Mixture | None:
        if self.mixture is not None and self.weights:
            raise ValueError(_TWO_WAYS)
        if self.mixture is not None:
            return read_mixture(self.mixture)
        if self.weights:
            return Mixture(sources=tuple(MixtureSource(name=n, weight=w) for n, w in self.weights.items()))
        return None

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._options = self._make_options()
        for dp_size in self.report_dp:
            num_micro_batches(packs_per_step=self.packs_per_step, dp_size=dp_size)
        return self


class ExtendConfig(ReportConfig):
    """``ringfeed extend``: a finished plan, made longer."""

    arguments: ClassVar[dict[str, str]] = {"plan": "PLAN"}
    alternatives = (frozenset({"mixture", "weights"}),)

    plan: Path = Field(description="the plan folder to make longer")
    output: Path | None = Field(None, description="the folder to make, by default in the plan's place")
    from_step: Count | None = Field(None, description="where to begin, at the block border below")
    epochs: Count | None = Field(
        None, description="how often every document is drawn, the plan's if not given"
    )
    steps: Count | None = Field(None, description="where the longer plan ends at the latest")
    mixture: Path | None = Field(None, description="a YAML file of weights, schedules and a curriculum")
    weights: dict[str, Weight] = Field({}, description="a weight for each corpus of the plan's mixture")
    corpora: tuple[Path, ...] = Field((), description="corpus folders, where the plan's own paths moved")
    cost_model: Text | None = Field(None, description="the plan's cost table, where it was made with one")
    workers: Count = Field(1, description="threads that draw documents ahead")

    _extension: Extension = PrivateAttr()

    def to_extension(self) -> Extension:
        """Return what the planner takes, made once: files that it was read from may change meanwhile."""
        return self._extension

    def _make_extension(self) -> Extension:
        """Return what the planner takes; it has the rules between fields and the plan."""
        from ringfeed.pipeline.planner.extend import Extension

        return Extension(
            plan=self.plan,
            output=self.output,
            from_step=self.from_step,
            epochs=self.epochs,
            steps=self.steps,
            mixture=None if self.mixture is None else read_mixture(self.mixture),
            weights=self.weights or None,
            corpora=self.corpora,
            cost_model=None if self.cost_model is None else cost_model_of(self.cost_model),
            workers=self.workers,
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mixture is not None and self.weights:
            raise ValueError(_TWO_WAYS)
        self._extension = self._make_extension()
        return self


class FitCostConfig(CommandConfig):
    """``ringfeed fit-cost``: a cost table from packs that were measured."""

    arguments: ClassVar[dict[str, str]] = {"samples": "SAMPLES.csv", "output": "-o TABLE.csv"}

    samples: Path = Field(description="a CSV file of lengths,milliseconds: one measured pack a line")
    output: Path = Field(description="the table to write, for plan --cost-model table:TABLE.csv")
    basis: Basis = Field(Basis.QUADRATIC, description="the shape of the curve")
    tolerance: Annotated[float, Field(gt=0, le=1)] = Field(
        0.5, description="the share of its time that a sample may lie off the curve"
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.output.resolve() == self.samples.resolve():
            raise ValueError(f"output={str(self.output)!r} is the file of samples; write the table elsewhere")
        return self
