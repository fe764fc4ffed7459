"""Mixtures of real corpora: planned by the command, verified, loaded, refused."""

import json
from dataclasses import replace

import numpy as np
import pytest

from ringfeed.pipeline.cli import main
from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.executor import SerialExecutor
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.manifest import file_entry, read_manifest, write_manifest
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_blocks import block_name, read_block, write_block
from ringfeed.pipeline.progress import SilentProgress
from ringfeed.pipeline.verify import verify

FLAGS = ["--pack-tokens", "256", "--packs-per-step", "4", "--pad-multiple", "4", "--window", "4"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Three corpora: web, code, and books of few long documents."""
    folder = tmp_path_factory.mktemp("mixtures")
    rng = np.random.default_rng(0)
    for name, count, longest in (("web", 400, 120), ("code", 200, 60), ("books", 25, 600)):
        documents = [
            rng.integers(1, 1000, size=length, dtype=np.int32)
            for length in rng.integers(1, longest, size=count)
        ]
        write_corpus(folder / name, documents, name=name, pad_id=0)
    return folder


@pytest.fixture
def run(root, capsys):
    """Plan the three corpora; returns exit code, facts and errors."""

    def command(output, *flags):
        corpora = [str(root / name) for name in ("web", "code", "books")]
        code = main(["plan", *corpora, "-o", str(output), *FLAGS, *map(str, flags), "--json"])
        captured = capsys.readouterr()
        return code, json.loads(captured.out.splitlines()[-1]), captured.err

    return command


def mixture(tmp_path, **parts):
    file = tmp_path / "mixture.json"
    file.write_text(json.dumps(parts))
    return file


def policies(exhausted, **changes):
    weights = {"web": 0.5, "code": 0.3, "books": 0.2}
    return {
        name: {"weight": weight, "exhausted": exhausted, **changes.get(name, {})}
        for name, weight in weights.items()
    }


def problems(folder):
    report = verify(folder, executor=SerialExecutor(), progress=SilentProgress())
    assert report.unchecked == ()
    return [finding.problem for finding in report.findings]


CURRICULUM = {
    "limits": [{"step": step, "max_tokens": tokens} for step, tokens in ((0, 32), (9, 100), (20, None))]
}
LINEAR = {
    "interpolation": "linear",
    "points": [{"step": 15, "weights": {"web": 0.1, "code": 0.1, "books": 0.8}}],
}


@pytest.mark.parametrize(
    ("parts", "flags"),
    [
        ({"sources": policies("stop")}, ["--seed", 3]),
        ({"sources": policies("drop")}, ["--epochs", 2, "--overflow", "drop"]),
        ({"sources": policies("repeat")}, ["--steps", 90, "--seed", 1, "--overflow", "truncate"]),
        ({"sources": policies("repeat"), "unit": "documents", "schedule": LINEAR}, ["--steps", 37]),
        ({"sources": policies("drop"), "curriculum": CURRICULUM}, ["--seed", 2]),
        ({"sources": policies("repeat"), "curriculum": CURRICULUM}, ["--steps", 31, "--seed", 2]),
        ({"curriculum": {**CURRICULUM, "long_documents": "cut"}}, []),
        ({"curriculum": CURRICULUM}, ["--seed", 5, "--epochs", 2]),
    ],
    ids=["stop", "drop", "repeat", "documents", "defer", "defer-open-end", "cut", "no-weights"],
)
def test_every_token_that_was_drawn_is_planned_once(tmp_path, run, parts, flags):
    code, facts, err = run(tmp_path / "plan", "--mixture", mixture(tmp_path, **parts), *flags)

    assert (code, err) == (0, err)
    assert problems(tmp_path / "plan") == []
    if "--steps" in flags:
        assert facts["num_steps"] == flags[flags.index("--steps") + 1]


def test_a_plan_counts_tokens_and_supervised_tokens_per_source_and_step(tmp_path, run):
    assert run(tmp_path / "plan", "--weights", "web=0.5,code=0.3,books=0.2")[0] == 0
    plan = Plan.open(tmp_path / "plan")
    corpora = plan.open_corpora()
    for i in range(plan.num_steps):
        step = plan.step(i).to_pydict()
        for row in range(len(step["pack"])):
            sources = corpora.source_of(np.array(step["documents"][row]))
            by_source = np.bincount(sources, weights=step["lengths"][row], minlength=3)
            assert step["tokens_by_source"][row] == by_source.tolist()
            assert step["tokens"][row] == sum(step["lengths"][row])
    counted = plan.manifest.facts["source_tokens"]
    assert sum(counted) == plan.report["tokens"]
    assert np.array(counted) / sum(counted) == pytest.approx([0.5, 0.3, 0.2], abs=0.02)
    with Loader(tmp_path / "plan", dp_rank=0, dp_size=1, cp_rank=0, cp_size=1, layout="te") as loader:
        supervised = {batch.info.step: batch.info.supervised_by_source for batch in loader}
    sums = [sum(of_step[name] for of_step in supervised.values()) for name in ("web", "code", "books")]
    assert sums == plan.manifest.facts["source_supervised"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--weights", "web=0,code=0,books=0"], "the weights at step 0 sum to 0"),
        (["--weights", "web=-1,code=1,books=1"], "weights.web=-1.0: must be at least 0"),
        (["--weights", "web=nan,code=1,books=1"], "weights.web=nan: must be finite"),
        (["--weights", "web=1,cod=1,books=1"], "names source 'cod', which is none of the plan's"),
        (["--weights", "web=1,code=1"], "gives no weight to source 'books'"),
        (["--weights", "web"], "is not made of NAME=NUMBER"),
        (["--weights", "web=1,web=1"], "is not made of NAME=NUMBER"),
        (["--mixture", "no.yaml"], "mixture='no.yaml' cannot be read"),
        (["--steps", 0], "must be at least 1"),
        (["--workers", 0], "must be at least 1"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)  # fmt: skip
def test_a_mixture_that_makes_no_sense_is_refused_in_one_line(tmp_path, run, flags, message):
    code, facts, err = run(tmp_path / "plan", *flags)

    assert code == 2
    assert message in facts["error"]
    assert sum(line.startswith("ringfeed ") for line in err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_plan_that_would_never_end_is_refused(tmp_path, run):
    file = mixture(tmp_path, sources=policies("repeat"))
    code, facts, _ = run(tmp_path / "plan", "--mixture", file)

    assert code == 2
    assert "would never end: sources repeat and none stops it; pass --steps N" in facts["error"]


def test_weights_and_a_mixture_file_are_two_ways_to_say_one_thing(tmp_path, run):
    file = mixture(tmp_path, sources=policies("stop"))
    code, facts, _ = run(tmp_path / "plan", "--mixture", file, "--weights", "web=1,code=1,books=1")

    assert code == 2
    assert "mixture and weights say the same thing" in facts["error"]


def forge_block(folder, change):
    """Change the rows of block 0 and set all checksums right again."""
    manifest = read_manifest(folder, format="ringfeed-plan")
    block = read_block(folder, manifest.files[0])
    write_block(folder / block_name(0), change(block.rows), block.facts)
    entry = file_entry(folder, block_name(0), rows=len(block.rows.steps))
    write_manifest(folder, replace(manifest, files=(entry, *manifest.files[1:])))


def test_wrong_token_counts_are_found(tmp_path, run):
    assert run(tmp_path / "plan", "--weights", "web=1,code=1,books=1")[0] == 0

    def one_more(rows):
        tokens = rows.tokens.copy()
        tokens[3, 1] += 1
        return replace(rows, tokens=tokens)

    forge_block(tmp_path / "plan", one_more)
    assert any("pack 3 counts other tokens than it has" in problem for problem in problems(tmp_path / "plan"))


def test_a_document_that_was_never_drawn_is_found(tmp_path, run):
    # The books end the plan, and most of the web is never drawn.
    file = mixture(tmp_path, sources=policies("stop"))
    assert run(tmp_path / "plan", "--mixture", file)[0] == 0

    def last_of_web(rows):
        documents = rows.pieces.documents.copy()
        documents[np.flatnonzero(documents < 400)[0]] = 399
        return replace(rows, pieces=replace(rows.pieces, documents=documents))

    forge_block(tmp_path / "plan", last_of_web)
    assert "document 399 in epoch 0 was never drawn" in problems(tmp_path / "plan")
