"""What commands share: flags with one meaning everywhere, and how a command is run.

In:   parameters that typer parsed (``cli.py``, ``cli_plan.py``)
Out:  an exit code (``console.py``)
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ringfeed.pipeline.console import run_command

__all__ = [
    "ConfigFile",
    "Json",
    "Plot",
    "Report",
    "ReportCostModel",
    "ReportDp",
    "choice",
    "number",
    "run_named",
]


def choice(explanation: str, words: type[StrEnum]) -> Any:
    """Return a typer option for one of ``words``, which its help lists; configs check what was typed."""
    return typer.Option(metavar="|".join(words), help=explanation)


def number(explanation: str, *, metavar: str = "N") -> Any:
    """Return a typer option for an integer, whose error shows what was typed."""

    def parse(typed: str) -> int:
        try:
            return int(typed)
        except ValueError:
            raise typer.BadParameter(f"{typed!r} is not an integer") from None

    return typer.Option(metavar=metavar, help=explanation, parser=parse)


ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", metavar="RUN.YAML", help="read what no flag gives from this file"),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object as the last line")]
Report = Annotated[bool | None, typer.Option("--report", help="measure a plan beside what is possible")]
ReportDp = Annotated[str | None, typer.Option(metavar="N,N", help="measure these dp sizes, too")]
ReportCostModel = Annotated[
    list[str] | None, typer.Option(metavar="MODEL", help="measure by this cost model, too")
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE.png", help="draw the plan")]


def run_named(name: str, parameters: Mapping[str, Any]) -> int:
    """Run what ``commands.py`` has for ``name``, with what the command line gave."""
    from ringfeed.pipeline import commands

    flags = {key: value for key, value in parameters.items() if key not in ("config", "as_json")}
    return run_command(
        name,
        getattr(commands, name.replace("-", "_")),
        flags=flags,
        config=parameters["config"],
        as_json=parameters["as_json"],
    )
