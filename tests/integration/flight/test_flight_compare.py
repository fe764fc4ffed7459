"""Ranks that share packs compare them through the directory: one that follows other packs stops."""

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from ringfeed.pipeline.digest_check import RankMismatchError
from ringfeed.pipeline.digest_report import DigestReport
from ringfeed.pipeline.flight_link import flight_location
from ringfeed.pipeline.flight_wire import COMPARE
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.skip import read_skip_list
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.block_builder import BlockBuilder, PlanOpener
from ringfeed.workers.digest_table import DigestTable
from ringfeed.workers.flight_options import ServerOptions


def drain(loader):
    """Hand out batches; wait for each comparison, which is no part of handing out."""
    count = 0
    for _ in loader:
        count += 1
        if loader._check._asking is not None:
            loader._check._asking.join(20)
    return count


def test_ranks_of_one_service_agree(serve, load):
    server = serve()
    for rank in range(2):
        with load(server.url, cp=(rank, 2)) as loader:
            assert drain(loader) > 8
            assert loader._check.num_checks == 1


def test_ranks_of_services_with_other_skip_lists_do_not(serve, load, plan, tmp_path):
    (tmp_path / "skip.txt").write_text("3\n77\n")
    spec = open_spec(Plan.open(plan), OpenOptions(layout=make_layout("te"), cp_size=2), pad_id=5)
    overlay = read_skip_list(tmp_path / "skip.txt", num_documents=180)
    table = DigestTable()
    one = serve(compare=table.compare_json)
    other = serve(
        supply=BlockBuilder(PlanOpener(plan=plan, spec=spec, overlay=overlay)), compare=table.compare_json
    )
    with load(one.url) as first, load(other.url, cp=(1, 2)) as second:
        digest = f"{next(iter(first)).info.step_digest:016x}"
        first._check._asking.join(20)
        with pytest.raises(RankMismatchError, match=rf"step 0 .*cp rank 1 of 2 .*but cp rank 0 .*{digest}"):
            drain(second)
        # Who is not asked is not stopped.
        assert drain(first) > 0


def test_a_rank_of_another_dp_is_not_compared(serve, load):
    server = serve()
    for dp in ((0, 2), (1, 2), (0, 4)):
        with load(server.url, dp=dp) as loader:
            assert drain(loader)


@pytest.mark.parametrize("body", [b"", b"{}", b"x" * 5000, b'{"dp_rank": 1}'])
def test_what_is_no_report_is_refused(serve, load, body):
    server = serve()
    with (
        fl.FlightClient(flight_location(server.url)) as client,
        pytest.raises(pa.ArrowException, match="digest report"),
    ):
        list(client.do_action(fl.Action(COMPARE, pa.py_buffer(body))))
    with load(server.url) as loader:
        assert drain(loader)


def test_a_stranger_without_the_token_compares_nothing(serve):
    server = serve(ServerOptions(token="t0ken-t0ken-t0ken"))  # noqa: S106
    report = DigestReport.of(RankPlace(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1), step=0, digest=1)
    with (
        fl.FlightClient(flight_location(server.url)) as client,
        pytest.raises(fl.FlightUnauthenticatedError),
    ):
        list(client.do_action(fl.Action(COMPARE, pa.py_buffer(report.to_json()))))
