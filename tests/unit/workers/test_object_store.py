"""URLs and what is refused before any Ray is there; the transport itself is in tests/ray."""

from pathlib import Path

import pytest

from ringfeed.pipeline.block_fetcher import FeedQuestion, TlsFiles
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.transports import open_fetcher
from ringfeed.workers.object_store import split_url

PLACE = RankPlace(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1)


def question(**options):
    return FeedQuestion(place=PLACE, columns=BLOCK_COLUMNS, **options)


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("ray-actor://ringfeed/feed", ("ringfeed", "feed")),
        ("Ray-Actor://My_Space.2/Run-7/", ("My_Space.2", "Run-7")),
    ],
)
def test_a_url_names_namespace_and_actor_as_they_are_written(url, parts):
    assert split_url(url) == parts


@pytest.mark.parametrize(
    "url",
    [
        "ray-actor://feed",
        "ray-actor:///feed",
        "ray-actor://a/b/c",
        "ray-actor://a b/c",
        "ray-actor://a/",
        "ray-actor://host:10001/feed",
    ],
)
def test_another_form_is_refused_with_the_right_one(url):
    with pytest.raises(ValueError, match=r"is no ray-actor://NAMESPACE/NAME"):
        open_fetcher(url, question())


@pytest.mark.parametrize("secret", [{"token": "abc"}, {"tls": TlsFiles(ca=Path(__file__))}])
def test_tokens_and_certificates_of_flight_are_refused(secret):
    with pytest.raises(ValueError, match=r"Ray has a token of its own \(RAY_AUTH_MODE\); leave them out"):
        open_fetcher("ray-actor://ringfeed/feed", question(**secret))


def test_without_a_ray_it_says_where_it_looked_and_what_to_do(monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:9")

    with pytest.raises(ConnectionError, match=r"joined at RAY_ADDRESS='127\.0\.0\.1:9': .* over flight://"):
        open_fetcher("ray-actor://ringfeed/feed", question())
