"""The demo's verdict, and how it is told."""

import json
import math

import pytest

from ringfeed.workers.demo_report import DemoReport, Stage, render


def report(*, sharded=(5.5, 5.0), unsharded=(5.5, 5.00001), ranks_agree=True) -> DemoReport:
    return DemoReport(
        documents=1758,
        skipped_empty=28,
        skipped_encoding=4,
        tokens=31_000_000,
        packs=3872,
        fill=0.9948,
        slot_padding=1234,
        tail_padding=56_789,
        rank_bytes_per_step=205_000,
        full_bytes_per_step=819_200,
        stages=(Stage(name="ingest", tokens=31_000_000, seconds=2.0), Stage(name="x", tokens=0, seconds=0.0)),
        sharded_losses=sharded,
        unsharded_losses=unsharded,
        ranks_agree=ranks_agree,
        seconds=123.4,
        kept_in=None,
    )


def test_a_small_difference_passes():
    assert report().max_difference == pytest.approx(1e-5)
    assert report().passed


@pytest.mark.parametrize(
    "losses",
    [(5.5, 5.0002), (5.5,), (), (5.5, math.nan), (math.inf, 5.0)],
    ids=["too-far", "one-missing", "none", "nan", "inf"],
)
def test_these_losses_do_not_pass(losses):
    assert not report(sharded=losses).passed
    assert not report(unsharded=losses).passed


def test_nan_in_both_runs_does_not_pass():
    assert not report(sharded=(math.nan,), unsharded=(math.nan,)).passed


def test_ranks_that_disagree_do_not_pass():
    failed = report(ranks_agree=False)

    assert not failed.passed
    assert "disagree among themselves" in render(failed)


def test_no_difference_at_all_is_json_without_infinity():
    facts = json.loads(json.dumps(report(sharded=()).to_json(), allow_nan=False))

    assert facts["max_difference"] is None
    assert facts["passed"] is False


def test_the_text_has_the_figures():
    text = render(report())

    for figure in (
        "1,758 documents",
        "28 empty files and 4 that are not UTF-8",
        "fill 99.48%, padding 0.52%",
        "205,000 a rank of 819,200 in the full batch (25.0%)",
        "15,500,000",
        "5.000010",
        "are equal: largest difference 1.0e-05",
    ):
        assert figure in text


def test_a_failure_is_called_one():
    assert "are NOT EQUAL: largest difference 5.0e-01" in render(report(sharded=(5.5, 4.5)))


def test_not_a_number_can_be_shown():
    assert "nan" in render(report(unsharded=(math.nan, math.nan)))
