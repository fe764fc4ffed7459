"""verify finds masks and supervised counts that are wrong though every checksum is right."""

import re
import shutil
from dataclasses import replace

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.documents_table import COLUMNS, MASK_COLUMNS, map_documents
from ringfeed.pipeline.findings import folder_format
from ringfeed.pipeline.manifest import file_entry, read_manifest, write_manifest
from ringfeed.pipeline.mask_runs import RUN_COLUMNS
from ringfeed.pipeline.paged_table import map_table, write_table
from ringfeed.pipeline.plan_blocks import block_name, read_block, write_block
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.verify import verify


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    draw = np.random.default_rng(0)
    documents = [np.arange(n) for n in draw.integers(5, 40, size=30)]
    masks = [draw.random(len(document)) < 0.5 for document in documents]
    write_corpus(root / "corpus", documents, name="chat", masks=masks)
    for boundary in ("next", "ignore"):
        run_plan(
            PlanOptions(
                corpora=[root / "corpus"],
                output=root / boundary,
                pack_tokens=32,
                packs_per_step=4,
                pad_multiple=1,
                boundary_label=boundary,
            )
        )
    return root


@pytest.fixture
def folders(made, tmp_path):
    return shutil.copytree(made, tmp_path / "copy")


def reseal(folder):
    """Make the manifest of a changed folder say that all is well."""
    manifest = read_manifest(folder, format=folder_format(folder))
    files = tuple(file_entry(folder, entry.path, entry.rows) for entry in manifest.files)
    write_manifest(folder, replace(manifest, files=files))


def problems(folder):
    return [finding.problem for finding in verify(folder).findings]


@pytest.mark.parametrize("name", ["corpus", "next", "ignore"])
def test_masks_and_counts_that_are_right_have_no_finding(made, name):
    assert problems(made / name) == []


def change_run(name, row, by):
    def change(corpus):
        columns = {key: np.array(value) for key, value in map_table(corpus / RUNS, RUN_COLUMNS).items()}
        columns[name][row] += by
        write_table(corpus / RUNS, columns, RUN_COLUMNS)

    return change


def change_document(name, row, by):
    def change(corpus):
        columns = {key: np.array(value) for key, value in map_documents(corpus / DOCUMENTS).items()}
        columns[name][row] += by
        write_table(corpus / DOCUMENTS, columns, {**COLUMNS, **MASK_COLUMNS})

    return change


RUNS, DOCUMENTS = "mask_runs.arrow", "documents.arrow"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (change_run("start", 0, -5), "mask run 0 of document 0, .* is out of place"),
        (change_run("stop", 3, 100), "mask run 3 of document .* is out of place"),
        (change_run("before", 1, 1), "mask run 1 of document 0, .* has a wrong sum before it"),
        (change_document("first_run", 2, 1), "documents do not share out the mask runs in order"),
        (change_document("supervised", 4, -1), "document 4 does not have .* supervised tokens"),
    ],
)
def test_a_mask_that_lies_is_found(folders, change, told):
    change(folders / "corpus")
    reseal(folders / "corpus")
    found = problems(folders / "corpus")
    assert any(DOCUMENTS in problem for problem in found)
    assert any(re.search(told, problem) for problem in found)


def test_a_plan_whose_counts_lie_is_found_pack_by_pack(folders):
    plan = folders / "next"
    entry = read_manifest(plan, format=folder_format(plan)).files[0]
    block = read_block(plan, entry)
    assert block.rows.supervised is not None
    counts = block.rows.supervised.copy()
    counts[2] += 1
    write_block(plan / block_name(0), replace(block.rows, supervised=counts), block.facts)
    reseal(plan)
    found = [p for p in problems(plan) if "does not say how many tokens are supervised" in p]
    assert len(found) == 1
    assert "step 0, pack 2" in found[0]
