"""The commands that need no Ray: ingest, verify, inspect, and those of ``cli_plan.py``. Parse, then call.

In:   the command line
Out:  what ``commands.py`` does with it; ``console.py`` prints and turns errors into exit codes

Only typer is imported here: ``ringfeed --help`` must not wait for numpy, Arrow or torch. Values are
checked in ``config.py``, so that flags and config files meet the same rules.
"""

# ruff: noqa: PLR0913, PLR0917, FBT002  (typer reads a command's flags from its parameters)

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ringfeed.pipeline.choices import EncodingErrors
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
from ringfeed.pipeline.cli_plan import extend, fit_cost, plan
from ringfeed.pipeline.console import run_app

__all__ = ["add_base_commands", "main", "new_app"]


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
    """Add the commands that need no Ray to ``app``."""
    for command in (ingest, plan, extend, fit_cost, verify, inspect):
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
    lengths_column: Annotated[
        str | None,
        typer.Option(metavar="C", help="rows packed before: column of sequence lengths; labels are shifted"),
    ] = None,
    padded_lengths_column: Annotated[
        str | None, typer.Option(metavar="C", help="beside it, the tokens that each sequence occupies")
    ] = None,
    pad_id: Annotated[int | None, number("pad token of a tokens column  [default: 0]")] = None,
    name: Annotated[
        str | None, typer.Option(metavar="N", help="name of the corpus  [default: its folder's]")
    ] = None,
    encoding_errors: Annotated[
        str | None, choice("text that is not UTF-8  [default: fail]", EncodingErrors)
    ] = None,
    glob: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="names to read in folders, such as *.py")
    ] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Read text, JSONL, Parquet or Arrow into a corpus."""
    return run_named("ingest", locals())


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
    return run_named("verify", locals())


def inspect(
    path: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="a corpus, plan or shards folder")
    ] = None,
    step: Annotated[int | None, number("also show this step, pack by pack")] = None,
    report: Report = None,
    report_dp: ReportDp = None,
    report_cost_model: ReportCostModel = None,
    plot: Plot = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Show what a folder holds."""
    return run_named("inspect", locals())
