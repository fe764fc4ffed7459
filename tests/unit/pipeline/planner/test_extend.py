"""What an extension takes from the plan, and what from whoever asks for it."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.manifest import fingerprint, read_manifest, write_manifest
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_blocks import SNAPSHOT_KEY
from ringfeed.pipeline.planner.cost import cost_model_of
from ringfeed.pipeline.planner.extend import Extension
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_extension, run_plan
from ringfeed.pipeline.planner.snapshots import read_snapshot

LENGTHS = [int(n) for n in np.random.default_rng(0).integers(1, 60, size=120)]


def planned(folder, *, lengths=None, corpora=(), cost_model="7b"):
    run_plan(
        PlanOptions(
            lengths=lengths,
            corpora=corpora,
            output=folder / "plan",
            pack_tokens=64,
            packs_per_step=2,
            pad_multiple=4,
            window=4,
            cost_model=cost_model_of(cost_model),
        )
    )
    return Plan.open(folder / "plan")


@pytest.mark.parametrize("workers", [1, 2])
def test_corpora_that_moved_and_a_cost_table_are_given_again(tmp_path, workers):
    write_corpus(tmp_path / "web", [np.arange(n) for n in LENGTHS], name="web")
    (tmp_path / "costs.csv").write_text("length,milliseconds\n1,1\n64,100\n")
    table = f"table:{tmp_path / 'costs.csv'}"
    before = planned(tmp_path, corpora=(tmp_path / "web",), cost_model=table)
    (tmp_path / "web").rename(tmp_path / "moved")

    asked = Extension(
        plan=before.path,
        epochs=2,
        corpora=[tmp_path / "moved"],
        cost_model=cost_model_of(table),
        workers=workers,
    )
    run_extension(asked)
    after = Plan.open(before.path)
    assert after.num_steps > before.num_steps
    assert after.corpus_paths() == [tmp_path / "moved"]


def test_a_plan_of_lengths_goes_on_with_its_own_file(tmp_path):
    np.save(tmp_path / "lengths.npy", LENGTHS)
    before = planned(tmp_path, lengths=tmp_path / "lengths.npy")

    run_extension(Extension(plan=before.path, epochs=2))
    assert Plan.open(before.path).num_steps > before.num_steps


def test_a_plan_of_an_earlier_planner_is_read_but_not_made_longer(tmp_path):
    np.save(tmp_path / "lengths.npy", LENGTHS)
    folder = planned(tmp_path, lengths=tmp_path / "lengths.npy").path
    manifest = read_manifest(folder, format="ringfeed-plan")
    segments = [
        {**segment, "recipe": {**segment["recipe"], "planner_version": 1}}
        for segment in manifest.made_from["segments"]
    ]
    made_from = {**manifest.made_from, "segments": segments}
    write_manifest(folder, replace(manifest, made_from=made_from, fingerprint=fingerprint(made_from)))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    assert Plan.open(folder).num_steps > 0
    with pytest.raises(ValueError, match=r"planner_version=1, .* planner_version=2, .* or make a new plan"):
        run_extension(Extension(plan=folder, epochs=2))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert not folder.with_name("plan.partial").exists()


def test_a_state_that_does_not_tell_what_was_drawn_is_read(tmp_path):
    np.save(tmp_path / "lengths.npy", LENGTHS)
    path = planned(tmp_path, lengths=tmp_path / "lengths.npy").path / "snapshot-00001"
    with pa.ipc.open_file(path.read_bytes()) as reader:
        table = reader.read_all()
    state = json.loads(table.schema.metadata[SNAPSHOT_KEY])
    del state["drawn"], state["xxh3_64"]
    with pa.ipc.new_file(str(path), table.schema.with_metadata({SNAPSHOT_KEY: json.dumps(state)})) as writer:
        writer.write_table(table)

    assert read_snapshot(path).window.drawn.tokens.tolist() == []
