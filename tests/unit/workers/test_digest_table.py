"""The first word on a step stands; others are held to it; what nobody asks about goes."""

import pytest

from ringfeed.pipeline.digest_report import DigestReport
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.workers.digest_table import DigestTable


def report(step=0, digest=1, *, cp_rank=0, dp=(0, 2), packs_per_chunk=1):
    place = RankPlace(
        dp_rank=dp[0], dp_size=dp[1], cp_rank=cp_rank, cp_size=4, packs_per_chunk=packs_per_chunk
    )
    return DigestReport.of(place, step=step, digest=digest)


def test_ranks_that_agree_hear_nothing():
    table = DigestTable()

    assert [table.compare(report(5, cp_rank=rank)) for rank in range(4)] == [None] * 4
    assert table.compare_json(report(5, cp_rank=1).to_json()) is None


def test_a_rank_that_contradicts_hears_whom():
    table = DigestTable()
    table.compare(report(5, 1))
    other = table.compare_json(report(5, 2, cp_rank=3).to_json())

    assert other is not None
    assert DigestReport.from_json(other) == report(5, 1)
    # Who spoke first is not changed by it.
    assert table.compare(report(5, 1, cp_rank=1)) is None


@pytest.mark.parametrize(
    "change", [{"step": 6}, {"dp": (1, 2)}, {"dp": (0, 4)}, {"packs_per_chunk": 2}], ids=str
)
def test_who_has_other_packs_is_not_compared(change):
    table = DigestTable()
    table.compare(report(5, 1))

    assert table.compare(report(**{"step": 5, "digest": 2, **change})) is None


def test_what_was_not_asked_about_for_longest_goes_first():
    table = DigestTable(most_reports=2)
    for step in (0, 1, 0, 2):
        table.compare(report(step, 1))

    assert table.compare(report(0, 9)) is not None
    assert table.compare(report(1, 9)) is None


def test_a_table_of_nothing_is_refused():
    with pytest.raises(ValueError, match="most_reports=0"):
        DigestTable(most_reports=0)
