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

PlanFolder = Annotated[Path | None, typer.Argument(metavar="PLAN", help="the plan folder")]
Cp = Annotated[int | None, number("context-parallel ranks")]
LayoutName = Annotated[
    str | None,
    typer.Option(metavar="L", help="te, head_tail, contiguous, whole_document, identity, magi or ptrr"),
]
LayoutOptions = Annotated[
    list[str] | None, typer.Option(metavar="KEY=VALUE", help="an option of the layout, e.g. threshold=512")
]
Tp = Annotated[int | None, number("tensor-parallel ranks  [default: 1]")]
Unit = Annotated[int | None, number("FP8 unit of the local length  [default: 1]")]
SlotBudget = Annotated[int | None, number("slots of a pack, where the plan's are too few")]
Skip = Annotated[Path | None, typer.Option(metavar="FILE", help="document ids to leave out, one a line")]
Corpora = Annotated[
    list[Path] | None, typer.Option(metavar="CORPUS", help="where the plan's corpora are now, in order")
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns 0 done, 1 failed or found faults, 2 a mistake of the user."""
    app = new_app()
    add_base_commands(app)
    for command in (shard, serve, convert, demo):
        app.command()(command)
    return run_app(app, argv)


def shard(
    plan: PlanFolder = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="SHARDS", help="the folder to make")
    ] = None,
    cp: Cp = None,
    layout: LayoutName = None,
    layout_option: LayoutOptions = None,
    tp: Tp = None,
    unit: Unit = None,
    slot_budget: SlotBudget = None,
    skip: Skip = None,
    corpus: Corpora = None,
    workers: Annotated[int | None, number("Ray workers  [default: one a CPU]")] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Write the views of all cp ranks ahead of training."""
    return _run("shard", locals())


def serve(
    plan: PlanFolder = None,
    cp: Cp = None,
    layout: LayoutName = None,
    layout_option: LayoutOptions = None,
    tp: Tp = None,
    unit: Unit = None,
    slot_budget: SlotBudget = None,
    skip: Skip = None,
    corpus: Corpora = None,
    host: Annotated[
        str | None, typer.Option(metavar="H", help="address to listen on  [default: 127.0.0.1]")
    ] = None,
    port: Annotated[int | None, number("the directory's port  [default: any]")] = None,
    public_host: Annotated[
        str | None, typer.Option(metavar="H", help="what ranks call this machine  [default: the host]")
    ] = None,
    token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="the token that ranks must bear")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(metavar="PEM", help="the servers' certificate")] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="PEM", help="its key")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(metavar="PEM", help="who signs ranks' certificates (mTLS)")
    ] = None,
    open: Annotated[
        bool | None, typer.Option("--open", help="let anyone who reaches the port read, without a token")
    ] = None,
    max_streams: Annotated[int | None, number("ranks that a feeder serves at once  [default: 256]")] = None,
    feeder_port: Annotated[int | None, number("port of every feeder  [default: any]")] = None,
    builders: Annotated[int | None, number("builders  [default: one a CPU]")] = None,
    block_bytes: Annotated[int | None, number("of a block of one rank  [default: 8 MB]")] = None,
    node_bytes: Annotated[int | None, number("memory for blocks on a node  [default: 2 GB]")] = None,
    metrics_port: Annotated[int | None, number("of a Ray that is started here  [default: any]")] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="the service's name on Ray  [default: feed]")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option(metavar="NS", help="the name's namespace  [default: ringfeed]")
    ] = None,
    plan_from: Annotated[
        Path | None, typer.Option(metavar="RUN.YAML", help="make PLAN meanwhile, as its section plan says")
    ] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Build the views of all ranks while they train, and send each its own."""
    return _run("serve", locals())


def convert(
    sources: Annotated[
        list[Path] | None, typer.Argument(metavar="SRC", help="files of packed rows, or folders")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="SHARDS", help="the folder to make")
    ] = None,
    cp: Cp = None,
    layout: LayoutName = None,
    layout_option: LayoutOptions = None,
    tp: Tp = None,
    unit: Unit = None,
    batch_rows: Annotated[int | None, number("rows in a global batch  [default: 1]")] = None,
    pack_tokens: Annotated[int | None, number("slots of every row  [default: the longest row's]")] = None,
    pad_id: Annotated[int | None, number("token of padding  [default: 0]")] = None,
    tokens_column: Annotated[
        str | None, typer.Option(metavar="C", help="token ids  [default: input_ids]")
    ] = None,
    lengths_column: Annotated[
        str | None, typer.Option(metavar="C", help="sequence lengths  [default: seq_lens]")
    ] = None,
    padded_lengths_column: Annotated[
        str | None,
        typer.Option(metavar="C", help="what each occupies  [default: seq_lens_padded if it is there]"),
    ] = None,
    labels_column: Annotated[
        str | None, typer.Option(metavar="C", help="shifted labels  [default: labels if it is there]")
    ] = None,
    workers: Annotated[int | None, number("Ray workers  [default: one a CPU]")] = None,
    config: ConfigFile = None,
    as_json: Json = False,
) -> int:
    """Write the views of rows that were packed before."""
    return _run("convert", locals())


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
