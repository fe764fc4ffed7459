"""What a waiting rank says, when, and when it gives up."""

import logging

import pytest

from ringfeed.pipeline.feed_stall import Patience, Stall, StallWatch, stall_text
from ringfeed.pipeline.ranks import RankPlace

STALL = Stall(
    seconds=31.4,
    step=37,
    what="micro-batch 2",
    place=RankPlace(dp_rank=1, dp_size=4, cp_rank=0, cp_size=2),
    asked="feeder grpc://10.0.0.7:8815, 3 tries",
    bytes_held={"this rank": 12_345_678, "a file": 512},
)


def test_the_text_names_step_rank_who_was_asked_and_who_holds_what():
    assert stall_text(STALL) == (
        "waited 31 s for step 37, micro-batch 2 (dp rank 1 of 4, cp rank 0 of 2); asked feeder "
        "grpc://10.0.0.7:8815, 3 tries; bytes held: this rank 12.3 MB, a file 512 B"
    )


class Clock:
    """A watch whose time the test sets."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr("ringfeed.pipeline.feed_stall.time.monotonic", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_it_speaks_after_a_while_and_again_when_the_time_has_doubled(clock, caplog):
    watch = StallWatch(Patience(warn_seconds=10, fail_seconds=1000), lambda _: STALL)
    spoken: list[int] = []
    with caplog.at_level(logging.WARNING, logger="ringfeed.feed"):
        for second in range(100):
            clock.now = 100.0 + second
            watch.check()
            spoken += [second] * (len(caplog.records) - len(spoken))

    assert spoken == [10, 20, 40, 80]
    assert stall_text(STALL) in caplog.text
    assert (watch.num_warnings, watch.seconds) == (4, 99.0)


def test_it_gives_up_in_the_end_and_says_why(clock):
    watch = StallWatch(Patience(warn_seconds=1000, fail_seconds=60), lambda _: STALL)
    clock.now += 59
    watch.check()
    clock.now += 2

    with pytest.raises(TimeoutError, match=r"waited 31 s for step 37.*gave up"):
        watch.check()


@pytest.mark.parametrize("name", ["warn_seconds", "fail_seconds", "poll_seconds"])
@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_patience_is_above_zero(name, value):
    with pytest.raises(ValueError, match=f"{name}=.* must be above 0"):
        Patience(**{name: value})
