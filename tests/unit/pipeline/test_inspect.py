"""inspect says what a folder holds, and shows a step as it is."""

import shutil
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.ingest import run_ingest
from ringfeed.pipeline.ingest_options import IngestOptions
from ringfeed.pipeline.inspect import describe
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.progress import SilentProgress
from ringfeed.pipeline.ranks import assign_packs
from ringfeed.pipeline.shard_writer import ShardTask, shards_made_from, shards_manifest, write_steps
from ringfeed.pipeline.staging import StagedFolder
from ringfeed.pipeline.store import SHARDS_FORMAT, FileStore
from ringfeed.sharding.layouts import make_layout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("inspected")
    (root / "text").mkdir()
    for i in range(12):
        (root / "text" / f"{i:02d}.txt").write_text(f"text {i} " * (i + 1))
    run_ingest(IngestOptions(sources=(root / "text",), output=root / "corpus"), progress=SilentProgress())
    options: dict[str, Any] = {"pack_tokens": 96, "packs_per_step": 4, "max_cp": 2, "slate_size": 2}
    run_plan(PlanOptions(corpora=(root / "corpus",), output=root / "plan", **options))
    shard(root)
    return root


def shard(root):
    plan = Plan.open(root / "plan")
    options = OpenOptions(layout=make_layout("te"), cp_size=2)
    task = ShardTask(
        plan=root / "plan",
        folder=root / "shards",
        spec=open_spec(plan, options, pad_id=258),
        steps_per_folder=100,
    )
    made_from = shards_made_from(plan, task)
    with StagedFolder.open(root / "shards", format=SHARDS_FORMAT, made_from=made_from) as staged:
        files = write_steps(ShardTask(**{**fields(task), "folder": staged.path}), 0)
        manifest = shards_manifest(plan, task, files)
        manifest.facts["plan_path"] = "../plan"
        staged.publish(manifest)


def fields(task):
    return {name: getattr(task, name) for name in ("plan", "spec", "steps_per_folder")}


def test_a_corpus_is_described_by_its_lengths_and_tokenizer(made):
    found = describe(made / "corpus")
    assert found.facts["num_documents"] == 12
    assert found.facts["longest"][0] == {"document": 11, "tokens": len("text 11 " * 12) + 2}
    assert found.facts["tokenizer"]["kind"] == "bytes"
    assert "num_documents           12" in found.text


def test_a_plan_is_described_by_recipe_and_report(made):
    found = describe(made / "plan")
    assert found.facts["recipe"]["pack_tokens"] == 96
    assert "pack_tokens             96" in found.text
    assert "step" not in found.facts


def test_a_step_shows_its_pieces_with_their_text(made):
    step = describe(made / "plan", step=0).facts["step"]
    packs = Plan.open(made / "plan").step_packs(0)
    for k, pack in enumerate(step["packs"]):
        pieces = packs.pack(k)
        assert [piece["document"] for piece in pack["pieces"]] == pieces.documents.tolist()
        assert pack["fill"] == pieces.lengths.sum() / 96
        for piece in pack["pieces"]:
            if piece["start"] == 0:
                assert piece["text"].startswith(f"text {piece['document']} ")


def test_a_step_shows_the_ranks_that_a_loader_would_use(made):
    packs = Plan.open(made / "plan").step_packs(0)
    table = assign_packs(packs.costs, packs.slates, packs_per_step=4, slate_size=2, dp_size=2)
    for pack in describe(made / "plan", step=0).facts["step"]["packs"]:
        assert table[pack["micro_batch"], pack["dp_rank"], 0] == pack["pack"]


def test_shards_show_the_runs_of_every_rank(made):
    found = describe(made / "shards", step=1)
    store = FileStore.open(made / "shards")
    for pack in found.facts["step"]["packs"]:
        runs = np.array([run for rank in pack["runs"] for run in rank])
        assert runs[:, 1].sum() == store.spec.pack_slots
        assert len(pack["runs"]) == 2
    assert "cp 1 holds 48 tokens: [" in found.text


def test_shards_and_plan_show_the_same_step(made):
    of_plan = describe(made / "plan", step=1).facts["step"]
    of_shards = describe(made / "shards", step=1).facts["step"]
    for pack in of_shards["packs"]:
        del pack["runs"]
    assert of_shards == of_plan


def test_a_step_is_shown_without_its_corpus_or_plan(made, tmp_path):
    shutil.copytree(made / "shards", tmp_path / "shards")
    shutil.copytree(made / "plan", tmp_path / "alone" / "plan")
    for folder in (tmp_path / "shards", tmp_path / "alone" / "plan"):
        step = describe(folder, step=0).facts["step"]
        assert "text" not in step["packs"][0]["pieces"][0]


def test_a_step_that_is_not_there_is_refused(made):
    for name in ("plan", "shards"):
        with pytest.raises(ValueError, match="step 999"):
            describe(made / name, step=999)
    with pytest.raises(ValueError, match="which has no steps"):
        describe(made / "corpus", step=0)


def test_lengths_alone_have_unknown_supervision(tmp_path):
    np.save(tmp_path / "lengths.npy", np.array([5, 9]))
    options: dict[str, Any] = {"pack_tokens": 96, "packs_per_step": 1, "max_cp": 2}
    run_plan(PlanOptions(lengths=tmp_path / "lengths.npy", output=tmp_path / "plan", **options))
    assert "supervised unknown" in describe(tmp_path / "plan", step=0).text
