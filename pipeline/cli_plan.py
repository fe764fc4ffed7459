"""The commands around planning: plan, extend, fit-cost. Parse, then call one function.

In:   the command line
Out:  what ``commands.py`` does with it

Values are checked in ``plan_config.py``, so that flags and config files meet the same rules.
"""

# ruff: noqa: PLR0913, PLR0917, FBT002  (typer reads a command's flags from its parameters)

import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from ringfeed.pipeline.choices import (
    Balance,
    Basis,
    LengthBuckets,
    Overflow,
    PackShape,
    Schedule,
    Unsupervised,
)
from ringfeed.pipeline.cli_options import (
    ConfigFile,
    Json,
    Plot,
    Report,
    ReportCostModel,
    ReportDp,
    choice,
    number,
    run_named,
)

__all__ = ["extend", "fit_cost", "plan"]


def _weights_option() -> Any:
    """Return a typer option for ``NAME=NUMBER,...``; numbers are checked in ``plan_config.py``."""

    def parse(typed: str) -> dict[str, float]:
        weights: dict[str, float] = {}
        for part in typed.split(","):
            name, _, value = part.rpartition("=")
            try:
                number = float(value)
            except ValueError:
                name = ""
            if not name or name in weights:
                raise typer.BadParameter(f"{typed!r} is not made of NAME=NUMBER, each name once")
            weights[name] = number
        return weights

    return typer.Option(metavar="NAME=W,...", help="or: a weight for each corpus", parser=parse)


def plan(
    corpora: Annotated[
        list[Path] | None, typer.Argument(metavar="CORPUS", help="corpora, in the order of document ids")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="PLAN", help="the folder to make")
    ] = None,
    pack_tokens: Annotated[int | None, number("token slots in a pack, padding included")] = None,
    packs_per_step: Annotated[int | None, number("packs in a global batch")] = None,
    pack_shape: Annotated[
        str | None,
        choice("do all packs have one length?  [default: fixed]", PackShape),
    ] = None,
    length_buckets: Annotated[
        str | None,
        choice("few lengths for variable packs  [default: none]", LengthBuckets),
    ] = None,
    mean_tokens: Annotated[
        int | None, number("slots of a variable pack on average  [default: 7/8 of pack-tokens]")
    ] = None,
    piece_tokens: Annotated[
        int | None, number("longest piece in variable packs  [default: pack-tokens]")
    ] = None,
    work_budget: Annotated[int | None, number("most that a variable pack may cost  [default: any]")] = None,
    max_delay: Annotated[
        int | None, number("steps that a long document may wait  [default: window - 1]")
    ] = None,
    max_cp: Annotated[int | None, number("largest cp: documents are padded to 2 * N")] = None,
    pad_multiple: Annotated[int | None, number("or: the multiple documents are padded to")] = None,
    chunk_multiple: Annotated[
        int | None, number("refuse packs that cp, tp and FP8 could not share out  [default: 1]")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="FILE.npy", help="plan these lengths, without a corpus")
    ] = None,
    balance: Annotated[str | None, choice("[default: work]", Balance)] = None,
    window: Annotated[int | None, number("steps of look-ahead  [default: 16]", metavar="W")] = None,
    slate_size: Annotated[int | None, number("the dp meant  [default: packs-per-step]")] = None,
    schedule: Annotated[
        str | None,
        choice("how slates make steps  [default: spread]", Schedule),
    ] = None,
    long_tokens: Annotated[
        int | None, number("documents that are moved over the window  [default: a 16th of a pack]")
    ] = None,
    overflow: Annotated[
        str | None,
        choice("documents longer than a pack  [default: split]", Overflow),
    ] = None,
    mixture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="weights, schedule and curriculum of the corpora")
    ] = None,
    weights: Annotated[dict[str, float] | None, _weights_option()] = None,
    seed: Annotated[int | None, number("shuffle  [default: corpus order]", metavar="S")] = None,
    epochs: Annotated[
        int | None, number("how often each document is drawn  [default: 1]", metavar="E")
    ] = None,
    steps: Annotated[int | None, number("where the plan ends at the latest")] = None,
    positions: Annotated[
        str | None,
        typer.Option(metavar="restart|continue", help="in later pieces of a document  [default: restart]"),
    ] = None,
    boundary_label: Annotated[
        str | None,
        typer.Option(metavar="next|ignore", help="last label of a piece that goes on  [default: next]"),
    ] = None,
    unsupervised: Annotated[
        str | None,
        choice("a step with nothing to train on  [default: refuse]", Unsupervised),
    ] = None,
    cost_model: Annotated[
        str | None, typer.Option(metavar="7b|70b|tokens|MODEL", help="cost of a document  [default: 7b]")
    ] = None,
    extend: Annotated[
        Path | None, typer.Option(metavar="PLAN", help="make this plan longer, as the command extend does")
    ] = None,
    from_step: Annotated[int | None, number("with --extend: where to begin")] = None,
    block_steps: Annotated[int | None, number("steps in a block  [default: 4096]")] = None,
    workers: Annotated[int | None, number("threads that draw ahead  [default: 1]")] = None,
    report: Report = None,
    report_dp: ReportDp = None,
    report_cost_model: ReportCostModel = None,
    plot: Plot = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Decide which pieces of documents form which pack."""
    given = {name: value for name, value in locals().items() if name not in ("extend", "from_step")}
    if extend is not None:
        return run_named("extend", _extension(extend, {**given, "from_step": from_step}))
    if from_step is not None:
        raise typer.BadParameter("--from-step says where an extension begins; pass --extend PLAN")
    return run_named("plan", given)


def extend(
    plan: Annotated[Path | None, typer.Argument(metavar="PLAN", help="a finished plan")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="NEW", help="[default: in the plan's place]")
    ] = None,
    from_step: Annotated[
        int | None, number("begin at the block border below, not where the plan was flushed")
    ] = None,
    epochs: Annotated[
        int | None, number("how often each document is drawn  [default: the plan's]", metavar="E")
    ] = None,
    steps: Annotated[int | None, number("where the longer plan ends at the latest")] = None,
    mixture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="another mixture, from there on")
    ] = None,
    weights: Annotated[dict[str, float] | None, _weights_option()] = None,
    corpora: Annotated[
        list[Path] | None, typer.Option("--corpora", metavar="CORPUS", help="where the corpora are now")
    ] = None,
    cost_model: Annotated[
        str | None, typer.Option(metavar="FILE", help="the cost table that the plan was made with")
    ] = None,
    workers: Annotated[int | None, number("threads that draw ahead  [default: 1]")] = None,
    report: Report = None,
    report_dp: ReportDp = None,
    report_cost_model: ReportCostModel = None,
    plot: Plot = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Go on with a finished plan: more epochs or steps, or other weights."""
    return run_named("extend", locals())


def fit_cost(
    samples: Annotated[
        Path | None,
        typer.Argument(metavar="SAMPLES.csv", help="lengths,milliseconds: a measured pack a line"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="TABLE.csv", help="the table to write")
    ] = None,
    basis: Annotated[str | None, choice("[default: quadratic]", Basis)] = None,
    tolerance: Annotated[
        float | None, typer.Option(metavar="SHARE", help="a sample may be so far off  [default: 0.5]")
    ] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Fit what documents cost to packs that were measured."""
    return run_named("fit-cost", locals())


def _extension(plan: Path, given: dict[str, Any]) -> dict[str, Any]:
    """Return the flags of ``plan --extend`` as those of ``extend``."""
    taken = set(inspect.signature(extend).parameters) - {"plan"}
    other = [name for name, value in given.items() if name not in taken and value not in (None, [])]
    if other:
        flags = ", ".join("--" + name.replace("_", "-") for name in other)
        raise typer.BadParameter(
            f"{flags}: an extension keeps this as the plan has it; what may change is --epochs, --steps, "
            "--mixture, --weights"
        )
    return {"plan": plan, **{name: value for name, value in given.items() if name in taken}}
