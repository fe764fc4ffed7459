"""Cost tables fitted to measured packs: known curves are found again, bad samples are refused."""

import numpy as np
import pytest

from ringfeed.pipeline.planner.cost_fit import Basis, Sample, fit_cost, read_samples


def packs(count, *, seed=0, tokens=32_768, full=False):
    """Lists of document lengths, some of few long and some of many short documents."""
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        budget = left = tokens if full else int(draw.integers(tokens // 8, tokens))
        pack = []
        while left:
            wanted = int(draw.lognormal(draw.uniform(5, 10), 1.0))
            pack.append(min(left, max(16, min(wanted, budget))))
            left -= pack[-1]
        made.append(np.array(pack, dtype=np.int64))
    return made


def measured(lengths, curve, *, per_pack=0.0, noise=0.0):
    draw = np.random.default_rng(1)
    return [
        Sample(
            place=f"samples.csv:{line}",
            lengths=pack,
            milliseconds=(per_pack + float(curve(pack.astype(np.float64)).sum()))
            * (1 + noise * draw.standard_normal()),
        )
        for line, pack in enumerate(lengths, start=2)
    ]


def quadratic(lengths):
    return 0.01 + 2e-3 * lengths + 1e-7 * lengths**2


@pytest.mark.parametrize("basis", list(Basis))
def test_a_known_curve_is_found_again_under_noise(basis):
    fit = fit_cost(measured(packs(200), quadratic, per_pack=2.0, noise=0.02), basis=basis, tolerance=0.5)
    lengths = np.array([1024, 8192, 30_000], dtype=np.int64)
    found = fit.table.piece_costs(lengths) / 1e6
    assert found == pytest.approx(quadratic(lengths.astype(np.float64)), rel=0.08)
    assert 0.01 < fit.typical_error < 0.03


def test_without_noise_the_table_follows_a_parabola_to_a_tenth_of_a_per_cent():
    fit = fit_cost(measured(packs(60), quadratic, per_pack=2.0), basis=Basis.QUADRATIC, tolerance=0.5)
    expected = {"tokens": 2e-3, "squares": 1e-7, "documents": 0.01, "packs": 2.0}
    assert fit.coefficients == pytest.approx(expected, rel=1e-6)
    assert fit.largest_error < 2e-3


def test_full_packs_do_not_tell_the_time_of_a_pack_from_that_of_its_tokens():
    samples = measured(packs(60, full=True), quadratic, per_pack=2.0)
    fit = fit_cost(samples, basis=Basis.QUADRATIC, tolerance=0.5)
    assert fit.left_out == ("packs",)
    assert fit.coefficients["squares"] == pytest.approx(1e-7, rel=1e-6)


def test_a_curve_that_would_bend_down_becomes_a_line_that_rises():
    fit = fit_cost(measured(packs(80), np.sqrt), basis=Basis.PIECEWISE, tolerance=1.0)
    assert (np.diff(fit.table.nanoseconds) >= 0).all()
    assert int(fit.table.lengths[-1]) == max(int(pack.max()) for pack in packs(80))


def test_documents_of_one_length_are_refused():
    samples = measured([np.full(n, 512) for n in range(1, 20)], quadratic)
    with pytest.raises(ValueError, match="19 samples do not tell how cost grows with length"):
        fit_cost(samples, basis=Basis.QUADRATIC, tolerance=0.5)


def test_too_few_samples_are_refused_with_how_many_are_needed():
    with pytest.raises(ValueError, match=r"7 samples are too few for the 4 terms .* measure at least 8"):
        fit_cost(measured(packs(7), quadratic, per_pack=2.0), basis=Basis.QUADRATIC, tolerance=0.5)
    with pytest.raises(ValueError, match="there is no sample"):
        fit_cost([], basis=Basis.QUADRATIC, tolerance=0.5)


def test_a_sample_far_off_is_refused_by_its_line():
    samples = measured(packs(60), quadratic)
    slow = Sample(place="samples.csv:9", lengths=samples[7].lengths, milliseconds=samples[7].milliseconds * 9)
    with pytest.raises(ValueError, match=r"samples.csv:9: measured .* 1 of 60 samples lie off by more than"):
        fit_cost([*samples[:7], slow, *samples[8:]], basis=Basis.QUADRATIC, tolerance=0.5)


def test_samples_are_read_line_by_line(tmp_path):
    file = tmp_path / "samples.csv"
    file.write_text("# GPU 0\nlengths,milliseconds\n4096 16,12.5\n\n7,1e-1\n")
    first, second = read_samples(file)
    assert (first.place, first.lengths.tolist(), first.milliseconds) == (f"{file}:3", [4096, 16], 12.5)
    assert (second.place, second.lengths.tolist(), second.milliseconds) == (f"{file}:5", [7], 0.1)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("12 x,1", "csv:2: 'x' is no document length"),
        (",1", "csv:2: '' is no document length"),
        ("0 5,1", "csv:2: document lengths go from 1 to 2147483647, got 0 to 5"),
        ("5,0", "csv:2: a pack took 0 ms; times are above 0"),
        ("5,-3", "csv:2: a pack took -3 ms"),
        ("5,inf", "csv:2: 'inf' is no time in milliseconds"),
        ("5,1,2", "csv:2: 3 cells, need 2"),
    ],
)
def test_a_bad_sample_is_refused_with_its_line(tmp_path, line, told):
    (tmp_path / "samples.csv").write_text(f"lengths,milliseconds\n{line}\n")
    with pytest.raises(ValueError, match=told):
        read_samples(tmp_path / "samples.csv")
