"""Progress: plain lines for logs, a bar on a terminal, all with rate and time left."""

import io
import os
import pty

import pytest

from ringfeed.pipeline.progress import BarProgress, LineProgress, SilentProgress, open_progress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_lines_have_share_rate_and_time_left():
    clock, stream = Clock(), io.StringIO()
    progress = LineProgress(stream, clock=clock)
    progress.begin("ingest", total=10_000, unit="bytes")
    for clock.now in (1.0, 2.0, 8.0, 9.0):
        progress.advance(1000)
    clock.now = 20.0
    progress.advance(6000)
    progress.end()

    assert stream.getvalue().splitlines() == [
        "ingest: started, 10,000 bytes",
        "ingest: 3,000 of 10,000 bytes (30%), 375 bytes/s, 19 s left",
        "ingest: 10,000 of 10,000 bytes (100%), 500 bytes/s, 0 s left",
        "ingest: done, 10,000 bytes in 20.0 s (500 bytes/s)",
    ]


def test_a_task_that_ends_early_says_that_it_was_stopped():
    stream = io.StringIO()
    progress = LineProgress(stream, clock=Clock())
    progress.begin("plan", total=2, unit="windows")
    progress.advance()
    progress.end()
    progress.end()
    assert stream.getvalue().splitlines()[-1] == "plan: stopped, 1 windows in 0.0 s (0 windows/s)"
    assert len(stream.getvalue().splitlines()) == 2


def test_a_terminal_gets_a_bar_and_anything_else_lines():
    main, terminal = pty.openpty()
    with open(terminal, "w") as stream:  # noqa: PTH123
        progress = open_progress(stream=stream)
        assert isinstance(progress, BarProgress)
        progress.begin("shard", total=4, unit="steps")
        progress.advance(4)
        progress.log("[kept as it is]")
        progress.end()
        shown = os.read(main, 65536).decode()
    os.close(main)

    assert "shard" in shown
    assert "4 steps" in shown
    assert "[kept as it is]" in shown
    assert isinstance(open_progress(stream=io.StringIO()), LineProgress)


def test_style_may_be_named():
    assert isinstance(open_progress("none"), SilentProgress)
    assert isinstance(open_progress("lines"), LineProgress)
    with pytest.raises(ValueError, match="progress='loud': must be one of auto, bar, lines, none"):
        open_progress("loud")
