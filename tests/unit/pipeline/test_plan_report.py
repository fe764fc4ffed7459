"""``plan --report`` and ``inspect --report``: any dp, several cost models, bounds beside figures."""

import json

import numpy as np
import pytest

from ringfeed.pipeline.cli import main

SIZES = ("--pack-tokens", "512", "--packs-per-step", "8", "--slate-size", "4", "--max-cp", "2")


@pytest.fixture
def made(tmp_path, capsys):
    """Plan 2,000 lengths; returns what the command says, as JSON or as text."""
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(1, 512, size=2000))

    def run(*flags, command="plan"):
        source = ("--lengths", str(tmp_path / "lengths.npy"), "-o", str(tmp_path / "plan"), *SIZES)
        code = main([command, *(source if command == "plan" else (str(tmp_path / "plan"),)), *flags])
        told = capsys.readouterr()
        return code, (json.loads(told.out) if "--json" in flags and code == 0 else told.out), told.err

    return run


def test_every_dp_and_cost_model_has_an_entry_with_bounds(made):
    flags = ("--report-dp", "2,8", "--report-cost-model", "tokens", "--report-cost-model", "70b")
    code, facts, _ = made("--report", *flags, "--json")
    assert code == 0
    names = ["quadratic:linear_tokens=24576", "tokens", "quadratic:linear_tokens=49152"]
    asked = [(entry["dp_size"], entry["cost_model"]) for entry in facts["balances"]]
    assert asked == [(dp, name) for dp in (4, 2, 8) for name in names]
    for entry in facts["balances"]:
        assert 1 <= entry["documents_bound"] <= entry["step_imbalance_bound"] <= entry["step_imbalance"]
    assert facts["step_imbalance_bound"] == facts["balances"][0]["step_imbalance_bound"]
    assert facts["fill"] + facts["slot_waste"] + facts["tail_waste"] == pytest.approx(1)
    assert sum(facts["displacement_counts"]) == facts["pieces"]


def test_an_existing_plan_reports_the_same(made):
    flags = ("--report-dp", "2", "--json")
    _, planned, _ = made("--report", *flags)
    _, inspected, _ = made("--report", *flags, command="inspect")
    assert inspected["kind"] == "plan"
    assert {name: planned[name] for name in inspected["report"]} == inspected["report"]


def test_a_report_for_a_person_shows_bounds_in_brackets(made):
    _, out, _ = made("--report-dp", "2")
    assert "  fill            9" in out
    assert "% at most" in out
    assert "    dp 2, quadratic:linear_tokens=24576\n      all steps       step 1." in out
    assert "      before the end  step 1." in out
    assert made("--report", command="inspect")[1].count("dp 4, quadratic") == 1


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--report-dp", "3"), "dp_size may be one of [1, 2, 4, 8]"),
        (("--report-dp", "2,x"), "report_dp='x': must be an integer"),
        (("--report-dp", "0"), "report_dp=0: must be at least 1"),
        (("--report-cost-model", "8b"), "cost_model='8b' is no cost model"),
        (("--chunk-multiple", "96"), "(2 * max_cp=2, chunk_multiple=96); nearest valid: [480, 576]"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is_planned(made, tmp_path, flags, told):
    code, _, err = made(*flags)
    assert code == 2
    assert told in err
    assert err.count("\n") == 1
    assert not (tmp_path / "plan").exists()


def test_a_corpus_has_no_report(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("hello")
    assert main(["ingest", str(tmp_path / "text"), "-o", str(tmp_path / "corpus")]) == 0
    assert main(["inspect", str(tmp_path / "corpus"), "--report"]) == 2
    assert "is a corpus; --report is for a plan" in capsys.readouterr().err


def test_a_config_file_lists_dp_sizes_and_cost_models(made, tmp_path):
    run_file = tmp_path / "run.yaml"
    run_file.write_text("plan:\n  report_dp: [2, 8]\n  report_cost_model: [tokens]\n")
    _, facts, _ = made("--config", str(run_file), "--json")
    assert len(facts["balances"]) == 3 * 2
