"""The region boundary in closed form, and its figures."""

from __future__ import annotations

import time

import numpy as np
import pytest
import sympy

from theory import comparison, plots

RATIO = np.arange(1, 100) / 100


@pytest.mark.parametrize("dispersion_full", plots.DISPERSIONS)
def test_the_condition_changes_exactly_at_the_boundary(dispersion_full):
    cases = [(comparison.parameter, {}), (comparison.input_general, {"sink_ratio": 3.0, "logit_bound": 11.0})]
    cases += [(comparison.input, {"sink_ratio": sink_ratio}) for sink_ratio in plots.SINK_RATIOS]
    for condition, rest in cases:
        edge = comparison.region_boundary(condition, dispersion_ratio=RATIO, dispersion_full=dispersion_full, **rest)

        def left(separation, condition=condition, rest=rest):
            return condition.left_hand_side(
                dispersion_full=dispersion_full, dispersion=RATIO * dispersion_full, separation=separation, **rest
            )

        somewhere = np.isfinite(edge)
        np.testing.assert_allclose(left(np.where(somewhere, edge * dispersion_full, 1.0))[somewhere], 1, atol=1e-12)
        assert (left(np.where(somewhere, 1.001 * edge * dispersion_full, 1e300)) <= 1).tolist() == somewhere.tolist()
        assert (left(np.where(somewhere, 0.999 * edge * dispersion_full, 1.0)) > 1).all()


def test_a_grid_scan_finds_the_same_boundary():
    c2 = np.arange(1, 3001) / 1000
    for dispersion_full in (2.0, 4.0):
        for c1 in (0.1, 0.3, 0.5):
            left = comparison.parameter_condition(
                dispersion_full=dispersion_full, dispersion=c1 * dispersion_full, separation=c2 * dispersion_full
            )
            edge = comparison.region_boundary(
                comparison.parameter, dispersion_ratio=c1, dispersion_full=dispersion_full
            )
            assert 0 <= c2[left <= 1].min() - edge <= 1e-3 + 1e-12


def test_closed_form_is_the_one_that_sympy_solves():
    c1, c2, full = sympy.symbols("dispersion_ratio c2 dispersion_full", positive=True)
    sink_ratio = sympy.Symbol("sink_ratio", positive=True)
    for condition in (comparison.parameter, comparison.input):
        ratio = condition.ratio.expression.subs({sympy.Symbol("dispersion", positive=True): c1 * full})
        ratio = ratio.subs(sympy.Symbol("separation", positive=True), c2 * full)
        (solved,) = sympy.solve(sympy.Eq(ratio, 1), c2)
        point = {c1: 0.3, full: 3.7, sink_ratio: 1.4}
        assert float(solved.subs(point)) == pytest.approx(float(condition.boundary.expression.subs(point)), rel=1e-12)


def test_large_dispersion_and_nan():
    edge = comparison.region_boundary(
        comparison.parameter, dispersion_ratio=[0.5, np.nan, 0.999], dispersion_full=600.0
    )
    assert edge[0] == pytest.approx(2 / (600 * np.exp(300.0)))
    assert np.isnan(edge[1])
    assert np.isinf(edge[2])
    assert comparison.region_boundary(comparison.parameter, dispersion_ratio=0.0, dispersion_full=1e4) == 0


@pytest.mark.parametrize("figure", [plots.parameter_figure, plots.input_figure])
def test_figures_have_labels_legends_and_every_line(figure, tmp_path):
    drawn = figure(precision=0.01)
    used = [ax for ax in drawn.axes if ax.get_visible()]
    assert len(used) in {1, 6}
    for ax in used:
        assert len(ax.lines) == 11
        assert ax.get_yscale() == "log"
    assert "c_1" in used[-1].get_xlabel()
    assert "c_2" in used[0].get_ylabel()
    assert drawn.legends or used[0].get_legend()
    drawn.savefig(tmp_path / "region.png")
    assert (tmp_path / "region.png").stat().st_size > 10_000


def test_axes_are_taken_and_returned():
    from matplotlib.figure import Figure

    ax = Figure().add_subplot()
    assert plots.plot_region(comparison.input, ax=ax, precision=0.1, sink_ratio=2.0) is ax
    assert len(plots.plot_region(comparison.parameter, precision=0.1).lines) == 11
    with pytest.raises(ValueError, match=r"`precision`.*got 0"):
        plots.region(comparison.parameter, precision=0)


def test_all_regions_at_the_papers_precision_take_less_than_a_second():
    plots.region(comparison.input, precision=0.1, sink_ratio=1.0)  # sympy builds the formula once
    start = time.perf_counter()
    plots.region(comparison.parameter, precision=1e-4)
    for sink_ratio in plots.SINK_RATIOS:
        plots.region(comparison.input, precision=1e-4, sink_ratio=sink_ratio)
    assert time.perf_counter() - start < 1
