"""Files of packed rows into pre-sharded THD views, in one go: ingest, plan with the rows as they are, shard.

In:   ``ConvertConfig`` (``pipeline/config.py``): files with ``input_ids`` and ``seq_lens``, cp size, layout
Out:  a shards folder that ``Loader`` reads; beside it ``<output>.rows`` with the corpus and the plan

Each of the three steps goes on where a killed run was, and is left alone when it is done.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np

from ringfeed.pipeline.config import ShardConfig
from ringfeed.pipeline.corpus import Corpus
from ringfeed.pipeline.ingest import run_ingest
from ringfeed.pipeline.ingest_options import IngestOptions
from ringfeed.pipeline.planner.options import Balance, Overflow, PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.sources.column_names import column_names
from ringfeed.pipeline.sources.inputs import InputError, list_inputs
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.shard_job import run_shard

if TYPE_CHECKING:
    from pathlib import Path

    from ringfeed.pipeline.config import ConvertConfig
    from ringfeed.pipeline.progress import Progress
    from ringfeed.sharding.layouts import Layout
    from ringfeed.workers.shard_job import ShardReport

__all__ = ["ConvertReport", "rows_folder", "run_convert"]

_ROWS_SUFFIX = ".rows"


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertReport:
    """What there is now."""

    shards: ShardReport
    rows: Path
    """The folder with corpus and plan."""
    num_rows: int
    pack_tokens: int
    """T of every pack."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON-able values."""
        own = {"rows": str(self.rows), "num_rows": self.num_rows, "pack_tokens": self.pack_tokens}
        return {**self.shards.to_json(), **own}


def rows_folder(output: Path) -> Path:
    """Return where corpus and plan of a converted ``output`` are."""
    return output.with_name(output.name + _ROWS_SUFFIX)


def run_convert(config: ConvertConfig, *, progress: Progress) -> ConvertReport:
    """Convert files of rows; go on from a killed run, do nothing if all is there.

    Raises:
        ValueError: if files, columns, layout and sizes do not fit together, or the output was made from
            something else.
        CorruptDataError: if what an earlier run made is damaged.
        JobFailedError: if Ray cannot be reached, or workers die too often.
        OSError: if the disk is full; what is finished stays for the next run.
    """
    layout = make_layout(config.layout, **config.layout_options)
    rows = rows_folder(config.output)
    run_ingest(_ingest_options(config, rows / "corpus"), progress=progress)
    corpus = Corpus.open(rows / "corpus")
    pack_tokens = config.pack_tokens or _longest_row(corpus, layout, config)
    plan = _plan_options(config, rows, layout=layout, pack_tokens=pack_tokens)
    run_plan(plan, progress=progress)
    shards = run_shard(_shard_config(config, rows / "plan"), progress=progress)
    return ConvertReport(
        shards=shards, rows=rows, num_rows=len(corpus.row_starts()) - 1, pack_tokens=pack_tokens
    )


def _plan_options(config: ConvertConfig, rows: Path, *, layout: Layout, pack_tokens: int) -> PlanOptions:
    """Return what makes a pack of each row."""
    return PlanOptions(
        corpora=(rows / "corpus",),
        output=rows / "plan",
        pack_tokens=pack_tokens,
        packs_per_step=config.batch_rows,
        pad_multiple=layout.length_multiple(config.cp),
        balance=Balance.GIVEN,
        overflow=Overflow.ERROR,
    )


def _shard_config(config: ConvertConfig, plan: Path) -> ShardConfig:
    return ShardConfig(
        plan=plan,
        output=config.output,
        cp=config.cp,
        layout=config.layout,
        layout_options=config.layout_options,
        tp=config.tp,
        unit=config.unit,
        slot_budget=None,
        skip=None,
        corpus=(),
        workers=config.workers,
    )


def _ingest_options(config: ConvertConfig, output: Path) -> IngestOptions:
    """Return what reads the rows: columns that have no name of their own are looked for in the first file."""
    inputs = list_inputs(config.sources)
    there = column_names(inputs[0])
    for field, name in (("tokens_column", config.tokens_column), ("lengths_column", config.lengths_column)):
        if name not in there:
            raise InputError(
                f"{inputs[0].path} has no column {name!r} (it has {', '.join(there) or 'none'}); name the "
                f"one that it has with --{field.replace('_', '-')}"
            )
    return IngestOptions(
        sources=config.sources,
        output=output,
        tokens_column=config.tokens_column,
        lengths_column=config.lengths_column,
        padded_lengths_column=config.padded_lengths_column or _if_there("seq_lens_padded", there),
        labels_column=config.labels_column or _if_there("labels", there),
        pad_id=config.pad_id,
        name=config.output.name,
    )


def _if_there(name: str, names: list[str]) -> str | None:
    return name if name in names else None


def _longest_row(corpus: Corpus, layout: Layout, config: ConvertConfig) -> int:
    """Return the slots of the longest row, rounded up to what the ranks can share."""
    slots = layout.slot_lengths(corpus.lengths, cp_size=config.cp)
    starts = corpus.row_starts()
    longest = int(np.diff(np.concatenate([[0], np.cumsum(slots)])[starts]).max())
    split = lcm(
        layout.chunk_multiple(cp_size=config.cp, tp_size=config.tp, unit=config.unit),
        layout.length_multiple(config.cp),
    )
    return -(-longest // split) * split
