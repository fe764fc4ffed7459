"""Packs of their own lengths through the whole line: the real commands, then loaders of two shapes."""

import json

import numpy as np
import pytest

from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.plan import Plan
from ringfeed.workers import shard_job
from ringfeed.workers.cli import main

# In order, packs end where the next document does not fit: they have footprints of all kinds.
PLAN_FLAGS = ["--pack-tokens", 512, "--packs-per-step", 4, "--max-cp", 4, "--balance", "in_order"]
VARIABLE = ["--pack-shape", "variable"]
BUCKETS = [*VARIABLE, "--length-buckets", "powers_of_two"]
WORK = [*VARIABLE, "--balance", "work", "--slate-size", 2, "--piece-tokens", 256, "--work-budget", 400]


@pytest.fixture(autouse=True)
def without_ray(monkeypatch):
    """Shard in this process: what is compared has nothing to do with Ray, which takes long to start."""

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
        return code, json.loads(captured.out.splitlines()[-1]), captured.err

    return run_command


@pytest.fixture
def corpus(tmp_path, run):
    (tmp_path / "text").mkdir()
    for i in range(60):
        (tmp_path / "text" / f"{i:02d}.txt").write_text(f"{i} " * (1 + i * i % 141))
    assert run("ingest", tmp_path / "text", "-o", tmp_path / "corpus")[0] == 0
    return tmp_path / "corpus"


@pytest.mark.parametrize("shape", [VARIABLE, BUCKETS, WORK], ids=["variable", "buckets", "work"])
@pytest.mark.parametrize(("layout", "cp_size"), [("te", 2), ("te", 4), ("head_tail", 4), ("head_tail", 2)])
def test_plan_shard_and_load(corpus, tmp_path, run, shape, layout, cp_size):
    code, planned, _ = run("plan", corpus, "-o", tmp_path / "plan", *PLAN_FLAGS, *shape, "--report")
    assert code == 0
    asked = ["--cp", cp_size, "--layout", layout]
    code, sharded, _ = run("shard", tmp_path / "plan", "-o", tmp_path / "shards", *asked)
    assert code == 0
    for folder in ("plan", "shards"):
        code, checked, _ = run("verify", tmp_path / folder)
        assert (code, checked["findings"], checked["unchecked"]) == (0, [], [])

    slots, tokens = load_both(tmp_path, layout, cp_size)
    assert tokens == planned["tokens"]
    assert slots == sharded["tokens"]


def load_both(folder, layout, cp_size):
    """Load plan and shards on every rank; return slots of planned packs and real tokens of all ranks."""
    num_packs = Plan.open(folder / "plan").num_packs
    slots = tokens = 0
    for cp_rank in range(cp_size):
        asked = {"dp_rank": 0, "dp_size": 1, "cp_rank": cp_rank, "cp_size": cp_size, "layout": layout}
        batches = list(Loader(folder / "plan", **asked))
        stored = list(Loader(folder / "shards", **asked))
        assert [b.info for b in batches] == [b.info for b in stored]
        for batch, other in zip(batches, stored, strict=True):
            assert all(np.array_equal(t, other.tensors[name]) for name, t in batch.tensors.items())
        real = [b for b in batches if b.info.num_documents]
        assert len(real) == num_packs
        slots += sum(len(b.tensors["input_ids"]) for b in real)
        tokens += sum(int((~b.tensors["padding_mask"]).sum()) for b in real)
    return slots, tokens


@pytest.mark.parametrize("shape", [VARIABLE, BUCKETS], ids=["variable", "buckets"])
def test_fill_counts_the_slots_that_packs_have(corpus, tmp_path, run, shape):
    run("plan", corpus, "-o", tmp_path / "plan", *PLAN_FLAGS, *shape, "--window", 2)
    report = Plan.open(tmp_path / "plan").report
    plan = Plan.open(tmp_path / "plan")
    slots = [pack_slots(row, shape) for i in range(plan.num_steps) for row in plan.step(i).to_pylist()]

    assert len(set(slots)) > 1
    assert report["fill"] == report["tokens"] / sum(slots)
    # The last window + 1 steps are left out.
    settled = range(plan.num_steps - 3)
    settled_tokens = sum(sum(n) for i in settled for n in plan.step(i)["lengths"].to_pylist())
    assert len(settled) > 0
    assert report["settled"]["fill"] == settled_tokens / sum(slots[: 4 * len(settled)])
    assert report["slot_padding"] + report["tail_padding"] == sum(slots) - report["tokens"]
    assert (report["tail_padding"] == 0) == (shape is VARIABLE)


def pack_slots(row, shape):
    """Slots of one pack at the plan's multiple of 8."""
    footprint = sum(-(-n // 8) * 8 for n in row["lengths"])
    return footprint if shape is VARIABLE else next(2**i for i in range(10) if 2**i >= footprint)


def test_a_step_is_shown_with_the_length_of_each_pack(corpus, tmp_path, run):
    run("plan", corpus, "-o", tmp_path / "plan", *PLAN_FLAGS, *VARIABLE)
    run("shard", tmp_path / "plan", "-o", tmp_path / "shards", "--cp", 4, "--layout", "te", "--unit", 4)
    rows = Plan.open(tmp_path / "plan").step(0).to_pylist()

    for folder, multiple in (("plan", 8), ("shards", 16)):
        shown = run("inspect", tmp_path / folder, "--step", 0)[1]["step"]["packs"]
        expected = [-(-pack_slots(row, VARIABLE) // multiple) * multiple for row in rows]
        assert [pack["slots"] for pack in shown] == expected
        assert [pack["fill"] for pack in shown] == [
            sum(row["lengths"]) / n for row, n in zip(rows, expected, strict=True)
        ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--length-buckets", "powers_of_two"], "use pack_shape=variable, or leave it out"),
        ([*BUCKETS, "--pack-tokens", 768], "nearest valid: [512, 1024]"),
        ([*WORK, "--work-budget", 200], "work_budget=200 is below 258"),
        ([*WORK, "--piece-tokens", 1024], "piece_tokens=1024 must be at least 1 and at most pack_tokens=512"),
        ([*WORK, "--window", 4, "--max-delay", 4], "max_delay=4 must be at least 0 and below window=4"),
        ([*VARIABLE, "--max-delay", 1], "only for pack_shape=variable with balance=work"),
        (["--pack-shape", "even"], "pack_shape='even': must be one of fixed, variable"),
        ([*VARIABLE, "--length-buckets", "fours"], "must be one of none, powers_of_two, eighths"),
    ],
)
def test_what_makes_no_sense_is_told_in_one_line(corpus, tmp_path, run, flags, message):
    code, _, err = run("plan", corpus, "-o", tmp_path / "plan", *PLAN_FLAGS, *flags)

    assert code == 2
    assert message in err
    assert len([line for line in err.splitlines() if line.startswith("ringfeed ")]) == 1
    assert not (tmp_path / "plan").exists()


def test_a_fixed_and_a_variable_plan_are_not_the_same(corpus, tmp_path, run):
    run("plan", corpus, "-o", tmp_path / "plan", *PLAN_FLAGS)
    code, _, err = run("plan", corpus, "-o", tmp_path / "plan", *PLAN_FLAGS, *VARIABLE)

    assert code == 2
    assert "pack_shape" in err
