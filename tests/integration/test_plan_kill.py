"""``kill -9`` and a full disk in the middle of planning: a rerun ends with the same bytes."""

import errno
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.mixture_recipe import Interpolation, LengthLimit
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_blocks import write_block
from ringfeed.pipeline.planner import writer
from ringfeed.pipeline.planner.mixture import Exhausted, Mixture, MixturePoint, MixtureSource
from ringfeed.pipeline.planner.options import Balance, BlockLimits, PlanOptions
from ringfeed.pipeline.planner.run import run_plan

# Dies with the n-th file that would get its final name.
KILLED_RUN = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_plan_kill import make_plan

replace, left = Path.replace, int(sys.argv[3])

def dying_replace(self, target):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return replace(self, target)

Path.replace = dying_replace
make_plan(Path(sys.argv[2]), name="killed", kind=sys.argv[4], balance=sys.argv[5])
"""


def sources_of(folder, *, kind):
    """What is planned: lengths alone, or a mixture of two corpora that repeat, with all that may change."""
    rng = np.random.default_rng(0)
    if kind == "lengths":
        if not (folder / "lengths.npy").exists():
            np.save(folder / "lengths.npy", rng.integers(1, 5000, size=4000))
        return {"lengths": folder / "lengths.npy"}
    for name, count in (("web", 700), ("code", 90)):
        if not (folder / name).exists():
            documents = (np.full(length, 7, np.uint16) for length in rng.integers(1, 5000, size=count))
            write_corpus(folder / name, documents, name=name, pad_id=0)
    mixture = Mixture(
        sources=(
            MixtureSource(name="web", weight=3, exhausted=Exhausted.REPEAT),
            MixtureSource(name="code", weight=1, exhausted=Exhausted.REPEAT),
        ),
        interpolation=Interpolation.LINEAR,
        points=(MixturePoint(step=200, weights={"web": 1, "code": 1}),),
        limits=(LengthLimit(step=0, max_tokens=500), LengthLimit(step=60, max_tokens=None)),
    )
    return {"corpora": [folder / "web", folder / "code"], "mixture": mixture, "steps": 300}


def make_plan(folder, *, name, kind="lengths", balance="best_fit", workers=1):
    options = PlanOptions(
        workers=workers,
        **sources_of(folder, kind=kind),
        output=folder / name,
        pack_tokens=4096,
        packs_per_step=8,
        max_cp=4,
        balance=Balance(balance),
        seed=1,
        window=8,
        block_limits=BlockLimits(steps=100, pieces=10_000),
    )
    run_plan(options)
    return options.output


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


every_kind = pytest.mark.parametrize(
    ("kind", "balance"), [("lengths", "best_fit"), ("mixture", "best_fit"), ("mixture", "work")]
)


@every_kind
def test_killed_again_and_again_a_plan_ends_with_the_same_bytes(tmp_path, kind, balance):
    whole = make_plan(tmp_path, name="whole", kind=kind, balance=balance)
    command = [sys.executable, "-c", KILLED_RUN, str(Path(__file__).parent), str(tmp_path)]
    # First the request and a snapshot; then every run gets a block further, and half of the next one.
    kills = 0
    while subprocess.run([*command, "3", kind, balance], check=False).returncode == -signal.SIGKILL:
        kills += 1
        assert not (tmp_path / "killed").exists()
        with pytest.raises(ValueError, match="half-written"):
            Plan.open(tmp_path / "killed")
        assert kills < 20

    assert kills >= 3
    assert content(tmp_path / "killed") == content(whole)


@every_kind
def test_any_number_of_workers_writes_the_same_bytes(tmp_path, kind, balance):
    plans = [make_plan(tmp_path, name=f"by-{n}", kind=kind, balance=balance, workers=n) for n in (1, 2, 4)]

    assert content(plans[0]) == content(plans[1]) == content(plans[2])


def test_a_full_disk_ends_the_run_and_a_rerun_goes_on(tmp_path, monkeypatch):
    whole = make_plan(tmp_path, name="whole")
    calls = []

    def full_disk(path, rows, facts):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half a block")
            raise OSError(errno.ENOSPC, "No space left on device")
        write_block(path, rows, facts)

    monkeypatch.setattr(writer, "write_block", full_disk)
    with pytest.raises(OSError, match="No space left"):
        make_plan(tmp_path, name="full")
    assert not (tmp_path / "full").exists()
    make_plan(tmp_path, name="full")

    # The first block was not planned again.
    assert calls.count(calls[0]) == 1
    assert content(tmp_path / "full") == content(whole)


def test_a_block_that_was_damaged_while_the_planner_was_down_is_planned_again(tmp_path, monkeypatch):
    whole = make_plan(tmp_path, name="whole")
    monkeypatch.setattr("ringfeed.pipeline.planner.session.finished_manifest", stop)
    with pytest.raises(KeyboardInterrupt):
        make_plan(tmp_path, name="damaged")
    monkeypatch.undo()
    block = tmp_path / "damaged.partial" / "block-00001.arrow"
    damage = bytearray(block.read_bytes())
    damage[1000] ^= 1
    block.write_bytes(damage)
    make_plan(tmp_path, name="damaged")

    assert content(tmp_path / "damaged") == content(whole)


def stop(*_args, **_named):
    raise KeyboardInterrupt
