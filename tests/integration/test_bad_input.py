"""What goes wrong on the user's side, line by line of the list, through the real command."""

import json
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.workers import shard_job
from ringfeed.workers.cli import main

PLAN_FLAGS = ["--pack-tokens", "96", "--packs-per-step", "4", "--max-cp", "2"]


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    """Shard in this process: what is refused has nothing to do with Ray, which takes long to start."""

    def run_here(job, journal, *, workers, progress):
        for index in job.missing:
            journal.adopt(shard_job.write_folder(job.task, index))

    monkeypatch.setattr(shard_job, "_run_on_ray", run_here)


@pytest.fixture
def run(capsys):
    """Run a command line; returns exit code, the JSON of its last line, and what it says beside it."""

    def run_command(*arguments):
        code = main([*map(str, arguments), "--json"])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        assert sum(line.startswith("ringfeed ") for line in captured.err.splitlines()) == (code == 2)
        return code, json.loads(captured.out.splitlines()[-1]), captured.err

    return run_command


@pytest.fixture
def line(tmp_path, run):
    """A corpus, its plan and the plan's shards."""
    (tmp_path / "text").mkdir()
    for i in range(30):
        (tmp_path / "text" / f"{i:02d}.txt").write_text(f"{i} " * (1 + i * i % 31))
    assert run("ingest", tmp_path / "text", "-o", tmp_path / "corpus")[0] == 0
    assert run("plan", tmp_path / "corpus", "-o", tmp_path / "plan", *PLAN_FLAGS)[0] == 0
    flags = ["--cp", 2, "--layout", "te"]
    assert run("shard", tmp_path / "plan", "-o", tmp_path / "shards", *flags)[0] == 0
    return tmp_path


def load_all(source, *, dp_size=2, **changes):
    """Read every pack, as the dp ranks do between them."""
    layout = None if source.name == "shards" else "te"
    options = {"cp_rank": 0, "cp_size": 2, "layout": layout, **changes}
    loaders = [Loader(source, dp_rank=rank, dp_size=dp_size, **options) for rank in range(dp_size)]
    return [batch.info.digest for loader in loaders for batch in loader]


def test_empty_folder(tmp_path, run):
    (tmp_path / "empty").mkdir()
    code, _, err = run("ingest", tmp_path / "empty", "-o", tmp_path / "corpus")
    assert code == 2
    assert str(tmp_path / "empty") in err
    assert not (tmp_path / "corpus").exists()


def test_a_file_that_is_not_utf8(tmp_path, run):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "good.txt").write_text("good")
    (tmp_path / "text" / "latin.txt").write_bytes("h\u00e9".encode("latin-1"))
    command = ["ingest", tmp_path / "text", "-o"]
    code, _, err = run(*command, tmp_path / "corpus")
    assert code == 2
    assert "latin.txt" in err
    assert "--encoding-errors" in err or "encoding_errors" in err
    code, facts, _ = run(*command, tmp_path / "skipped", "--encoding-errors", "skip")
    assert (code, facts["documents"], facts["skipped_encoding"]) == (0, 1, 1)
    code, facts, _ = run(*command, tmp_path / "kept", "--encoding-errors", "bytes")
    assert (code, facts["documents"], facts["tokens"]) == (0, 2, 4 + 2 + 2 + 2)


def test_a_jsonl_line_that_is_no_json(tmp_path, run):
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n{"text": "b"\n{"text": "c"}\n')
    code, _, err = run("ingest", tmp_path / "data.jsonl", "-o", tmp_path / "corpus")
    assert code == 2
    assert "data.jsonl line 2: no JSON" in err


def test_a_document_of_no_tokens_is_skipped_and_counted(tmp_path, run):
    pq.write_table(pa.table({"ids": [[1, 2, 3], [], [4]]}), tmp_path / "data.parquet")
    command = ["ingest", tmp_path / "data.parquet", "-o", tmp_path / "corpus", "--tokens-column", "ids"]
    code, facts, _ = run(*command)
    assert (code, facts["documents"], facts["skipped_empty"]) == (0, 2, 1)
    np.save(tmp_path / "lengths.npy", np.array([3, 0, 1]))
    command = [
        "plan",
        "--lengths",
        tmp_path / "lengths.npy",
        "-o",
        tmp_path / "plan",
        *PLAN_FLAGS,
        "--report",
    ]
    code, facts, _ = run(*command)
    assert (code, facts["empty"], facts["pieces"]) == (0, 1, 2)


@pytest.mark.parametrize(
    ("policy", "code", "counted"),
    [
        ("split", 0, {"split": 1, "tokens": 300 + 8}),
        ("truncate", 0, {"truncated": 1, "truncated_tokens": 204}),
        ("drop", 0, {"dropped": 1, "dropped_tokens": 300}),
        ("error", 2, {}),
    ],
)
def test_a_document_longer_than_a_pack_follows_the_policy(tmp_path, run, policy, code, counted):
    np.save(tmp_path / "lengths.npy", np.array([300, 8]))
    command = ["plan", "--lengths", tmp_path / "lengths.npy", "-o", tmp_path / "plan", *PLAN_FLAGS]
    found, facts, err = run(*command, "--overflow", policy, "--report")
    assert found == code
    assert {name: facts[name] for name in counted} == counted
    if code:
        assert "document 0 has 300 tokens" in err
        assert not (tmp_path / "plan").exists()


def test_a_pack_length_that_is_no_multiple_of_what_max_cp_needs(line, run):
    flags = ["--pack-tokens", 98, "--packs-per-step", 4, "--max-cp", 2]
    code, _, err = run("plan", line / "corpus", "-o", line / "other", *flags)
    assert code == 2
    assert "pack_tokens=98 is not a multiple of 4 (2 * max_cp=2); nearest valid: [96, 100]" in err


def test_a_pack_length_that_is_no_multiple_of_what_the_layout_needs(line, run):
    flags = ["--cp", 2, "--layout", "te", "--tp", 2, "--unit", 16]
    code, _, err = run("shard", line / "plan", "-o", line / "other", *flags)
    assert code == 2
    assert "multiple of 64; nearest valid: [64, 128]" in err
    with pytest.raises(ValueError, match=r"multiple of 64; nearest valid: \[64, 128\]"):
        load_all(line / "plan", tp_size=2, unit=16)


def test_dp_that_does_not_divide_packs_per_step(line):
    with pytest.raises(ValueError, match=r"3.*packs_per_step=4|packs_per_step=4.*3"):
        load_all(line / "plan", dp_size=3)


def test_a_layout_whose_multiple_does_not_divide_the_plans(line, run):
    flags = ["--cp", 8, "--layout", "te"]
    code, _, err = run("shard", line / "plan", "-o", line / "other", *flags)
    assert code == 2
    assert "planned for documents padded to a multiple of 4" in err
    assert "at cp_size=8 pads them to 16" in err
    enough = err.partition("budget that is enough is ")[2].partition(".")[0]
    code, _, _ = run("shard", line / "plan", "-o", line / "other", *flags, "--slot-budget", enough)
    assert code == 0
    with pytest.raises(ValueError, match=f"slot_budget={enough}"):
        load_all(line / "plan", cp_size=8)


def test_a_corpus_with_another_tokenizer(line, run):
    pq.write_table(pa.table({"ids": [[1, 2, 3]]}), line / "ids.parquet")
    assert run("ingest", line / "ids.parquet", "-o", line / "ids", "--tokens-column", "ids")[0] == 0
    code, _, err = run("plan", line / "corpus", line / "ids", "-o", line / "mixed", *PLAN_FLAGS)
    assert code == 2
    assert "cannot be mixed" in err
    assert "tokenizer.kind" in err


def test_a_plan_whose_corpus_is_another_one_now(line, run):
    shutil.rmtree(line / "corpus")
    (line / "text" / "00.txt").write_text("something else")
    assert run("ingest", line / "text", "-o", line / "corpus")[0] == 0
    code, _, err = run("shard", line / "plan", "-o", line / "other", "--cp", 2, "--layout", "te")
    assert code == 2
    assert "was not planned from" in err
    assert "num_tokens" in err
    with pytest.raises(ValueError, match=r"was not planned from .*num_tokens"):
        load_all(line / "plan")


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize("damage", [flip, truncate], ids=["bit-flipped", "truncated"])
@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("corpus/tokens-00000.arrow", "plan"),
        ("corpus/documents.arrow", "plan"),
        ("plan/block-00000.arrow", "plan"),
        ("shards/steps-00000/cp-00.arrow", "shards"),
        ("shards/steps-00000/cp-00.index.arrow", "shards"),
        ("shards/steps-00000/packs.arrow", "shards"),
    ],
)
def test_a_damaged_arrow_file_is_named_by_verify_and_refused_by_the_loader(line, run, damage, file, source):
    assert load_all(line / source)
    damage(line / file)
    code, facts, _ = run("verify", line / file.partition("/")[0])
    assert (code, facts["ok"]) == (1, False)
    assert [finding["file"] for finding in facts["findings"]] == [str(line / file)]
    with pytest.raises(CorruptDataError, match=file.rpartition("/")[2]):
        load_all(line / source)


def test_a_half_written_folder_is_never_opened(line, run):
    for name in ("corpus", "plan", "shards"):
        (line / name / "manifest.json").unlink()
        (line / name).rename(line / f"{name}.partial")
        for command in ("verify", "inspect"):
            code, _, err = run(command, line / name)
            assert code == 2
            assert f"{name}" in err
    with pytest.raises(ValueError, match="half-written"):
        load_all(line / "plan")


def test_a_loader_names_the_command_that_finishes_half_written_shards(line):
    staged = line / "shards.partial" / ".staging"
    (line / "shards").rename(line / "shards.partial")
    staged.mkdir()
    shutil.move(line / "shards.partial" / "manifest.json", staged / "made_from.json")
    for path in (line / "shards", line / "shards.partial"):
        with pytest.raises(ValueError, match=r"half-written.* `ringfeed shard` again"):
            load_all(path)


def test_the_folder_in_which_one_stands_is_a_path_too(line, run, monkeypatch):
    for name in ("corpus", "plan", "shards"):
        monkeypatch.chdir(line / name)
        for command in ("verify", "inspect"):
            code, _, err = run(command, ".")
            assert code == 0, err
    monkeypatch.chdir(line)
    code, _, err = run("verify", ".")
    assert (code, err.strip()) == (
        2,
        "ringfeed verify: . is no corpus, plan or shards folder: it has no manifest.json",
    )
    with pytest.raises(ValueError, match=r"\. is no plan: it has no manifest\.json"):
        load_all(Path())
