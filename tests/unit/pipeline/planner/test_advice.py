"""A corpus of short documents that are padded much: the planner says so, and who does without."""

import numpy as np
import pytest

from ringfeed.pipeline import batch_kwargs
from ringfeed.pipeline.cli import main
from ringfeed.pipeline.planner.advice import padding_advice


def short_documents(count=4000):
    """Lengths of 225 tokens on average."""
    lengths = np.random.default_rng(0).lognormal(np.log(150), 0.9, size=count)
    return np.clip(lengths, 1, 4096).astype(np.int64)


def test_short_documents_at_a_large_multiple_waste_a_quarter_and_the_planner_says_so(plan_lengths):
    lengths = short_documents()
    assert lengths.mean() == pytest.approx(225, rel=0.02)
    report = plan_lengths(lengths, pack_tokens=16_384, packs_per_step=4, max_cp=64).report
    assert 0.2 < report.slot_waste < 0.3
    [advice] = padding_advice(report)
    assert advice.startswith(f"{report.slot_waste:.1%} of all slots pad documents, of 22")
    assert "to a multiple of 128. Layouts that pad no document: " in advice
    assert "--pad-multiple 1" in advice


def test_the_layouts_named_pad_nothing_and_their_backends_take_packs(plan_lengths):
    report = plan_lengths(short_documents(500), pack_tokens=16_384, max_cp=64).report
    [advice] = padding_advice(report)
    for layout in ("head_tail", "contiguous", "whole_document", "magi", "ptrr"):
        backends = batch_kwargs.backends_for_packs(layout, cp_size=64)
        assert f"{layout} (attention: {', '.join(backends)})" in advice
    assert "te (" not in advice
    assert "identity" not in advice
    # The ring takes one document at a time, which is no pack.
    assert "torch-cp" not in advice


@pytest.mark.parametrize("options", [{"pad_multiple": 1}, {"max_cp": 2}])
def test_a_plan_that_wastes_little_gets_no_advice(plan_lengths, options):
    report = plan_lengths(short_documents(500), pack_tokens=16_384, **options).report
    assert report.slot_waste < 0.02
    assert padding_advice(report) == []


def test_the_command_says_it_in_its_log_its_text_and_its_json(tmp_path, capsys):
    np.save(tmp_path / "lengths.npy", short_documents(500))
    plan = ["plan", "--lengths", str(tmp_path / "lengths.npy"), "-o", str(tmp_path / "plan")]
    sizes = ["--pack-tokens", "16384", "--packs-per-step", "4", "--max-cp", "64", "--report"]
    assert main([*plan, *sizes]) == 0
    told = capsys.readouterr()
    assert "advice          2" in told.out
    assert "of all slots pad documents" in told.err
    assert main([*plan, *sizes, "--json"]) == 0
    assert '"advice": ["2' in capsys.readouterr().out
