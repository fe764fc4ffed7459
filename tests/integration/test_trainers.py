"""The loops of ``docs/trainers.md``: as shown, on one gloo process and on two, and on after a checkpoint.

TransformerEngine's runs over a stand-in of its attention, which takes the same arguments on a CPU.
"""

import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENT, EXAMPLES = ROOT / "docs" / "trainers.md", ROOT / "examples"
STAND_IN = Path(__file__).with_name("stand_in")
LINE = re.compile(r"step (\d+) loss (\S+) gradient (\S+)")

pytestmark = [pytest.mark.dist, pytest.mark.ray, pytest.mark.slow]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, run_document):
    """Where everything that the document says has been done."""
    folder = tmp_path_factory.mktemp("trainers")
    run_document(DOCUMENT, folder)
    return folder


@pytest.fixture(scope="module")
def plain(folder):
    """The plain loop: steps 0 to 2 on one rank, 3 on two."""
    return lines(folder / "plain-one-rank.txt") + lines(folder / "plain-two-ranks.txt")[1:]


def lines(path):
    found = LINE.findall(path.read_text())
    return [(int(step), float(loss), float(norm)) for step, loss, norm in found]


def assert_same(found, expected, *, steps):
    assert [step for step, _, _ in found] == [step for step, _, _ in expected] == steps
    for (step, *numbers), (_, *wanted) in zip(found, expected, strict=True):
        assert numbers == pytest.approx(wanted, rel=2e-4), f"step {step}: loss and gradient norm"


def test_the_document_shows_the_examples_as_they_are(blocks_of):
    shown = {block.file: block.text for block in blocks_of(DOCUMENT) if block.file is not None}

    assert shown == {path.name: path.read_text() for path in EXAMPLES.glob("*.py")}


def test_the_loss_begins_at_the_logarithm_of_the_vocabulary_and_falls(plain):
    losses = [loss for _, loss, _ in plain]

    assert losses[0] == pytest.approx(math.log(259), abs=0.2)
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize("loop", ["plain", "transformers"])
def test_two_cp_ranks_go_on_after_a_checkpoint_of_one_as_that_one_does(folder, loop):
    one, two = (lines(folder / f"{loop}-{ranks}.txt") for ranks in ("one-rank", "two-ranks"))

    assert [step for step, _, _ in (*one, *two)] == [0, 1, 2, 2, 3]
    assert_same(one[2:], two[:1], steps=[2])


def test_fsdp2_from_shards_then_from_the_plan_at_another_cp_size_is_the_plain_loop(folder, plain):
    assert_same(lines(folder / "fsdp2.txt"), plain, steps=[0, 1, 2, 3])


def test_the_loop_of_transformer_engine_is_the_plain_one_over_a_stand_in(folder, plain, tmp_path):
    for path in EXAMPLES.glob("*.py"):
        shutil.copy(path, tmp_path)
    paths = [str(STAND_IN), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]

    result = subprocess.run(
        [*command, "train_te.py", str(folder / "plan"), "--cp", "2", "--steps", "2"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )

    assert result.returncode == 0, result.stdout + result.stderr
    (tmp_path / "lines.txt").write_text(result.stdout)
    assert_same(lines(tmp_path / "lines.txt"), plain[:2], steps=[0, 1])


def test_each_loop_loads_shards_and_steps_by_itself():
    """No example leaves out what the document says that each of them does."""
    wanted = (
        "build_device_mesh",
        "Loader(",
        ".kwargs(",
        "global_supervised=",
        "reduction=",
        "optimizer.step()",
    )
    for path in EXAMPLES.glob("train_*.py"):
        text = path.read_text()
        assert [word for word in wanted if word not in text] == [], path.name
        assert re.search(r'"loader": loader', text), path.name
