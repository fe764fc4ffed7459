"""The command: parsing, config files, output, one-line errors, exit codes."""

import errno
import json
import subprocess
import sys

import numpy as np
import pytest
import typer

from ringfeed.pipeline import commands
from ringfeed.pipeline.choices import (
    Balance,
    Basis,
    EncodingErrors,
    LengthBuckets,
    Overflow,
    PackShape,
    Schedule,
    Unsupervised,
)
from ringfeed.pipeline.cli import main
from ringfeed.pipeline.config import SECTIONS
from ringfeed.pipeline.console import Outcome
from ringfeed.pipeline.executor import JobFailedError
from ringfeed.pipeline.manifest import CorruptDataError

PLAN_FLAGS = ["--pack-tokens", "64", "--packs-per-step", "2", "--max-cp", "2"]


@pytest.fixture
def run(capsys):
    """Run a command line; returns exit code, standard output and standard error."""

    def run_command(*arguments):
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_command


@pytest.fixture
def corpus(tmp_path, run):
    (tmp_path / "text").mkdir()
    for i in range(9):
        (tmp_path / "text" / f"{i}.txt").write_text("word " * (i + 1))
    assert run("ingest", tmp_path / "text", "-o", tmp_path / "corpus")[0] == 0
    return tmp_path / "corpus"


def fail_with(monkeypatch, error):
    def body(config, progress):
        raise error

    monkeypatch.setattr(commands, "verify", body)


def test_every_command_runs_and_prints_one_json_object_last(tmp_path, corpus, run):
    plan = tmp_path / "plan"
    for arguments in (
        ["ingest", tmp_path / "text", "-o", corpus],
        ["plan", corpus, "-o", plan, *PLAN_FLAGS, "--report"],
        ["verify", corpus],
        ["verify", plan],
        ["inspect", corpus],
        ["inspect", plan, "--step", 1],
    ):
        code, out, _ = run(*arguments, "--json")
        assert code == 0
        assert isinstance(json.loads(out.splitlines()[-1]), dict)


def test_the_report_has_every_documented_figure(tmp_path, corpus, run):
    _, out, _ = run("plan", corpus, "-o", tmp_path / "plan", *PLAN_FLAGS, "--report", "--json")
    documented = {
        "fill",
        "step_imbalance",
        "step_imbalance_p99",
        "micro_batch_imbalance",
        "displacement_mean",
    }
    documented |= {"displacement_max", "dropped", "split", "truncated"}
    assert documented <= set(json.loads(out.splitlines()[-1]))


def test_progress_and_logs_leave_standard_output_to_the_result(tmp_path, corpus, run):
    _, out, err = run("plan", corpus, "-o", tmp_path / "plan", *PLAN_FLAGS)
    assert len(out.splitlines()) == 1
    assert "plan" in err


def test_plan_says_how_slates_make_steps(tmp_path, corpus, run):
    asked = ("--schedule", "homogeneous", "--long-tokens", 16)
    code, *_ = run("plan", corpus, "-o", tmp_path / "plan", *PLAN_FLAGS, *asked)
    _, out, _ = run("inspect", tmp_path / "plan", "--json")
    recipe = json.loads(out)["recipe"]
    assert (code, recipe["schedule"], recipe["long_tokens"]) == (0, "homogeneous", 16)


def test_lengths_are_planned_without_a_corpus(tmp_path, run):
    lengths, plan = tmp_path / "lengths.npy", tmp_path / "plan"
    np.save(lengths, np.array([5, 0, 70, 12]))
    code, out, _ = run("plan", "--lengths", lengths, "-o", plan, *PLAN_FLAGS, "--json")
    assert (code, json.loads(out)["num_packs"]) == (0, 2)
    assert run("verify", plan)[0] == 0


def test_a_config_file_gives_what_flags_do_not(tmp_path, corpus, run):
    file = tmp_path / "run.yaml"
    file.write_text(
        f"plan: {{corpora: [{corpus}], pack_tokens: 32, packs_per_step: 2, max_cp: 2, epochs: 2}}\n"
    )
    code, out, _ = run("plan", "--config", file, "-o", tmp_path / "plan", "--pack-tokens", 64, "--json")
    assert code == 0
    _, out, _ = run("inspect", tmp_path / "plan", "--json")
    assert (json.loads(out)["recipe"]["pack_tokens"], json.loads(out)["epochs"]) == (64, 2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "ringfeed: Missing command"),
        (["plam"], "ringfeed plam: No such command 'plam'"),
        (["plan", "--pack-token", "3"], "ringfeed plan: No such option: --pack-token"),
        (
            ["plan", "--pack-tokens", "many"],
            "ringfeed plan: Invalid value for '--pack-tokens': 'many' is not an",
        ),
        (["plan", "--pack-tokens"], "ringfeed plan: Option '--pack-tokens' requires an argument"),
        (["verify", "a", "b"], "ringfeed verify: Got unexpected extra argument"),
        (["verify"], "ringfeed verify: path is not given; pass PATH"),
        (["plan", "-o", "p", *PLAN_FLAGS], "ringfeed plan: "),
        (
            ["verify", "/nowhere/at/all"],
            "ringfeed verify: /nowhere/at/all is no corpus, plan or shards",
        ),
        (["verify", "--config", "/nowhere.yaml"], "ringfeed verify: config='/nowhere.yaml' cannot be read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments, told):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(told)
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("two\nlines"), 2),
        (CorruptDataError("tokens-00000.arrow is damaged"), 1),
        (JobFailedError("no workers left"), 1),
        (MemoryError(), 1),
        (ImportError("pip install 'ringfeed[hf]'"), 1),
        (OSError(errno.EACCES, "Permission denied", "/root/x"), 1),
        (KeyboardInterrupt(), 130),
        (typer.Abort(), 130),
    ],
)
def test_each_kind_of_error_has_its_exit_code_and_one_line(run, monkeypatch, error, code):
    fail_with(monkeypatch, error)
    found, _, err = run("verify", "x")
    assert found == code
    assert err.startswith("ringfeed verify: ")
    assert err.count("\n") == 1


def test_a_full_disk_says_that_a_rerun_goes_on(run, monkeypatch):
    fail_with(monkeypatch, OSError(errno.ENOSPC, "No space left on device", "/data/plan.partial/block"))
    _, _, err = run("verify", "x")
    assert "No space left on device: /data/plan.partial/block" in err
    assert "run the same command again" in err


def test_a_bug_keeps_its_traceback(run, monkeypatch):
    fail_with(monkeypatch, KeyError("a bug"))
    with pytest.raises(KeyError):
        run("verify", "x")


def test_an_error_is_also_told_in_json(run, monkeypatch):
    fail_with(monkeypatch, ValueError("no"))
    code, out, _ = run("verify", "x", "--json")
    assert json.loads(out.splitlines()[-1]) == {"error": "no", "exit_code": code}


def test_findings_are_an_exit_code(run, monkeypatch):
    bad = Outcome(text="bad", facts={}, exit_code=1)
    monkeypatch.setattr(commands, "verify", lambda *_: bad)
    assert run("verify", "x")[:2] == (1, "bad\n")


@pytest.mark.parametrize("command", ["ingest", "plan", "fit-cost", "verify", "inspect"])
def test_every_field_of_the_config_is_on_the_command_line(run, command):
    _, out, _ = run(command, "--help")
    model = SECTIONS[command]
    for field in model.model_fields:
        assert model.on_command_line(field).removesuffix("...").split()[-1] in out


@pytest.mark.parametrize("command", ["ingest", "plan", "fit-cost"])
def test_defaults_in_the_help_are_those_of_the_config(run, command):
    _, out, _ = run(command, "--help")
    text = " ".join(out.split())
    for name, field in SECTIONS[command].model_fields.items():
        if isinstance(field.default, str | int | float) and not isinstance(field.default, bool):
            after = text.partition(f"--{name.replace('_', '-')} ")[2]
            assert after.partition("[default: ")[2].startswith(f"{field.default!s}]"), name


def test_help_waits_for_no_heavy_import():
    script = (
        "import sys\nfrom ringfeed.workers.cli import main\nmain(['plan', '--help'])\n"
        "heavy = {'numpy', 'pyarrow', 'torch', 'ray', 'numba', 'yaml', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_closed_pipe_is_no_traceback(corpus):
    command = f"{sys.executable} -m ringfeed.workers.cli inspect {corpus} | true"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("plan", (Balance, LengthBuckets, Overflow, PackShape, Schedule, Unsupervised)),
        ("ingest", (EncodingErrors,)),
        ("fit-cost", (Basis,)),
    ],
)
def test_help_lists_every_word_that_a_flag_takes(command, words, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main([command, "--help"]) == 0
    shown = capsys.readouterr().out
    for kind in words:
        assert "|".join(kind) in shown
