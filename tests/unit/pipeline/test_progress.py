"""Progress: plain lines for logs, a bar for terminals, nothing for programs."""

import io

import pytest

from ringfeed.pipeline.environment import read_environment
from ringfeed.pipeline.progress import BarProgress, LineProgress, SilentProgress, open_progress


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def progress(stream, clock):
    return LineProgress(stream, clock=clock)


def lines(stream):
    return stream.getvalue().splitlines()


def test_lines_come_every_few_seconds_with_rate_and_time_left(progress, stream, clock):
    progress.begin("plan", total=1000, unit="documents")
    for clock.now in (1.0, 2.0, 6.0):
        progress.advance(100)
    assert lines(stream) == [
        "plan: started, 1,000 documents",
        "plan: 300 of 1,000 documents (30%), 50 documents/s, 14 s left",
    ]


def test_an_unknown_end_has_no_time_left(progress, stream, clock):
    progress.begin("read", total=None, unit="rows")
    clock.now = 10.0
    progress.advance(50)
    assert lines(stream)[-1] == "read: 50 rows, 5 rows/s"


def test_the_last_line_says_how_it_ended(progress, stream, clock):
    progress.begin("plan", total=10, unit="steps")
    clock.now = 2.0
    progress.advance(10)
    progress.end()
    progress.end()
    progress.begin("plan", total=10, unit="steps")
    progress.advance(3)
    progress.end()
    assert lines(stream)[1] == "plan: done, 10 steps in 2.0 s (5 steps/s)"
    assert lines(stream)[-1].startswith("plan: stopped, 3 steps")
    assert len(lines(stream)) == 4


def test_a_bar_survives_every_call_in_any_order(stream):
    bar = BarProgress(stream)
    bar.advance()
    bar.end()
    bar.log("[not markup]")
    bar.begin("a", total=3, unit="x")
    bar.advance(2)
    bar.begin("b", total=None, unit="y")
    bar.advance()
    bar.end()
    assert "[not markup]" in stream.getvalue()


def test_a_stream_that_is_no_terminal_gets_lines(stream):
    assert isinstance(open_progress("auto", stream), LineProgress)
    assert isinstance(open_progress("bar", stream), BarProgress)
    assert isinstance(open_progress("none", stream), SilentProgress)
    with pytest.raises(ValueError, match="progress='dots': must be one of auto, bar, lines, none"):
        open_progress("dots", stream)


def test_the_environment_chooses(monkeypatch):
    monkeypatch.setenv("RINGFEED_PROGRESS", "lines")
    assert read_environment().progress == "lines"
    monkeypatch.setenv("RINGFEED_PROGRESS", "loud")
    with pytest.raises(ValueError, match="RINGFEED_PROGRESS='loud'"):
        read_environment()
