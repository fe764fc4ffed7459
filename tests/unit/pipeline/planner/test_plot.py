"""The picture of a plan: drawn without a display, and refused in one line where it cannot be."""

import sys

import numpy as np
import pytest

from ringfeed.pipeline.cli import main
from ringfeed.pipeline.planner.measure import MeasureOptions, measure
from ringfeed.pipeline.planner.plot import check_plot, plot_plan

SIGNATURES = {"png": b"\x89PNG", "svg": b"<?xml", "pdf": b"%PDF"}


@pytest.fixture
def lengths(tmp_path):
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(1, 400, size=3000))
    return tmp_path / "lengths.npy"


@pytest.mark.parametrize("kind", SIGNATURES)
def test_a_plan_is_drawn_in_each_format(plan_lengths, tmp_path, kind):
    planned = plan_lengths(np.arange(1, 300), pack_tokens=512, packs_per_step=4, slate_size=2)
    path = tmp_path / f"plan.{kind}"
    plot_plan(path, planned.report, measure(planned.plan, MeasureOptions()))
    assert path.read_bytes().startswith(SIGNATURES[kind])
    assert [file.name for file in tmp_path.iterdir() if file.name.endswith(".tmp")] == []


def test_a_plan_of_one_step_is_drawn_too(plan_lengths, tmp_path):
    planned = plan_lengths([3])
    plot_plan(tmp_path / "one.png", planned.report, measure(planned.plan, MeasureOptions()))
    assert (tmp_path / "one.png").stat().st_size > 10_000


def test_more_steps_than_the_picture_is_wide_are_drawn_together(plan_lengths, tmp_path):
    planned = plan_lengths(np.full(2000, 10), packs_per_step=2)
    assert planned.plan.num_steps == 1000
    plot_plan(tmp_path / "long.png", planned.report, measure(planned.plan, MeasureOptions()))
    assert (tmp_path / "long.png").stat().st_size > 10_000


def test_the_command_draws_and_says_where(lengths, tmp_path, capsys):
    plan = ["plan", "--lengths", str(lengths), "-o", str(tmp_path / "plan"), "--pack-tokens", "512"]
    assert main([*plan, "--packs-per-step", "4", "--max-cp", "2", "--plot", str(tmp_path / "p.png")]) == 0
    assert str(tmp_path / "p.png") in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "plan"), "--plot", str(tmp_path / "again.png")]) == 0
    assert (tmp_path / "again.png").read_bytes() == (tmp_path / "p.png").read_bytes()


@pytest.mark.parametrize("name", ["plan.jpeg", "plan", ".png"])
def test_an_unknown_format_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=r"the name must end in .png, .svg, .pdf"):
        check_plot(tmp_path / name)


def test_without_matplotlib_nothing_is_planned_and_one_line_says_what_to_install(
    lengths, tmp_path, capsys, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    plan = ["plan", "--lengths", str(lengths), "-o", str(tmp_path / "plan"), "--pack-tokens", "512"]
    assert main([*plan, "--packs-per-step", "4", "--max-cp", "2", "--plot", str(tmp_path / "p.png")]) == 1
    told = capsys.readouterr().err
    assert "--plot needs 'matplotlib', which is not installed; run: pip install 'ringfeed[report]'" in told
    assert told.count("\n") == 1
    assert not (tmp_path / "plan").exists()
