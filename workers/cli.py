"""The ``ringfeed`` command: the base commands, and those that need Ray or several processes.

In:   the command line
Out:  an exit code (``ringfeed.pipeline.console``)

Ray and torch are imported by the command that needs them, when it runs.
"""

# ruff: noqa: PLR0913, PLR0917, FBT002  (typer reads a command's flags from its parameters)

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ringfeed.pipeline.cli import add_base_commands, new_app
from ringfeed.pipeline.cli_options import ConfigFile, Json, number
from ringfeed.pipeline.console import run_app, run_command

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns 0 done, 1 failed or found faults, 2 a mistake of the user."""
    app = new_app()
    add_base_commands(app)
    for command in (shard, demo):
        app.command()(command)
    return run_app(app, argv)


def shard(
    plan: Annotated[Path | None, typer.Argument(metavar="PLAN", help="the plan folder")] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="SHARDS", help="the folder to make")
    ] = None,
    cp: Annotated[int | None, number("context-parallel ranks")] = None,
    layout: Annotated[
        str | None,
        typer.Option(metavar="L", help="te, head_tail, contiguous, whole_document, identity, magi or ptrr"),
    ] = None,
    layout_option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="an option of the layout, e.g. threshold=512"),
    ] = None,
    tp: Annotated[int | None, number("tensor-parallel ranks  [default: 1]")] = None,
    unit: Annotated[int | None, number("FP8 unit of the local length  [default: 1]")] = None,
    slot_budget: Annotated[int | None, number("slots of a pack, where the plan's are too few")] = None,
    skip: Annotated[
        Path | None, typer.Option(metavar="FILE", help="document ids to leave out, one a line")
    ] = None,
    corpus: Annotated[
        list[Path] | None, typer.Option(metavar="CORPUS", help="where the plan's corpora are now, in order")
    ] = None,
    workers: Annotated[int | None, number("Ray workers  [default: one a CPU]")] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Write the views of all cp ranks ahead of training."""
    return _run("shard", locals())


def demo(
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="DIR", help="keep the files here")
    ] = None,
    steps: Annotated[int | None, number("training steps  [default: 20]")] = None,
    workers: Annotated[int | None, number("Ray workers  [default: one a CPU]")] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Run the whole line on real text, and check it."""
    return _run("demo", locals())


def _run(name: str, parameters: dict[str, Any]) -> int:
    from ringfeed.workers import commands

    flags = {key: value for key, value in parameters.items() if key not in ("config", "as_json")}
    if "layout_option" in flags:
        flags["layout_options"] = commands.parse_options(flags.pop("layout_option"))
    return run_command(
        name,
        getattr(commands, name),
        flags=flags,
        config=parameters["config"],
        as_json=parameters["as_json"],
    )


if __name__ == "__main__":
    sys.exit(main())
