"""The commands that need no Ray: ingest, plan, fit-cost, verify, inspect. Parse, then call one function.

In:   the command line
Out:  what ``commands.py`` does with it; ``console.py`` prints and turns errors into exit codes

Only typer is imported here: ``ringfeed --help`` must not wait for numpy, Arrow or torch. Values are
checked in ``config.py``, so that flags and config files meet the same rules.
"""

# ruff: noqa: PLR0913, PLR0917, FBT002  (typer reads a command's flags from its parameters)

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ringfeed.pipeline.console import run_app, run_command

__all__ = ["ConfigFile", "Json", "add_base_commands", "main", "new_app", "number"]


def number(explanation: str, *, metavar: str = "N") -> Any:
    """Return a typer option for an integer, whose error shows what was typed."""

    def parse(typed: str) -> int:
        try:
            return int(typed)
        except ValueError:
            raise typer.BadParameter(f"{typed!r} is not an integer") from None

    return typer.Option(metavar=metavar, help=explanation, parser=parse)


def weights_option() -> Any:
    """Return a typer option for ``NAME=NUMBER,...``; numbers are checked in ``config.py``."""

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


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="RUN.YAML", help="read what no flag gives from this file"),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one base command. The installed ``ringfeed`` is ``ringfeed.workers.cli``, which has more."""
    app = new_app()
    add_base_commands(app)
    return run_app(app, argv)


def new_app() -> typer.Typer:
    """Return an app without commands."""
    app = typer.Typer(
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        help="Feed context-parallel training: pack documents, decide which rank holds which token, "
        "and deliver only that.",
    )
    app.callback()(_global_options)
    return app


def add_base_commands(app: typer.Typer) -> None:
    """Add the commands of this module to ``app``."""
    for command in (ingest, plan, fit_cost, verify, inspect):
        app.command(command.__name__.replace("_", "-"))(command)


def _show_version(wanted: bool) -> None:  # noqa: FBT001
    if wanted:
        from importlib.metadata import version

        print(version("ringfeed"))
        raise typer.Exit


def _global_options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="print the version")
    ] = False,
) -> None:
    del version


def ingest(
    sources: Annotated[
        list[Path] | None, typer.Argument(metavar="SRC", help="files, or folders read recursively")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="CORPUS", help="the folder to make")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(metavar="bytes|FILE", help="bytes, or a tokenizer.json  [default: bytes]")
    ] = None,
    text_column: Annotated[str | None, typer.Option(metavar="C", help="column that holds text")] = None,
    tokens_column: Annotated[
        str | None, typer.Option(metavar="C", help="column that holds lists of token ids")
    ] = None,
    mask_column: Annotated[
        str | None, typer.Option(metavar="C", help="column with a 0 or 1 per token: 1 is trained on")
    ] = None,
    labels_column: Annotated[
        str | None, typer.Option(metavar="C", help="or: column of labels, not shifted, -100 left out")
    ] = None,
    pad_id: Annotated[int | None, number("pad token of a tokens column  [default: 0]")] = None,
    name: Annotated[
        str | None, typer.Option(metavar="N", help="name of the corpus  [default: its folder's]")
    ] = None,
    encoding_errors: Annotated[
        str | None, typer.Option(metavar="fail|skip|bytes", help="text that is not UTF-8  [default: fail]")
    ] = None,
    glob: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="names to read in folders, such as *.py")
    ] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Read text, JSONL, Parquet or Arrow into a corpus."""
    return _run("ingest", locals())


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
        typer.Option(metavar="fixed|variable", help="do all packs have one length?  [default: fixed]"),
    ] = None,
    length_buckets: Annotated[
        str | None,
        typer.Option(metavar="none|powers_of_two", help="few lengths for variable packs  [default: none]"),
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
    balance: Annotated[
        str | None, typer.Option(metavar="work|best_fit|in_order|concat", help="[default: work]")
    ] = None,
    window: Annotated[
        int | None, number("steps that are packed together  [default: 16]", metavar="W")
    ] = None,
    slate_size: Annotated[int | None, number("the dp meant  [default: packs-per-step]")] = None,
    overflow: Annotated[
        str | None,
        typer.Option(
            metavar="split|truncate|drop|error", help="documents longer than a pack  [default: split]"
        ),
    ] = None,
    mixture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="weights, schedule and curriculum of the corpora")
    ] = None,
    weights: Annotated[dict[str, float] | None, weights_option()] = None,
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
        typer.Option(metavar="refuse|redraw", help="a step with nothing to train on  [default: refuse]"),
    ] = None,
    cost_model: Annotated[
        str | None, typer.Option(metavar="7b|70b|tokens|MODEL", help="cost of a document  [default: 7b]")
    ] = None,
    block_steps: Annotated[int | None, number("steps in a block  [default: 4096]")] = None,
    workers: Annotated[int | None, number("threads that draw ahead  [default: 1]")] = None,
    report: Annotated[bool | None, typer.Option("--report", help="measure fill and balance")] = None,
    report_dp: Annotated[str | None, typer.Option(metavar="N,N", help="measure these dp sizes, too")] = None,
    report_cost_model: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="measure by this cost model, too")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="draw the plan")] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Decide which pieces of documents form which pack."""
    return _run("plan", locals())


def fit_cost(
    samples: Annotated[
        Path | None,
        typer.Argument(metavar="SAMPLES.csv", help="lengths,milliseconds: a measured pack a line"),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="TABLE.csv", help="the table to write")
    ] = None,
    basis: Annotated[
        str | None, typer.Option(metavar="quadratic|piecewise", help="[default: quadratic]")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(metavar="SHARE", help="a sample may be so far off  [default: 0.5]")
    ] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Fit what documents cost to packs that were measured."""
    return _run("fit-cost", locals())


def verify(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="a corpus, plan or shards folder")
    ] = None,
    workers: Annotated[int | None, number("threads that read  [default: one a CPU]")] = None,
    quarantine: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write damaged documents, for --skip")
    ] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Check that nothing is damaged, lost or doubled."""
    return _run("verify", locals())


def inspect(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="a corpus, plan or shards folder")
    ] = None,
    step: Annotated[int | None, number("also show this step, pack by pack")] = None,
    report: Annotated[bool | None, typer.Option("--report", help="measure a plan")] = None,
    report_dp: Annotated[str | None, typer.Option(metavar="N,N", help="measure these dp sizes, too")] = None,
    report_cost_model: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="measure by this cost model, too")
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE.png", help="draw the plan")] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Show what a folder holds."""
    return _run("inspect", locals())


def _run(name: str, parameters: dict[str, Any]) -> int:
    from ringfeed.pipeline import commands

    flags = {key: value for key, value in parameters.items() if key not in ("config", "as_json")}
    return run_command(
        name,
        getattr(commands, name.replace("-", "_")),
        flags=flags,
        config=parameters["config"],
        as_json=parameters["as_json"],
    )
