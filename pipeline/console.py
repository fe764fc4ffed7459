"""What a command says, and how it ends: results on standard output, one-line errors, exit codes.

In:   a typer app (``cli.py``) and the command line
Out:  an exit code: 0 done, 1 failed or found faults, 2 a mistake of the user, 130 interrupted

With ``--json`` the last line of standard output is one JSON object, also after an error.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import typer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ringfeed.pipeline.config import CommandConfig
    from ringfeed.pipeline.progress import Progress

__all__ = ["DONE", "FAILED", "INTERRUPTED", "MISTAKE", "Outcome", "run_app", "run_command"]

DONE: Final = 0
FAILED: Final = 1
MISTAKE: Final = 2
INTERRUPTED: Final = 130

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a command found out."""

    text: str
    """For a person; may have many lines."""
    facts: Mapping[str, Any]
    """JSON-able, for a program."""
    exit_code: int = DONE
    go_on: Callable[[], None] | None = None
    """What the command does after this is printed: it serves until it is told to stop."""


def run_app(app: typer.Typer, argv: Sequence[str] | None) -> int:
    """Run one command line and return its exit code. Mistakes become one line on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        code = typer.main.get_command(app).main(args=arguments, prog_name="ringfeed", standalone_mode=False)
    except typer.Exit as stop:
        code = stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        # Somebody closed our output, as `| head` does. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except Exception as error:
        told = _explain(error)
        if told is None:
            raise
        return _fail(arguments, *told)
    # typer turns a KeyboardInterrupt into this code, and says nothing.
    if code == INTERRUPTED:
        return _fail(arguments, "interrupted; run the same command again to go on", INTERRUPTED)
    return code if isinstance(code, int) else DONE


def run_command(
    name: str,
    body: Callable[[Any, Progress], Outcome],
    *,
    flags: Mapping[str, Any],
    config: Path | None,
    as_json: bool,
) -> int:
    """Check the config of command ``name``, run ``body`` with it, print what comes out.

    Args:
        name: the command, which is also its section of a config file.
        body: what the command does; takes its config and where to show progress.
        flags: config field to value, None where the user gave none.
        config: the file of ``--config``.
        as_json: print one JSON object in place of text.
    """
    from ringfeed.pipeline.config import SECTIONS
    from ringfeed.pipeline.config_file import load_config
    from ringfeed.pipeline.environment import read_environment
    from ringfeed.pipeline.progress import open_progress

    checked: CommandConfig = load_config(SECTIONS[name], flags=flags, file=config)
    progress = open_progress(read_environment().progress)
    try:
        outcome = body(checked, progress)
    finally:
        progress.end()
    typer.echo(json.dumps(outcome.facts) if as_json else outcome.text)
    if outcome.go_on is not None:
        outcome.go_on()
    return outcome.exit_code


def _explain(error: Exception) -> tuple[str, int] | None:
    """Return the line and the exit code of an error, None if it is a bug: that keeps its traceback."""
    # A mistake in the command line must not cost the import of what the command would have used.
    if isinstance(error, typer.TyperException):
        return f"{error.format_message()} (see --help)", MISTAKE
    from ringfeed.pipeline.executor import JobFailedError
    from ringfeed.pipeline.manifest import CorruptDataError

    if isinstance(error, ValueError):
        return str(error), FAILED if isinstance(error, CorruptDataError) else MISTAKE
    if isinstance(error, OSError):
        return _explain_os_error(error), FAILED
    if isinstance(error, MemoryError | ImportError | JobFailedError):
        return str(error) or type(error).__name__, FAILED
    return None


def _explain_os_error(error: OSError) -> str:
    reason = f"{error.strerror or error}" + (f": {error.filename}" if error.filename else "")
    if error.errno in _DISK_FULL:
        return f"{reason}; make room and run the same command again: it goes on where it was"
    return reason


def _fail(arguments: list[str], reason: str, code: int) -> int:
    line = " ".join(reason.split())
    command = next((word for word in arguments if not word.startswith("-")), "")
    typer.echo(f"ringfeed {command}: {line}" if command else f"ringfeed: {line}", err=True)
    if "--json" in arguments:
        typer.echo(json.dumps({"error": line, "exit_code": code}))
    return code
