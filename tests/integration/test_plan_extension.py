"""A plan made longer: the same steps as a longer plan from the start, and what happens to loader states."""

import json
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from ringfeed.pipeline.cli import main
from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.executor import SerialExecutor
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.progress import SilentProgress
from ringfeed.pipeline.verify import verify

FLAGS = ["--pack-tokens", "128", "--packs-per-step", "2", "--pad-multiple", "4", "--window", "4"]
FLAGS += ["--block-steps", "10"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(0)
    for name, count in (("web", 150), ("code", 90)):
        documents = [rng.integers(1, 99, size=n, dtype=np.int32) for n in rng.integers(1, 90, size=count)]
        write_corpus(folder / name, documents, name=name, pad_id=0)
    return folder


@pytest.fixture
def run(capsys):
    def command(*arguments):
        code = main([*map(str, arguments), "--json"])
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, json.loads(captured.out.splitlines()[-1])

    return command


@pytest.fixture(params=["best_fit", "work"])
def made(root, run, tmp_path, request):
    """Make a plan of both corpora and open it."""

    def make(name, *flags):
        asked = [*FLAGS, "--balance", request.param, *flags]
        code, facts = run("plan", root / "web", root / "code", "-o", tmp_path / name, *asked)
        assert code == 0, facts
        return Plan.open(tmp_path / name)

    return make


@pytest.fixture
def extended(run):
    """Make a plan longer and open it."""

    def extend(plan, *flags):
        code, facts = run("plan", "--extend", plan.path, *flags)
        assert code == 0, facts
        return Plan.open(facts["output"])

    return extend


def chains(plan):
    return [plan.chain(i) for i in range(plan.num_steps)]


def problems(plan):
    report = verify(plan.path, executor=SerialExecutor(), progress=SilentProgress())
    assert report.unchecked == ()
    return [finding.problem for finding in report.findings]


def content(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def loader(plan):
    return Loader(plan.path, dp_rank=0, dp_size=1, cp_rank=0, cp_size=1, layout="te")


def state_after(plan, num_batches):
    with loader(plan) as batches:
        iterator = iter(batches)
        for _ in range(num_batches):
            next(iterator)
        return batches.state_dict()


def test_an_extended_plan_has_the_steps_of_one_made_at_once(made, extended):
    plan = made("plan", "--seed", 1)
    before, chain = content(plan.path), chains(plan)
    flush = plan.manifest.facts["flush_step"]
    longer = extended(plan, "--epochs", 3)

    assert chains(longer) == chains(made("at-once", "--seed", 1, "--epochs", 3))
    assert chains(longer)[:flush] == chain[:flush]
    assert problems(longer) == []
    kept = [name for name in before if name.startswith("block-") and int(name[6:11]) < flush // 10]
    assert kept
    assert all((longer.path / name).read_bytes() == before[name] for name in kept)


def test_a_plan_may_be_extended_again_and_again(made, extended):
    plan = made("plan", "--seed", 1)
    for epochs in (2, 3):
        plan = extended(plan, "--epochs", epochs)

    assert chains(plan) == chains(made("at-once", "--seed", 1, "--epochs", 3))
    assert len(plan.replaced_steps) == 2


def test_a_plan_that_ended_at_a_step_goes_on_there(made, extended):
    plan = made("plan", "--steps", 33)
    longer = extended(plan, "--steps", 47)

    assert longer.replaced_steps == ((33, 33),)
    assert chains(longer) == chains(made("at-once", "--steps", 47))
    assert chains(extended(longer)) == chains(made("whole"))
    assert problems(longer) == []


def test_without_a_change_nothing_is_done(made, extended):
    plan = made("plan")
    longer = extended(plan, "--epochs", 2)
    times = {path: path.stat().st_mtime_ns for path in longer.path.iterdir()}
    extended(longer, "--epochs", 2)

    assert {path: path.stat().st_mtime_ns for path in longer.path.iterdir()} == times


def test_another_output_leaves_the_old_plan_as_it_is(made, extended, tmp_path):
    plan = made("plan")
    before = content(plan.path)
    longer = extended(plan, "--epochs", 2, "-o", tmp_path / "longer")

    assert content(plan.path) == before
    assert longer.path == tmp_path / "longer"
    assert chains(longer) == chains(made("at-once", "--epochs", 2))


@pytest.mark.parametrize("flags", [("--epochs", 2), ("--weights", "web=1,code=3")], ids=["epochs", "weights"])
def test_killed_anywhere_an_extension_ends_with_the_same_bytes(made, run, monkeypatch, flags):
    whole = made("whole", "--weights", "web=1,code=1")
    assert run("extend", whole.path, *flags)[0] == 0
    plan = made("plan", "--weights", "web=1,code=1")
    replace, calls = Path.replace, []

    def dying(self, target):
        calls.append(target)
        if len(calls) % 3 == 0:
            raise KeyboardInterrupt
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", dying)
    runs = 0
    code = None
    while code != 0:
        runs += 1
        with suppress(KeyboardInterrupt):
            code = main(["extend", str(plan.path), *map(str, flags)])
        assert runs < 60
    monkeypatch.undo()

    assert runs > 3
    assert content(plan.path) == content(whole.path)


def test_states_before_the_flush_go_on_and_later_ones_are_told_the_last_common_step(made, extended):
    plan = made("plan", "--seed", 2)
    flush = plan.manifest.facts["flush_step"]
    # The first step of a flush may be the same in a longer plan; the last ones are not.
    common, replaced = state_after(plan, 2 * flush), state_after(plan, 2 * plan.num_steps - 1)
    with loader(plan) as batches:
        expected = [batch.info.digest for batch in batches][: 2 * flush]
    longer = extended(plan, "--epochs", 2)
    with loader(longer) as batches:
        assert [batch.info.digest for batch in batches][: 2 * flush] == expected
        batches.load_state_dict(common)
        assert next(iter(batches)).info.step == flush
        told = rf"from step {flush} on; the last common step is {flush - 1}: load a state saved before"
        with pytest.raises(ValueError, match=told):
            batches.load_state_dict(replaced)


def test_a_state_beyond_a_shorter_replacement_is_told_so_too(made, extended):
    plan = made("plan", "--weights", "web=1,code=1")
    state = state_after(plan, 2 * plan.num_steps - 1)
    longer = extended(plan, "--weights", "web=0,code=1", "--from-step", 10)

    assert longer.num_steps < plan.num_steps - 1
    with loader(longer) as batches, pytest.raises(ValueError, match="last common step is 9"):
        batches.load_state_dict(state)


def test_a_reader_that_was_open_is_told_where_steps_were_replaced(made, extended):
    plan = made("plan", "--seed", 2)
    flush = plan.manifest.facts["flush_step"]
    extended(plan, "--epochs", 2)

    assert plan.step_packs(flush - 1).step == flush - 1
    with pytest.raises(ValueError, match="was extended since it was opened, and block"):
        plan.step_packs(plan.num_steps - 1)


def shares(plan, first, last):
    tokens = [np.sum(plan.step(i).column("tokens_by_source").to_pylist(), axis=0) for i in range(first, last)]
    total = np.sum(tokens, axis=0)
    return total / total.sum()


def test_new_weights_append_a_segment_and_keep_every_cursor(made, extended, tmp_path):
    file = tmp_path / "mixture.json"
    sources = {name: {"weight": 1, "exhausted": "repeat"} for name in ("web", "code")}
    file.write_text(json.dumps({"sources": sources}))
    plan = made("plan", "--mixture", file, "--steps", 60, "--seed", 1)
    chain = chains(plan)
    longer = extended(plan, "--steps", 160, "--weights", "web=1,code=4", "--from-step", 35)

    assert [segment.first_step for segment in longer.segments] == [0, 30]
    assert longer.recipe_fingerprint == plan.recipe_fingerprint
    assert chains(longer)[:30] == chain[:30]
    assert shares(longer, 0, 28) == pytest.approx([0.5, 0.5], abs=0.05)
    assert shares(longer, 40, 160) == pytest.approx([0.2, 0.8], abs=0.03)
    # Cursors are those of the first segment: no document is lost or doubled in its epoch.
    assert problems(longer) == []


def test_a_source_that_dropped_out_comes_back_with_more_epochs(made, extended, tmp_path):
    file = tmp_path / "mixture.json"
    sources = {"web": {"weight": 1, "exhausted": "drop"}, "code": {"weight": 1, "exhausted": "repeat"}}
    file.write_text(json.dumps({"sources": sources}))
    plan = made("plan", "--mixture", file, "--steps", 70)
    assert shares(plan, 65, 70).tolist() == [0, 1]
    longer = extended(plan, "--steps", 110, "--epochs", 2)

    assert shares(longer, 80, 100) == pytest.approx([0.5, 0.5], abs=0.1)
    assert problems(longer) == []


@pytest.mark.parametrize(
    "asked",
    [
        ([], ["--pack-tokens", 256], "--pack-tokens: an extension keeps this as the plan has it"),
        ([], ["--seed", 3], "--seed: an extension keeps this"),
        (["--epochs", 2], ["--epochs", 1], "has epochs=2; an extension has at least as many"),
        ([], ["--steps", 20], "steps=20 keeps nothing to plan: the extension begins at step"),
        ([], ["--weights", "web=1,code=1"], "was planned without a mixture: its corpora are one stream"),
        ([], ["--from-step", 999], "from_step=999 is not in"),
        (["--weights", "web=1,code=1"], ["--weights", "web=1"], "gives no weight to source 'code'"),
        (["--weights", "web=1,code=1"], ["--mixture", "UNIT"], "counts its weights in tokens"),
        (["--weights", "web=1,code=1"], ["--mixture", "DEFER"], "defers documents longer than 40 tokens"),
        ([], ["--mixture", "UNIT"], r"draws from 1 source(s), the new mixture from 2"),
        (["--window", 99, "--weights", "web=1,code=1"], ["--weights", "web=2,code=1"], "than its look-ahead"),
        ([], ["--corpora", "HERE"], "may change epochs, steps and the mixture alone"),
    ],
)  # fmt: skip
def test_what_an_extension_cannot_change_is_refused(made, run, root, tmp_path, asked):
    first, flags, message = asked
    sources = {"web": 1, "code": 1}
    files = {
        "UNIT": {"sources": sources, "unit": "documents"},
        "DEFER": {"sources": sources, "curriculum": {"limits": [{"step": 50, "max_tokens": 40}]}},
    }
    for name, parts in files.items():
        (tmp_path / name).write_text(json.dumps(parts))
    named = {"HERE": root / "web", **{name: tmp_path / name for name in files}}
    plan = made("plan", *first)
    before = content(plan.path)
    command = ["extend", plan.path] if "--corpora" in flags else ["plan", "--extend", plan.path]
    code, facts = run(*command, *(named.get(flag, flag) for flag in flags))

    assert (code, message in facts["error"]) == (2, True), facts
    assert content(plan.path) == before
    assert not plan.path.with_name("plan.partial").exists()


def test_a_step_to_begin_from_needs_a_plan_to_extend(run, root, tmp_path):
    code, facts = run("plan", root / "web", "-o", tmp_path / "plan", *FLAGS, "--from-step", 3)

    assert (code, "pass --extend PLAN" in facts["error"]) == (2, True)
