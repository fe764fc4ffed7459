"""What every rank was given, whatever order its blocks got ready in."""

from ringfeed.pipeline.rank_progress import RankProgress

A, B = (0, 0), (0, 1)


def test_the_slowest_rank_decides():
    progress = RankProgress([A, B], under_way=3)
    progress.given(A, 0, 4)
    assert progress.past == 0
    progress.given(B, 0, 2)
    assert progress.past == 2
    assert progress.slowest == B
    progress.given(B, 2, 9)
    assert progress.past == 4


def test_a_block_that_is_ready_early_does_not_count_before_those_between():
    progress = RankProgress([A], under_way=3)
    progress.given(A, 4, 6)
    progress.given(A, 2, 4)
    assert progress.past == 0
    progress.given(A, 0, 2)
    assert progress.past == 6


def test_a_block_that_is_given_again_takes_nothing_back():
    progress = RankProgress([A], under_way=3)
    progress.given(A, 0, 4)
    progress.given(A, 1, 3)
    assert progress.past == 4


def test_a_rank_that_goes_on_elsewhere_is_followed():
    progress = RankProgress([A], under_way=3)
    for first in range(10, 14):
        progress.given(A, first, first + 1)
        assert progress.past == 0
    progress.given(A, 14, 15)
    assert progress.past == 15


def test_the_last_blocks_of_each_rank_have_not_arrived():
    progress = RankProgress([A, B], under_way=2)
    for first in range(4):
        progress.given(A, first, first + 1)
        progress.given(B, first, first + 1)
    assert (progress.past, progress.arrived) == (4, 2)
    progress.given(A, 4, 5)
    assert progress.arrived == 2
    progress.given(B, 4, 5)
    assert progress.arrived == 3


def test_a_block_that_is_asked_for_again_has_not_arrived():
    progress = RankProgress([A], under_way=1)
    progress.given(A, 0, 3)
    progress.given(A, 3, 6)
    progress.given(A, 0, 3)
    assert (progress.past, progress.arrived) == (6, 0)
