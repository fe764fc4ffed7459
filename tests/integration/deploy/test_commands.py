"""Every command line in deploy/ is one that its program takes; ringfeed's go through its own config, too."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from ringfeed.pipeline import cli_options
from ringfeed.pipeline.config import SECTIONS
from ringfeed.pipeline.config_file import load_config
from ringfeed.workers import cli

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "deploy"
SCRIPTS = [DEPLOY / "one_box.sh", DEPLOY / "slurm" / "train.sbatch"]
IMAGE_EXAMPLES = "/opt/ringfeed/examples/"
# What a script gets from its caller or from Slurm, or finds out.
GIVEN = {
    "plan": "/data/plan",
    "train": "/data/train.py",
    "url": "flight://node:8815",
    "run": "/tmp/run",  # noqa: S108
    "head": "node-0",
    "builders": "64",
    "SLURM_JOB_ID": "4711",
    "PWD": "/home/me",
    "RAY_ADDRESS": "node-0:6379",
    "JOB_COMPLETION_INDEX": "0",
    "@": "--steps 4",
}


def joined(text):
    """The lines of a script, those with a backslash at their end put together."""
    return [line.strip() for line in text.replace("\\\n", " ").splitlines()]


def filled_in(line, text):
    """``line`` with its variables replaced: those that it gets, and those that the script sets itself."""
    known = {**GIVEN, **dict(re.findall(r'^: "\$\{(\w+):=([^}"]*)\}"', text, re.MULTILINE))}
    known |= dict.fromkeys(re.findall(r"^(\w+)=\$\(\(", text, re.MULTILINE), "30123")
    line = re.sub(r"\$\{#\w+\[@\]\}", "2", line)
    line = re.sub(r"\$\{\w+\[0\]\}", "node-1", line)
    return re.sub(r"\$\{?(\w+|@)\}?", lambda name: known[name[1]], line)


def commands_in(text, program):
    """The words after ``program`` in every command of a script that is one."""
    found = []
    for line in joined(text):
        at = re.search(rf"(?:^|exec |\" )({program} .*)", line)
        if at and not line.startswith("#"):
            words = shlex.split(re.split(r" &| ?>", filled_in(at[1], text))[0])
            found.append(words[1:])
    return found


def scripts():
    """Where it stands, and the text of every script in deploy/."""
    found = [(path.name, path.read_text()) for path in SCRIPTS]
    for path in sorted((DEPLOY / "kuberay").rglob("*.yaml")):
        found += [
            (str(path.relative_to(DEPLOY)), text)
            for text in strings_of(list(yaml.safe_load_all(path.read_text())))
        ]
    return found


def strings_of(value):
    if isinstance(value, str):
        return [value]
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    return [text for part in parts for text in strings_of(part)]


def all_of(program):
    return [
        pytest.param(words, id=f"{where}: {program} {words[0] if words else ''}")
        for where, text in scripts()
        for words in commands_in(text, program)
    ]


@pytest.fixture
def parsed(monkeypatch):
    """Parse command lines to the end, config included, and run nothing; gives (command, its config)."""
    seen = []

    def check_only(name, body, *, flags, config, as_json):
        seen.append((name, load_config(SECTIONS[name], flags=flags, file=config)))
        return 0

    for module in (cli, cli_options):
        monkeypatch.setattr(module, "run_command", check_only)
    return seen


@pytest.mark.parametrize("words", all_of("ringfeed"))
def test_ringfeed_takes_its_command_lines(words, parsed, capsys):
    assert cli.main(words) == 0, capsys.readouterr().err
    assert [name for name, _ in parsed] == [words[0]]


def test_all_that_is_there_was_found():
    assert sorted(parameter.values[0][0] for parameter in all_of("ringfeed")) == [
        "serve",
        "serve",
        "serve",
        "shard",
    ]
    assert len(all_of("torchrun")) == 3
    assert len(all_of("ray")) == 3


@pytest.mark.parametrize("fault", ["--nodebytes 5", "--cp zero", "--cp 0", "--port"])
def test_a_wrong_flag_is_found(fault, parsed, capsys):
    good = next(parameter.values[0] for parameter in all_of("ringfeed") if parameter.values[0][0] == "serve")

    assert cli.main([*good, *fault.split()]) == 2
    assert parsed == []
    assert capsys.readouterr().err


@pytest.mark.parametrize("words", all_of("ray"))
def test_ray_takes_its_command_lines(words):
    from ray.scripts.scripts import cli as ray_cli

    assert words[0] == "start"
    start = ray_cli.commands["start"]
    context = start.make_context("start", words[1:])

    assert context.params["head"] != bool(context.params["address"])
    assert context.params["disable_usage_stats"]


@pytest.mark.parametrize("words", all_of("torchrun"))
def test_torchrun_and_the_example_take_their_command_lines(words):
    from torch.distributed.run import parse_args

    arguments = parse_args(words)

    script = arguments.training_script
    if script.startswith(IMAGE_EXAMPLES):
        options = {word for word in arguments.training_script_args if word.startswith("--")}
        text = (ROOT / "examples" / script.removeprefix(IMAGE_EXAMPLES)).read_text()
        assert {option for option in options if f'"{option}"' not in text} == set()
    assert arguments.training_script_args[0].startswith("flight://")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_scripts_are_bash_that_stops_at_the_first_error(path):
    text = path.read_text()

    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0  # noqa: S607
    assert text.startswith("#!/usr/bin/env bash\n")
    assert "\nset -euo pipefail\n" in text
    assert "trap clean_up EXIT" in text
    assert path.stat().st_mode & 0o111


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_tokens_are_made_after_umask_and_are_no_arguments(path):
    lines = joined(path.read_text())
    made = [number for number, line in enumerate(lines) if "/dev/urandom" in line]

    assert made
    assert lines.index("umask 077") < min(made)
    assert not [line for line in lines if re.search(r"--token[ =]", line)]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_variables_are_quoted(path):
    """What shellcheck calls SC2086: outside of [[ ]] and (( )) an unquoted variable is split."""
    for line in joined(path.read_text()):
        if line.startswith("#") or "[[" in line:
            continue
        bare = re.sub(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|\(\(.*?\)\)|^\w+=\S+( \w+=\S+)*$|#.*", "", line)
        # Process ids, which are split on purpose.
        assert re.findall(r"\$(?!\(|!|\?)\S+", bare.replace("for process in $ranks $serve;", "")) == [], line
