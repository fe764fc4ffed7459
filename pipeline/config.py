"""What a user may set, one model per command: the single source of the rules.

In:   flags (``cli.py``) and one section of a YAML file (``config_file.py``)
Out:  a frozen, checked model, or one line with field, value, rule and way out

Every field is both a flag (``pack_tokens`` is ``--pack-tokens``) and a key of its section. Flags win
over the file. Rules that need data (does this layout fit this plan?) live where the data is.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (pydantic needs it at run time)
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from ringfeed.pipeline.ingest_options import IngestOptions
from ringfeed.pipeline.mixture_config import Weight, read_mixture
from ringfeed.pipeline.pack_lengths import LengthBuckets, PackShape
from ringfeed.pipeline.planner.cost import cost_model_of
from ringfeed.pipeline.planner.cost_fit import Basis
from ringfeed.pipeline.planner.mixture import Mixture, MixtureSource
from ringfeed.pipeline.planner.options import Balance, BlockLimits, Overflow, PlanOptions, Unsupervised
from ringfeed.pipeline.ranks import num_micro_batches
from ringfeed.pipeline.sources.encoding import EncodingErrors

__all__ = [
    "SECTIONS",
    "CommandConfig",
    "DemoConfig",
    "FitCostConfig",
    "IngestConfig",
    "InspectConfig",
    "PlanConfig",
    "ReportConfig",
    "ShardConfig",
    "VerifyConfig",
]

# Strict: pydantic would turn true into 1 and "8" into 8, and hide a slip of the pen.
Count = Annotated[int, Field(strict=True, ge=1)]
Natural = Annotated[int, Field(strict=True, ge=0)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1)]


class CommandConfig(BaseModel):
    """Base of the models: nothing unknown gets in, nothing changes later."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    arguments: ClassVar[dict[str, str]] = {}
    """Fields that are not ``--flags`` on the command line, as the user types them."""
    alternatives: ClassVar[tuple[frozenset[str], ...]] = ()
    """Groups of fields of which one is given: a flag replaces the whole group of the file."""

    @classmethod
    def on_command_line(cls, field: str) -> str:
        """Return how a user gives ``field`` on the command line."""
        return cls.arguments.get(field, "--" + field.replace("_", "-"))


class IngestConfig(CommandConfig):
    """``ringfeed ingest``: text or token columns into a corpus."""

    arguments = {"sources": "SRC...", "output": "-o CORPUS"}
    alternatives = (
        frozenset({"text_column", "tokens_column"}),
        frozenset({"mask_column", "labels_column"}),
    )

    sources: Annotated[tuple[Path, ...], Field(min_length=1)] = Field(
        description="files, or folders that are read recursively"
    )
    output: Path = Field(description="the corpus folder to make")
    tokenizer: Text = Field("bytes", description="'bytes', or a tokenizer.json of Hugging Face tokenizers")
    text_column: Text | None = Field(None, description="the column that holds the text")
    tokens_column: Text | None = Field(None, description="the column that holds lists of token ids")
    mask_column: Text | None = Field(None, description="the column with a flag per token: is it trained on?")
    labels_column: Text | None = Field(None, description="or: a label per token, -100 or the token itself")
    pad_id: Natural | None = Field(None, description="the pad token of a tokens column, 0 if not given")
    name: Text | None = Field(None, description="the corpus's name, by default its folder's")
    encoding_errors: EncodingErrors = Field(
        EncodingErrors.FAIL, description="what to do with text that is not UTF-8"
    )

    glob: Text | None = Field(None, description="names of files to read in folders, such as *.py")

    def to_options(self) -> IngestOptions:
        """Return what the ingest takes; it has the rules between fields."""
        return IngestOptions(**dict(self))

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.to_options()
        if self.tokens_column is not None and "tokenizer" in self.model_fields_set:
            raise ValueError(
                f"tokenizer={self.tokenizer!r} has nothing to do: tokens_column={self.tokens_column!r} "
                "holds token ids already; leave one of the two out"
            )
        return self


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

    arguments = {"corpora": "CORPUS...", "output": "-o PLAN"}
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
    window: Count = Field(16, description="steps that are packed together")
    slate_size: Count | None = Field(None, description="packs in a slate: the dp it is meant for")
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

    def to_options(self) -> PlanOptions:
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
            raise ValueError("mixture and weights say the same thing in two ways; give one of the two")
        if self.mixture is not None:
            return read_mixture(self.mixture)
        if self.weights:
            return Mixture(sources=tuple(MixtureSource(name=n, weight=w) for n, w in self.weights.items()))
        return None

    @model_validator(mode="after")
    def _check(self) -> Self:
        options = self.to_options()
        for dp_size in self.report_dp:
            num_micro_batches(packs_per_step=options.packs_per_step, dp_size=dp_size)
        return self


class FitCostConfig(CommandConfig):
    """``ringfeed fit-cost``: a cost table from packs that were measured."""

    arguments = {"samples": "SAMPLES.csv", "output": "-o TABLE.csv"}

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


class ShardConfig(CommandConfig):
    """``ringfeed shard``: the views of all cp ranks, written ahead of training."""

    arguments = {"plan": "PLAN", "output": "-o SHARDS"}

    plan: Path = Field(description="the plan folder to shard")
    output: Path = Field(description="the shards folder to make")
    cp: Count = Field(description="context-parallel ranks that share a pack")
    layout: Text = Field(description="which rank holds which token")
    layout_options: dict[str, Any] = Field({}, description="options of the layout, such as threshold=512")
    tp: Count = Field(1, description="tensor-parallel ranks (sequence parallel) that share a view")
    unit: Count = Field(1, description="FP8 unit of the local length")
    slot_budget: Count | None = Field(None, description="slots of a pack, where the plan's are too few")
    skip: Path | None = Field(None, description="a text file of document ids to leave out")
    corpus: tuple[Path, ...] = Field((), description="corpus folders, where the plan's own paths moved")
    workers: Count | None = Field(None, description="ranges of steps in work at once, by default one a CPU")


class VerifyConfig(CommandConfig):
    """``ringfeed verify``: find every fault of a corpus, plan or shards folder."""

    arguments = {"path": "PATH"}

    path: Path = Field(description="the corpus, plan or shards folder to check")
    workers: Count | None = Field(None, description="threads that read files, by default one a CPU")
    quarantine: Path | None = Field(None, description="a skip list to write, of documents that are damaged")


class InspectConfig(ReportConfig):
    """``ringfeed inspect``: what a folder holds, as text."""

    arguments = {"path": "PATH"}

    path: Path = Field(description="the corpus, plan or shards folder to look into")
    step: Natural | None = Field(None, description="also show this step, pack by pack")


class DemoConfig(CommandConfig):
    """``ringfeed demo``: the whole line on the standard library's sources."""

    output: Path | None = Field(None, description="where to keep the files; by default they are deleted")
    steps: Count = Field(20, description="training steps of each of the two runs")
    workers: Count | None = Field(None, description="CPUs that the local Ray may use")


SECTIONS: dict[str, type[CommandConfig]] = {
    "ingest": IngestConfig,
    "plan": PlanConfig,
    "fit-cost": FitCostConfig,
    "shard": ShardConfig,
    "verify": VerifyConfig,
    "inspect": InspectConfig,
    "demo": DemoConfig,
}
"""Sections of a config file, which are the commands."""
