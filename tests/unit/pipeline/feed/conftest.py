"""A small real run of two corpora, and what a service of it would say."""

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.feed_facts import FeedFacts
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_source import PlanSource
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.block_builder import BlockBuilder

PAD = 9


@pytest.fixture(scope="session")
def corpora_paths(tmp_path_factory):
    """90 documents of 5 to 96 tokens in two corpora: some are split over packs of 64."""
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 1000, length) for length in rng.integers(5, 97, 90)]
    folder = tmp_path_factory.mktemp("corpora")
    for name, part in (("prose", documents[:60]), ("code", documents[60:])):
        write_corpus(folder / name, part, name=name, pad_id=PAD)
    return [folder / "prose", folder / "code"]


@pytest.fixture(scope="session")
def make_plan(corpora_paths, tmp_path_factory):
    """Return a function that plans the corpora with some options changed."""

    def plan_with(**changes):
        settings = {"pack_tokens": 64, "packs_per_step": 4, "max_cp": 2, "balance": "best_fit", "window": 2}
        output = tmp_path_factory.mktemp("plan") / "plan"
        run_plan(PlanOptions(output=output, corpora=corpora_paths, **{**settings, **changes}))
        return Plan.open(output)

    return plan_with


@pytest.fixture(scope="session")
def plan(make_plan):
    return make_plan()


@pytest.fixture(scope="session")
def open_source():
    """Return a function that opens a plan as a source."""
    opened = []

    def open_with(plan, *, layout="te", cp_size=2, overlay=None, **options):
        corpora = plan.open_corpora()
        asked = OpenOptions(layout=make_layout(layout), cp_size=cp_size, **options)
        source = PlanSource(
            plan, corpora, spec=open_spec(plan, asked, pad_id=corpora.pad_id), overlay=overlay
        )
        opened.append(source)
        return source

    yield open_with
    for source in opened:
        source.close()


@pytest.fixture(scope="session")
def make_builder(open_source, plan):
    """Return a function that makes a builder over the plan, or over another source."""

    def make(made_from=None, *, block_bytes=2048, keep_bytes=1 << 20, **options):
        def opened():
            return open_source(plan, **options)

        return BlockBuilder(made_from or opened, block_bytes=block_bytes, keep_bytes=keep_bytes)

    return make


@pytest.fixture(scope="session")
def facts(plan, open_source):
    return FeedFacts.of_source(open_source(plan), block_bytes=4096)
