"""Comparing through a service: what is compared when, what stops a rank, and that nothing else does."""

import threading
import time
from dataclasses import replace
from typing import Any

import pytest

from ringfeed.pipeline.batch import BatchInfo
from ringfeed.pipeline.digest_check import RankMismatchError
from ringfeed.pipeline.digest_report import MAX_REPORT_BYTES, DigestReport
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.service_check import ServiceCheck
from ringfeed.workers.digest_table import DigestTable

PLACE = RankPlace(dp_rank=1, dp_size=2, cp_rank=0, cp_size=2)
REPORT = DigestReport.of(PLACE, step=3, digest=255)
INFO = BatchInfo(
    step=0,
    micro_batch=0,
    num_micro_batches=1,
    num_documents=0,
    documents=(),
    digest=0,
    step_digest=7,
    local_supervised=0,
    global_supervised=1,
    supervised_by_source={},
    cp_rank=0,
    cp_size=2,
    dp_rank=1,
    dp_size=2,
    layout="te",
    max_seqlen=1,
    max_seqlen_padded=1,
)


class Comparer:
    """A table that keeps what it was told, and may be slow or away."""

    def __init__(self, table=None):
        self.table = table or DigestTable()
        self.seen: list[int] = []
        self.error: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()

    def compare(self, report):
        self.gate.wait(20)
        self.seen.append(report.step)
        if self.error is not None:
            raise self.error
        return self.table.compare(report)


def see(check, step, digest=7):
    check.see(replace(INFO, step=step, step_digest=digest))
    answered(check)


def answered(check):
    if check._asking is not None:
        check._asking.join(10)


def test_the_first_batch_and_multiples_are_compared():
    comparer = Comparer()
    check = ServiceCheck(comparer, PLACE, every=4)
    for step in range(2, 14):
        see(check, step)
    check.restart()
    see(check, 6)
    see(check, 7)

    # Wherever a rank starts, it compares at the steps where the others do.
    assert comparer.seen == [2, 4, 8, 12, 6]
    assert check.num_checks == 5


def test_a_rank_with_other_packs_stops_at_its_next_batch_with_both_digests():
    table = DigestTable()
    see(ServiceCheck(Comparer(table), replace(PLACE, cp_rank=1)), 5, digest=0xAB)
    check = ServiceCheck(Comparer(table), PLACE)
    see(check, 5, digest=0xCD)

    text = r"step 5 .*cp rank 0 of 2 .*00cd, but cp rank 1 of 2 .*00ab: .* start all ranks with the same"
    for _ in range(2):
        with pytest.raises(RankMismatchError, match=text):
            see(check, 6)
    check.restart()
    see(check, 6)


def test_a_slow_service_holds_nobody_up():
    comparer = Comparer()
    comparer.gate.clear()
    check = ServiceCheck(comparer, PLACE, every=1)
    began = time.monotonic()
    for step in range(20):
        check.see(replace(INFO, step=step))
    assert time.monotonic() - began < 5
    comparer.gate.set()
    answered(check)

    assert comparer.seen == [0]


@pytest.mark.parametrize("error", [ConnectionError("gone"), ValueError("no action 'compare'")])
def test_a_service_that_does_not_compare_stops_nobody(error):
    comparer = Comparer()
    comparer.error = error
    check = ServiceCheck(comparer, PLACE, every=1)
    see(check, 0)
    see(check, 1)

    assert (comparer.seen, check.num_checks) == ([0, 1], 0)


def test_a_report_comes_back_as_it_was():
    assert DigestReport.from_json(REPORT.to_json()) == REPORT
    assert len(REPORT.to_json()) < MAX_REPORT_BYTES


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"digest": "xyz"}, "16 hex digits"),
        ({"digest": 7}, "16 hex digits"),
        ({"step": -1}, "step=-1"),
        ({"step": True}, "step=True"),
        ({"dp_rank": "0"}, "dp_rank='0'"),
        ({"who": "a\nb"}, "no who"),
        ({"who": "x" * 201}, "no who"),
        ({"more": 1}, "fields"),
    ],
)
def test_a_report_from_nowhere_is_refused(change, told):
    import json

    values: dict[str, Any] = {**json.loads(REPORT.to_json()), **change}
    with pytest.raises(ValueError, match=told):
        DigestReport.from_json(json.dumps(values).encode())


def test_too_long_a_report_is_not_parsed():
    with pytest.raises(ValueError, match="at most 1024 are read"):
        DigestReport.from_json(b"{" + b" " * 2000 + b"}")


def test_every_nothing_is_refused():
    with pytest.raises(ValueError, match="every=0 must be at least 1"):
        ServiceCheck(Comparer(), PLACE, every=0)
