"""verify finds every fault and names the file: damaged bytes, and lies with right checksums."""

import shutil
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest

from ringfeed.pipeline.chain import next_link
from ringfeed.pipeline.cli import main
from ringfeed.pipeline.executor import SerialExecutor, ThreadExecutor
from ringfeed.pipeline.findings import folder_format
from ringfeed.pipeline.ingest import run_ingest
from ringfeed.pipeline.ingest_options import IngestOptions
from ringfeed.pipeline.manifest import file_entry, fingerprint, read_manifest, write_manifest
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.paged_table import write_pages
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_blocks import block_name, read_block, write_block
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.progress import SilentProgress
from ringfeed.pipeline.shard_files import FileIndex, FolderFacts, ViewFileWriter
from ringfeed.pipeline.shard_writer import (
    ShardTask,
    num_folders,
    shards_made_from,
    shards_manifest,
    write_steps,
)
from ringfeed.pipeline.skip import skip_list
from ringfeed.pipeline.staging import StagedFolder
from ringfeed.pipeline.store import SHARDS_FORMAT
from ringfeed.pipeline.verify import verify
from ringfeed.sharding.layouts import make_layout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A corpus, a plan that splits documents over two epochs, and its shards."""
    root = tmp_path_factory.mktemp("made")
    (root / "text").mkdir()
    for i in range(1, 40):
        (root / "text" / f"{i:02d}.txt").write_text(f"{i} " * (i * i % 83))
    run_ingest(IngestOptions(sources=(root / "text",), output=root / "corpus"), progress=SilentProgress())
    plan(root, "plan", epochs=2, seed=1)
    shards(root, "shards", "te")
    return root


@pytest.fixture
def folders(made, tmp_path):
    """A copy that a test may damage."""
    return shutil.copytree(made, tmp_path / "copy")


def plan(root, name, **options):
    given = {"pack_tokens": 96, "packs_per_step": 4, "max_cp": 2, **options}
    run_plan(PlanOptions(corpora=(root / "corpus",), output=root / name, **given))
    return root / name


def shards(root, name, layout, *, skip=()):
    opened = Plan.open(root / "plan")
    options = OpenOptions(layout=make_layout(layout), cp_size=2)
    spec = open_spec(opened, options, pad_id=opened.open_corpora().pad_id)
    task = ShardTask(
        plan=root / "plan", folder=root / name, spec=spec, steps_per_folder=9, overlay=skip_list(skip)
    )
    made_from = shards_made_from(opened, task)
    with StagedFolder.open(root / name, format=SHARDS_FORMAT, made_from=made_from) as staged:
        staged_task = replace(task, folder=staged.path)
        files = []
        for index in range(num_folders(opened, steps_per_folder=9)):
            files += write_steps(staged_task, index)
        manifest = shards_manifest(opened, task, files)
        staged.publish(replace(manifest, facts={**manifest.facts, "plan_path": "../plan"}))
    return root / name


def reseal(folder):
    """Make the manifest of a changed folder say that all is well."""
    manifest = read_manifest(folder, format=folder_format(folder))
    files = tuple(file_entry(folder, entry.path, entry.rows) for entry in manifest.files)
    write_manifest(folder, replace(manifest, files=files))


def problems(folder):
    return [finding.problem for finding in verify(folder).findings]


@pytest.mark.parametrize("name", ["corpus", "plan", "shards"])
@pytest.mark.parametrize("executor", [None, SerialExecutor(), ThreadExecutor(2)])
def test_what_is_sound_has_no_finding(made, name, executor):
    report = verify(made / name, executor=executor)
    assert (report.findings, report.unchecked) == ((), ())
    assert report.kind == name
    assert report.counts["files"] >= 3


@pytest.mark.parametrize("layout", ["head_tail", "contiguous", "whole_document", "identity"])
def test_shards_of_every_layout_are_sound(folders, layout):
    assert problems(shards(folders, layout, layout)) == []


def test_shards_with_a_skip_list_are_sound(folders):
    assert problems(shards(folders, "skipping", "te", skip=[3, 11])) == []


@pytest.mark.parametrize("overflow", ["split", "truncate", "drop"])
@pytest.mark.parametrize("balance", ["best_fit", "in_order", "concat"])
def test_plans_of_every_policy_are_sound(folders, overflow, balance):
    name = f"{overflow}-{balance}"
    assert problems(plan(folders, name, overflow=overflow, balance=balance, epochs=2)) == []


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("damage", [flip, truncate, lambda path: path.unlink()], ids=["flip", "cut", "gone"])
@pytest.mark.parametrize("name", ["corpus", "plan", "shards"])
def test_every_damaged_file_is_named(made, tmp_path, name, damage):
    for entry in read_manifest(made / name, format=folder_format(made / name)).files:
        shutil.rmtree(tmp_path / "copy", ignore_errors=True)
        folders = shutil.copytree(made, tmp_path / "copy")
        damage(folders / name / entry.path)
        found = {finding.file for finding in verify(folders / name).findings}
        assert found == {str(folders / name / entry.path)}


@pytest.mark.parametrize("name", ["corpus", "plan", "shards"])
def test_a_damaged_manifest_is_named(folders, name):
    flip(folders / name / "manifest.json")
    [finding] = verify(folders / name).findings
    assert finding.file == str(folders / name / "manifest.json")


def flipped(path, *, every):
    """Give the file each of several flipped bytes in turn, and the manifest their hash."""
    data = path.read_bytes()
    for place in range(5, len(data), every):
        path.write_bytes(data[:place] + bytes([data[place] ^ 0x12]) + data[place + 1 :])
        reseal(next(parent for parent in path.parents if (parent / "manifest.json").exists()))
        yield place
    path.write_bytes(data)


@pytest.mark.parametrize("name", ["corpus", "plan", "shards", "dropping"])
def test_what_was_damaged_before_it_was_hashed_never_raises(folders, name):
    plan(folders, "dropping", overflow="drop")
    found = set()
    for entry in read_manifest(folders / name, format=folder_format(folders / name)).files:
        path = folders / name / entry.path
        for _ in flipped(path, every=1 + path.stat().st_size // 8):
            found |= {finding.file for finding in verify(folders / name).findings}
    assert found


def test_a_block_that_was_damaged_before_it_was_hashed_is_named(folders, capsys):
    path = folders / "plan" / "block-00000.arrow"
    for place in flipped(path, every=211):
        assert str(path) in {finding.file for finding in verify(folders / "plan").findings}, place
        assert main(["verify", str(folders / "plan")]) == 1
    assert "Traceback" not in capsys.readouterr().err
    reseal(folders / "plan")
    assert problems(folders / "plan") == []


def test_pages_that_are_not_those_of_the_table_are_found(folders):
    write_pages(folders / "corpus" / "documents.pages.arrow", {"length": np.arange(3)})
    reseal(folders / "corpus")
    assert any("documents.arrow is damaged in rows 0" in problem for problem in problems(folders / "corpus"))


def test_all_damaged_files_are_found_at_once(folders):
    flip(folders / "shards" / "steps-00000" / "cp-00.arrow")
    flip(folders / "shards" / "steps-00001" / "cp-01.arrow")
    report = verify(folders / "shards")
    assert len(report.findings) == 2
    assert report.unchecked == ("2 folders of steps, since files are damaged",)


def test_half_written_and_absent_folders_are_refused(folders):
    (folders / "corpus").rename(folders / "corpus.partial")
    (folders / "corpus.partial" / "manifest.json").unlink()
    with pytest.raises(ValueError, match="corpus"):
        verify(folders / "corpus")
    with pytest.raises(ValueError, match="no corpus, plan or shards folder"):
        verify(folders / "absent")


def test_a_corpus_that_is_not_there_is_no_fault(folders):
    (folders / "corpus").rename(folders / "moved")
    for name in ("plan", "shards"):
        report = verify(folders / name)
        assert report.findings == ()
        assert "is not there" in report.unchecked[0]


def test_another_corpus_in_its_place_is_a_fault_with_the_difference(folders):
    shutil.rmtree(folders / "corpus")
    (folders / "text" / "01.txt").write_text("changed")
    run_ingest(
        IngestOptions(sources=(folders / "text",), output=folders / "corpus"), progress=SilentProgress()
    )
    for name in ("plan", "shards"):
        [problem] = problems(folders / name)
        assert "was not planned from" in problem
        assert "num_tokens" in problem


def test_another_plan_in_its_place_is_a_fault_with_the_difference(folders):
    shutil.rmtree(folders / "plan")
    plan(folders, "plan", epochs=2, seed=2)
    [problem] = problems(folders / "shards")
    assert "was not made from" in problem
    assert "recipe" in problem


def forge_block(folder, change):
    """Change the rows of a plan's first block, with a chain and checksums that agree with them."""
    opened = Plan.open(folder)
    block = read_block(folder, opened.manifest.files[0])
    rows = change(block.rows)
    chain, chains = block.facts.previous_chain, []
    for step in range(block.facts.num_steps):
        first, last = np.searchsorted(rows.steps, [step, step + 1]).tolist()
        chain = next_link(chain, rows.step_packs(first, last, chain=""))
        chains.append(chain)
    write_block(folder / block_name(0), rows, replace(block.facts, chains=tuple(chains)))
    reseal(folder)


def with_document(rows, piece, document):
    documents = rows.pieces.documents.copy()
    documents[piece] = document
    return replace(rows, pieces=replace(rows.pieces, documents=documents))


def test_a_plan_that_draws_a_document_twice_is_found(folders):
    single = plan(folders, "single")
    forge_block(single, lambda rows: with_document(rows, 0, int(rows.pieces.documents[5])))
    found = " ".join(problems(single))
    assert "are there twice" in found or "must reach" in found


def test_a_plan_with_a_document_of_no_corpus_is_found(folders):
    single = plan(folders, "single")
    forge_block(single, lambda rows: with_document(rows, 0, 10_000))
    assert any("document 10000 in epoch 0 does not exist" in problem for problem in problems(single))


def test_a_pack_over_its_budget_is_found(folders):
    single = plan(folders, "single")

    def lengthen(rows):
        lengths = rows.pieces.lengths.copy()
        lengths[0] += 96
        return replace(rows, pieces=replace(rows.pieces, lengths=lengths))

    forge_block(single, lengthen)
    assert any("takes more than pack_tokens" in problem for problem in problems(single))


def test_a_variable_pack_that_costs_more_than_its_budget_is_found(folders):
    asked = {"pack_shape": "variable", "piece_tokens": 48, "work_budget": 90}
    variable = plan(folders, "variable", **asked)
    assert problems(variable) == []

    forge_block(variable, lambda rows: replace(rows, costs=rows.costs + 45))
    assert any("costs more than work_budget" in problem for problem in problems(variable))


@pytest.mark.parametrize(("slate", "told"), [(0, "has more than slate_size"), (9, "has a slate 9")])
def test_a_slate_that_ranks_have_no_room_for_is_found(folders, slate, told):
    sliced = plan(folders, "sliced", packs_per_step=4, slate_size=2)
    assert problems(sliced) == []

    forge_block(sliced, lambda rows: replace(rows, slates=np.full_like(rows.slates, slate)))
    assert any(told in problem for problem in problems(sliced))


def test_rows_that_are_not_what_the_chain_says_are_found(folders):
    single = plan(folders, "single")
    block = read_block(single, Plan.open(single).manifest.files[0])
    costs = block.rows.costs.copy()
    costs[2] += 1
    write_block(single / block_name(0), replace(block.rows, costs=costs), block.facts)
    reseal(single)
    assert any("step 0 is not what its hash chain says" in problem for problem in problems(single))


def test_losses_that_are_counted_and_not_named_are_found(folders):
    dropping = plan(folders, "dropping", overflow="drop")
    manifest = read_manifest(dropping, format="ringfeed-plan")
    files = tuple(entry for entry in manifest.files if not entry.path.startswith("losses-"))
    assert len(files) < len(manifest.files)
    write_manifest(dropping, replace(manifest, files=files))
    found = problems(dropping)
    assert any("not named as they are counted" in problem for problem in found)
    assert any("must reach" in problem for problem in found)


def forge_views(shards_folder, rank, change):
    """Rewrite one view file with changed batches; index and manifest agree with it."""
    path = shards_folder / "steps-00000" / f"cp-{rank:02d}.arrow"
    with pa.OSFile(str(path), "rb") as source, pa.ipc.open_file(source) as reader:
        batches = [reader.get_batch(i) for i in range(reader.num_record_batches)]
    writer = ViewFileWriter(path)
    for i, batch in enumerate(batches):
        writer.write(change(batch) if i == 1 else batch)
    index: FileIndex = writer.finish()
    index.write(path.with_name(f"cp-{rank:02d}.index.arrow"))
    reseal(shards_folder)


def with_column(name, change):
    def changed(batch):
        position = batch.schema.get_field_index(name)
        values = batch.column(name).to_pylist()
        change(values[0])
        return batch.set_column(
            position, batch.schema.field(position), pa.array(values, batch.schema.types[position])
        )

    return changed


def increase_first(values):
    values[0] += 1


@pytest.mark.parametrize(
    ("column", "told"),
    [
        ("input_ids", "pack 1 has other ids than the corpus"),
        ("labels", "pack 1 has other labels than the corpus"),
        ("documents", "pack 1 differs from rank 0's"),
        ("epochs", "pack 1 differs from rank 0's"),
    ],
)
def test_a_forged_view_is_found_and_its_file_named(folders, column, told):
    forge_views(folders / "shards", 1, with_column(column, increase_first))
    findings = verify(folders / "shards").findings
    assert any(told in finding.problem for finding in findings)
    assert findings[0].file == str(folders / "shards" / "steps-00000" / "cp-01.arrow")


def test_pieces_that_are_not_the_plans_are_found(folders):
    for rank in (0, 1):
        forge_views(folders / "shards", rank, with_column("documents", increase_first))
    assert any("pack 1 has other pieces than the plan" in problem for problem in problems(folders / "shards"))


def test_views_of_swapped_ranks_are_found(folders):
    folder = folders / "shards" / "steps-00000"
    for suffix in ("arrow", "index.arrow"):
        one, other = folder / f"cp-00.{suffix}", folder / f"cp-01.{suffix}"
        one.rename(folder / "aside")
        other.rename(one)
        (folder / "aside").rename(other)
    reseal(folders / "shards")
    assert any("has other ids than the corpus" in problem for problem in problems(folders / "shards"))


def test_facts_that_are_not_the_plans_are_found(folders):
    path = folders / "shards" / "steps-00001" / "packs.arrow"
    facts = FolderFacts.read(path.read_bytes())
    replace(facts, supervised=facts.supervised + 1, costs=facts.costs + 1).write(path)
    reseal(folders / "shards")
    found = problems(folders / "shards")
    assert any("has other slates, costs or chain than the plan" in problem for problem in found)
    assert any("labels, its facts say" in problem for problem in found)


def test_a_manifest_whose_fingerprint_is_not_of_what_it_says_is_found(folders):
    manifest = read_manifest(folders / "plan", format="ringfeed-plan")
    made_from = {**manifest.made_from, "epochs": 3}
    write_manifest(folders / "plan", replace(manifest, made_from=made_from))
    assert fingerprint(made_from) != manifest.fingerprint
    [finding] = verify(folders / "plan").findings
    assert finding.file.endswith("manifest.json")
