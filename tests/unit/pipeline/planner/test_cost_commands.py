"""Cost models on the command line: ``fit-cost`` makes a table, ``plan`` uses it and names it."""

import json

import numpy as np
import pytest

from ringfeed.pipeline.cli import main
from ringfeed.pipeline.plan import Plan


@pytest.fixture
def samples(tmp_path):
    draw = np.random.default_rng(0)
    lines = ["lengths,milliseconds"]
    for _ in range(30):
        pack = draw.integers(1, 1025, size=int(draw.integers(1, 9)))
        lines.append(f"{' '.join(map(str, pack))},{(pack * 0.01 + pack**2 * 1e-5).sum() + 3:.6f}")
    (tmp_path / "samples.csv").write_text("\n".join(lines))
    return tmp_path / "samples.csv"


@pytest.fixture
def make_plan(tmp_path):
    np.save(tmp_path / "lengths.npy", np.arange(1, 1000))

    def make(name, *flags):
        sizes = ("--pack-tokens", "1000", "--packs-per-step", "8", "--pad-multiple", "1")
        source = ("--lengths", str(tmp_path / "lengths.npy"), "-o", str(tmp_path / name))
        return main(["plan", *source, *sizes, *flags])

    return make


def test_a_fitted_table_shapes_a_plan_and_is_named_in_its_recipe(samples, make_plan, tmp_path, capsys):
    table = tmp_path / "table.csv"
    assert main(["fit-cost", str(samples), "-o", str(table), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["coefficients"]["squares"] == pytest.approx(1e-5, rel=0.01)
    assert make_plan("plan", "--cost-model", f"table:{table}") == 0
    assert Plan.open(tmp_path / "plan").recipe.cost_model == facts["cost_model"]


def test_plans_of_two_cost_models_are_two_plans(make_plan, tmp_path, capsys):
    assert make_plan("plan", "--cost-model", "7b") == 0
    assert make_plan("plan", "--cost-model", "70b") == 2
    told = capsys.readouterr().err
    assert "quadratic:linear_tokens=24576" in told
    assert "quadratic:linear_tokens=49152" in told


def test_the_costs_of_packs_are_those_of_the_model(make_plan, tmp_path):
    assert make_plan("plan", "--cost-model", "tokens") == 0
    packs = Plan.open(tmp_path / "plan").step_packs(0)
    sums = np.add.reduceat(packs.pieces.lengths, packs.offsets[:-1])
    assert packs.costs.tolist() == sums.tolist()


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("8b", "cost_model='8b' is no cost model; give one of 7b, 70b, tokens"),
        ("table:none.csv", "'none.csv' is not a file"),
    ],
)
def test_a_model_that_is_none_is_a_mistake_told_in_one_line(make_plan, capsys, model, told):
    assert make_plan("plan", "--cost-model", model) == 2
    out = capsys.readouterr()
    assert told in out.err
    assert out.err.count("\n") == 1


def test_the_worst_samples_are_named_for_a_person(samples, tmp_path, capsys):
    assert main(["fit-cost", str(samples), "-o", str(tmp_path / "table.csv"), "--basis", "piecewise"]) == 0
    out = capsys.readouterr().out
    assert "error of a pack: typically" in out
    assert out.count("samples.csv:") == 3
    assert (tmp_path / "table.csv").read_text().startswith("# 30 packs; basis piecewise")


def test_a_tolerance_that_is_none_is_refused(samples, tmp_path, capsys):
    assert main(["fit-cost", str(samples), "-o", str(tmp_path / "t.csv"), "--tolerance", "0"]) == 2
    assert "tolerance=0.0: " in capsys.readouterr().err


def test_the_samples_are_not_overwritten(samples, capsys):
    before = samples.read_text()
    assert main(["fit-cost", str(samples), "-o", str(samples)]) == 2
    assert "is the file of samples" in capsys.readouterr().err
    assert samples.read_text() == before
