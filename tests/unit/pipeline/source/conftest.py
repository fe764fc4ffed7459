"""A small corpus, its plan, and shards cut from it."""

from pathlib import Path

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_source import PlanSource
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.shard_writer import (
    ShardTask,
    num_folders,
    shards_made_from,
    shards_manifest,
    write_steps,
)
from ringfeed.pipeline.staging import StagedFolder
from ringfeed.pipeline.store import SHARDS_FORMAT
from ringfeed.sharding.layouts import make_layout

PAD = 9


@pytest.fixture(scope="session")
def documents():
    """30 documents of 5 to 96 tokens, so that some are split over packs of 64."""
    rng = np.random.default_rng(0)
    return [rng.integers(0, 1000, length) for length in rng.integers(5, 97, 30)]


@pytest.fixture(scope="session")
def corpus_path(tmp_path_factory, documents):
    path = tmp_path_factory.mktemp("run") / "corpus"
    write_corpus(path, documents, name="small", pad_id=PAD, token_file_bytes=2048)
    return path


@pytest.fixture(scope="session")
def make_plan(corpus_path, tmp_path_factory):
    """Return a function that plans the corpus with some options changed."""

    def plan_with(**changes):
        settings = {"pack_tokens": 64, "packs_per_step": 4, "max_cp": 2, "balance": "best_fit", "window": 2}
        output = tmp_path_factory.mktemp("plan") / "plan"
        run_plan(PlanOptions(output=output, corpora=[corpus_path], **{**settings, **changes}))
        return Plan.open(output)

    return plan_with


@pytest.fixture(scope="session")
def plan(make_plan):
    return make_plan()


@pytest.fixture
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


def write_shards(plan: Plan, folder: Path, *, cp_size: int = 2, layout: str = "te", overlay=None) -> Path:
    corpora = plan.open_corpora()
    asked = OpenOptions(layout=make_layout(layout), cp_size=cp_size)
    spec = open_spec(plan, asked, pad_id=corpora.pad_id)
    task = ShardTask(
        plan=plan.path,
        folder=folder.with_name(folder.name + ".partial"),
        spec=spec,
        steps_per_folder=2,
        overlay=overlay,
    )
    with StagedFolder.open(folder, format=SHARDS_FORMAT, made_from=shards_made_from(plan, task)) as staged:
        indices = range(num_folders(plan, steps_per_folder=2))
        entries = [entry for index in indices for entry in write_steps(task, index)]
        staged.publish(shards_manifest(plan, task, entries))
    return folder


@pytest.fixture
def make_shards(tmp_path):
    """Return a function that writes shards of a plan into a fresh folder."""

    def make(plan, name="shards", **options):
        return write_shards(plan, tmp_path / name, **options)

    return make
