"""The whole command: base commands and those that need Ray."""

import json

import numpy as np
import pytest

from ringfeed.pipeline.config import SECTIONS
from ringfeed.pipeline.console import Outcome
from ringfeed.workers import commands
from ringfeed.workers.cli import main


@pytest.fixture
def seen(monkeypatch):
    """The configs that reach ``shard`` and ``demo``, which do nothing."""
    configs = []

    def body(config, progress):
        configs.append(config)
        return Outcome(text="done", facts={"done": True})

    for name in ("shard", "demo"):
        monkeypatch.setattr(commands, name, body)
    return configs


def test_help_lists_every_command(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name} " in out for name in SECTIONS)


def test_shard_takes_its_flags(seen, capsys):
    flags = "--cp 4 --layout whole_document --layout-option threshold=512 --tp 2 --unit 16 --slot-budget 9000"
    more = "--skip skip.txt --corpus a --corpus b --workers 3 --json"
    assert main(["shard", "plan", "-o", "shards", *flags.split(), *more.split()]) == 0
    [config] = seen
    assert (config.cp, config.layout, config.layout_options) == (4, "whole_document", {"threshold": 512})
    assert (config.tp, config.unit, config.slot_budget, config.workers) == (2, 16, 9000, 3)
    assert [path.name for path in config.corpus] == ["a", "b"]
    assert config.skip.name == "skip.txt"
    assert json.loads(capsys.readouterr().out) == {"done": True}


def test_every_field_of_the_config_is_on_the_command_line(capsys):
    for command in ("shard", "demo"):
        main([command, "--help"])
        out = capsys.readouterr().out
        for field in set(SECTIONS[command].model_fields) - {"layout_options"}:
            assert SECTIONS[command].on_command_line(field).split()[-1] in out


def test_one_file_describes_a_whole_run(seen, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("shard: {plan: p, output: s, cp: 2, layout: te, layout_options: {}}\ndemo: {steps: 5}\n")
    assert main(["shard", "--config", str(file)]) == 0
    assert main(["demo", "--config", str(file), "--workers", "1"]) == 0
    assert (seen[0].layout, seen[1].steps, seen[1].workers) == ("te", 5, 1)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("shard plan -o s --layout te", "cp is not given; pass --cp"),
        ("shard plan -o s --layout te --cp 0", "cp=0: must be at least 1"),
        ("shard plan -o s --layout te --cp 2 --layout-option x", "layout_option='x': must be KEY=VALUE"),
        ("demo --steps 0", "steps=0: must be at least 1"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(seen, capsys, arguments, told):
    assert main(arguments.split()) == 2
    err = capsys.readouterr().err
    assert told in err
    assert err.count("\n") == 1
    assert seen == []


def test_layout_options_are_json_where_they_look_like_it():
    given = ["threshold=512", "window=[-1, 0]", "algorithm=min_heap", "uneven=true", "note=a=b"]
    assert commands.parse_options(given) == {
        "threshold": 512,
        "window": [-1, 0],
        "algorithm": "min_heap",
        "uneven": True,
        "note": "a=b",
    }


def test_sharding_a_plan_of_lengths_alone_is_refused_in_one_line(tmp_path, capsys):
    np.save(tmp_path / "lengths.npy", np.array([5, 9]))
    plan = ["plan", "--lengths", str(tmp_path / "lengths.npy"), "-o", str(tmp_path / "plan")]
    assert main([*plan, "--pack-tokens", "64", "--packs-per-step", "1", "--max-cp", "2"]) == 0
    capsys.readouterr()
    shards = str(tmp_path / "shards")
    assert main(["shard", str(tmp_path / "plan"), "-o", shards, "--cp", "2", "--layout", "te"]) == 2
    assert "was planned from lengths alone" in capsys.readouterr().err
