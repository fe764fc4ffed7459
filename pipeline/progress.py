"""Show how far a long command is, always on standard error.

In:   ``begin`` / ``advance`` / ``log`` calls from a job (``ingest.py``, ``planner/``, the shard job)
Out:  a bar with rate and time left on a terminal, a plain line every few seconds elsewhere

Jobs take a ``Progress`` and know nothing of terminals. Standard output stays free for results.
"""

import sys
import time
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

__all__ = ["BarProgress", "LineProgress", "Progress", "SilentProgress", "open_progress"]

SECONDS_BETWEEN_LINES = 5.0


class Progress(Protocol):
    """What a long job tells about itself. One task at a time."""

    def begin(self, task: str, *, total: int | None, unit: str) -> None:
        """Start ``task``, which counts ``unit``; ``total`` is None where the end is not known."""
        ...

    def advance(self, amount: int = 1) -> None:
        """Say that ``amount`` more units are done."""
        ...

    def log(self, message: str) -> None:
        """Print one line that stays."""
        ...

    def end(self) -> None:
        """Finish the task; harmless when none was begun."""
        ...


class SilentProgress:
    """Shows nothing: for callers that are not a person."""

    def begin(self, task: str, *, total: int | None, unit: str) -> None:
        pass

    def advance(self, amount: int = 1) -> None:
        pass

    def log(self, message: str) -> None:
        pass

    def end(self) -> None:
        pass


class LineProgress:
    """Plain lines for log files: one at the start, every few seconds, and at the end."""

    def __init__(self, stream: TextIO, *, clock: "Callable[[], float]" = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._task = ""
        self._unit = ""
        self._total: int | None = None
        self._done = 0
        self._started = 0.0
        self._printed = 0.0

    def begin(self, task: str, *, total: int | None, unit: str) -> None:
        self._task, self._unit, self._total, self._done = task, unit, total, 0
        self._started = self._printed = self._clock()
        self.log(f"{task}: started" if total is None else f"{task}: started, {total:,} {unit}")

    def advance(self, amount: int = 1) -> None:
        self._done += amount
        now = self._clock()
        if now - self._printed >= SECONDS_BETWEEN_LINES:
            self._printed = now
            self.log(f"{self._task}: {self._how_far(now - self._started)}")

    def log(self, message: str) -> None:
        print(message, file=self._stream, flush=True)

    def end(self) -> None:
        if self._task:
            elapsed = self._clock() - self._started
            rate = self._done / elapsed if elapsed > 0 else 0.0
            # After an error the same call ends the task.
            verb = "done" if self._total is None or self._done >= self._total else "stopped"
            self.log(
                f"{self._task}: {verb}, {self._done:,} {self._unit} "
                f"in {elapsed:.1f} s ({rate:,.0f} {self._unit}/s)"
            )
            self._task = ""

    def _how_far(self, elapsed: float) -> str:
        rate = self._done / elapsed if elapsed > 0 else 0.0
        if self._total is None or rate == 0:
            return f"{self._done:,} {self._unit}, {rate:,.0f} {self._unit}/s"
        left = max(0.0, (self._total - self._done) / rate)
        share = self._done / max(1, self._total)
        return (
            f"{self._done:,} of {self._total:,} {self._unit} ({share:.0%}), "
            f"{rate:,.0f} {self._unit}/s, {left:.0f} s left"
        )


class BarProgress:
    """A rich bar with rate and time left, for a terminal."""

    def __init__(self, stream: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=stream)
        self._bar: RichProgress | None = None
        self._row: TaskID | None = None

    def begin(self, task: str, *, total: int | None, unit: str) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self.end()
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f} " + unit),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._row = self._bar.add_task(task, total=total, rate="")
        self._bar.start()

    def advance(self, amount: int = 1) -> None:
        if self._bar is None or self._row is None:
            return
        self._bar.advance(self._row, amount)
        speed = self._bar.tasks[0].speed
        if speed:
            self._bar.update(self._row, rate=f"{speed:,.0f}/s")

    def log(self, message: str) -> None:
        self._console.print(message, markup=False, highlight=False)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def open_progress(style: str = "auto", stream: TextIO | None = None) -> Progress:
    """Return the progress that fits ``stream`` (standard error by default).

    Args:
        style: ``auto`` (a bar on a terminal, lines elsewhere), ``bar``, ``lines`` or ``none``.
        stream: where to show it.

    Raises:
        ValueError: for another ``style``.
    """
    target = sys.stderr if stream is None else stream
    if style == "auto":
        style = "bar" if target.isatty() else "lines"
    if style == "bar":
        return BarProgress(target)
    if style == "lines":
        return LineProgress(target)
    if style == "none":
        return SilentProgress()
    raise ValueError(f"progress={style!r}: must be one of auto, bar, lines, none")
