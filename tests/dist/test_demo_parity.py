"""The demo on a small folder of text: real processes, without Ray; sharded and unsharded losses are equal."""

import json
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from ringfeed.pipeline.config import DemoConfig
from ringfeed.pipeline.executor import JobFailedError
from ringfeed.pipeline.progress import SilentProgress
from ringfeed.workers import demo, shard_job
from ringfeed.workers.demo_ranks import run_jobs

pytestmark = pytest.mark.dist

STEPS = 3


class RecordingProgress(SilentProgress):
    def __init__(self):
        self.lines = []

    def log(self, message):
        self.lines.append(message)


def write_sources(folder):
    """Texts of very uneven length, one of them longer than a pack."""
    folder.mkdir()
    for i in range(40):
        words = " ".join(f"word{(i * 7 + j * j) % 23}" for j in range(3 + (i * 37) % 90))
        (folder / f"module_{i:02d}.py").write_text(words)
    (folder / "long.py").write_text("a long one " * 120)
    (folder / "empty.py").write_text("")
    (folder / "latin.py").write_bytes("caf\xe9".encode("latin-1"))
    return folder


def shard_here(job, journal, *, workers, progress):
    for index in job.missing:
        journal.adopt(shard_job.write_folder(job.task, index))


@pytest.fixture(scope="module")
def small_demo(tmp_path_factory):
    """The folder and the outcome of one small run."""
    base = tmp_path_factory.mktemp("demo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "standard_library_sources", lambda: (write_sources(base / "sources"),))
        patch.setattr(demo, "PACK_TOKENS", 512)
        # Two micro-batches a step: their sum is what must be equal.
        patch.setattr(demo, "PACKS_PER_STEP", 4)
        patch.setattr(shard_job, "_run_on_ray", shard_here)
        config = DemoConfig.model_validate({"output": base / "run", "steps": STEPS})
        return base / "run", demo.run_demo(config, progress=SilentProgress())


def test_losses_are_equal(small_demo):
    _, outcome = small_demo

    assert outcome.facts["max_difference"] <= 1e-4
    assert outcome.exit_code == 0


def test_the_model_learns(small_demo):
    losses = small_demo[1].facts["sharded_losses"]

    assert len(losses) == STEPS
    assert losses[0] > 5.0 > losses[-1]


def test_all_real_tokens_of_the_steps_are_trained_on(small_demo):
    folder, _ = small_demo
    *_, result = (json.loads(line) for line in (folder / "unsharded-0.jsonl").read_text().splitlines())
    ranks = [json.loads((folder / f"sharded-{rank}.jsonl").read_text().splitlines()[-1]) for rank in range(4)]

    assert sum(rank["tokens"] for rank in ranks) == result["tokens"]


def test_what_is_skipped_is_counted(small_demo):
    facts = small_demo[1].facts

    assert (facts["documents"], facts["skipped_empty"], facts["skipped_encoding"]) == (41, 1, 1)


def test_a_rank_gets_a_quarter_of_the_bytes(small_demo):
    facts = small_demo[1].facts

    # A quarter of the token tensors; the few bytes of offsets are whole on every rank.
    assert 0.25 <= facts["rank_bytes_per_step"] / facts["full_bytes_per_step"] < 0.3


def test_facts_are_json(small_demo):
    assert json.loads(json.dumps(small_demo[1].facts))["passed"] is True


def test_more_steps_than_the_plan_has_are_refused(small_demo, monkeypatch):
    folder, _ = small_demo
    monkeypatch.setattr(demo, "standard_library_sources", lambda: (folder.parent / "sources",))
    monkeypatch.setattr(demo, "PACK_TOKENS", 512)
    monkeypatch.setattr(demo, "PACKS_PER_STEP", 4)
    config = DemoConfig.model_validate({"output": folder, "steps": 1000})
    with pytest.raises(ValueError, match="steps=1000: the plan has"):
        demo.run_demo(config, progress=SilentProgress())


def test_a_failing_process_tells_its_error_and_ends_the_others(small_demo):
    folder, _ = small_demo
    sharded, unsharded = demo.train_jobs(folder, steps=STEPS)
    broken = replace(unsharded, name="broken", source=folder / "nowhere")
    progress = RecordingProgress()
    started = time.monotonic()

    # The sharded run alone would wait for its fifth rank for minutes.
    waiting = replace(sharded, name="waiting", steps=10**6)
    with pytest.raises(JobFailedError, match=r"broken rank 0 ended with exit code 1: .*nowhere"):
        run_jobs([waiting, broken], progress=progress)

    assert time.monotonic() - started < 120
    assert any("Traceback" in line for line in progress.lines)


def test_processes_end_with_the_demo(small_demo):
    folder, _ = small_demo
    job = replace(demo.train_jobs(folder, steps=10**6)[1], name="orphan")
    (folder / "orphan.json").write_text(job.to_json())
    command = [sys.executable, "-m", "ringfeed.workers.demo_process", str(folder / "orphan.json"), "0"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=30) == 1
