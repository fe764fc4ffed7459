"""URLs: a transport is found wherever it is installed, gets what it needs, and serves a Loader."""

import importlib
import inspect
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from ringfeed.pipeline.block_fetcher import FeedQuestion
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.transports import GROUP, OWN_TRANSPORTS, open_fetcher, scheme_of

QUESTION = FeedQuestion(
    place=RankPlace(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1), columns=("pieces", "input_ids", "labels")
)
ROOT = Path(__file__).parents[4]
TRANSPORT = """
from ringfeed.pipeline.local_fetcher import LocalFetcher

supplies, questions = {}, []


def open_fetcher(url, question):
    questions.append(question)
    return LocalFetcher(supplies[url])
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A real distribution with a transport for ``test-feed://``, as pip would leave it; its module."""
    (tmp_path / "some_transport.py").write_text(TRANSPORT)
    metadata = tmp_path / "some_transport-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-transport\nVersion: 1.0\n")
    entries = "test-feed = some_transport:open_fetcher\nflight = some_transport:open_fetcher\n"
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{entries}")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield importlib.import_module("some_transport")
    sys.modules.pop("some_transport", QUESTION)


def test_a_loader_finds_an_installed_transport_by_its_scheme(installed, make_builder, plan, tmp_path):
    installed.supplies["test-feed://here:1"] = make_builder()
    ca = tmp_path / "ca.pem"
    ca.write_text("")
    place: dict[str, Any] = {"dp_rank": 0, "dp_size": 2, "cp_rank": 1, "cp_size": 2}
    secured: dict[str, Any] = {"token": "abc", "tls": ca}
    with Loader("test-feed://here:1", columns=["labels"], **place, **secured) as loader:
        digests = [batch.info.digest for batch in loader]

    expected = [batch.info.digest for batch in Loader(plan.path, layout="te", **place)]
    assert digests == expected
    question = installed.questions[0]
    assert question.columns == ("pieces", "labels")
    assert (question.place.cp_rank, question.token, question.tls.ca) == (1, "abc", ca)


def test_an_unknown_scheme_is_refused_with_those_there_are(installed):
    with pytest.raises(
        ValueError, match=r"no transport for smoke:// is installed \(installed: .*test-feed://"
    ):
        open_fetcher("smoke://a", QUESTION)


@pytest.mark.parametrize(
    ("source", "scheme"),
    [
        ("flight://h:1", "flight"),
        ("GRPC+tls://h", "grpc+tls"),
        ("/a/b", None),
        ("a:b", None),
        ("./x://y", None),
    ],
)
def test_a_scheme_is_what_comes_before_the_slashes(source, scheme):
    assert scheme_of(source) == scheme


def test_the_installed_entry_points_are_the_own_transports_and_open_fetchers():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

    assert project["entry-points"][GROUP] == OWN_TRANSPORTS
    for scheme, target in OWN_TRANSPORTS.items():
        opener = EntryPoint(scheme, target, GROUP).load()
        assert list(inspect.signature(opener).parameters) == ["url", "question"]


def test_another_distribution_does_not_take_over_an_own_scheme(installed, monkeypatch):
    """Whoever installs a package must not get every rank's token for the asking."""
    own = "ringfeed.pipeline.local_fetcher:LocalFetcher"
    monkeypatch.setitem(OWN_TRANSPORTS, "flight", own)

    with pytest.raises(TypeError, match="LocalFetcher"):
        open_fetcher("flight://here:1", QUESTION)
    assert not installed.questions
