"""Appendix F.4: reference rows, derivation, limits, refusals."""

from __future__ import annotations

import numpy as np
import pytest
import sympy

from theory import comparison

# Task and percentile, delta_s, delta_h, Delta_h, beta k, (276), (277): the published table, k = 5.
ROWS = [
    (8.61, 3.51, 0.016, 1, 0.970289, 0.898233),
    (18.5, 6.74, 0.005, 3, 0.688457, 0.673555),
    (29.4, 9.67, 0.002, 15, 0.563937, 0.586378),
    (87.8, 28.2, 1e-9, 598, 0.565107, 0.611668),
    (2.03, 1.03, 0.009, 6, 3.173713, 3.024539),
    (4.73, 2.84, 0.003, 17, 1.975748, 2.101996),
    (9.44, 5.50, 0.002, 26, 1.314593, 1.423797),
    (14.6, 8.25, 3e-8, 40, 1.798987, 1.897469),
]


@pytest.mark.parametrize("row", ROWS)
def test_published_rows(row):
    dispersion_full, dispersion, separation, queries, parameter, inputs = row
    shared = {"dispersion_full": dispersion_full, "dispersion": dispersion, "separation": separation}
    assert comparison.parameter_condition(**shared) == pytest.approx(parameter, abs=6e-7)
    assert comparison.input_condition(**shared, sink_ratio=queries / 5) == pytest.approx(inputs, abs=6e-7)
    general = comparison.input_condition(**shared, sink_ratio=queries / 5, logit_bound=dispersion_full / 2)
    assert general == pytest.approx(inputs, abs=6e-7)


def test_rows_broadcast():
    columns = np.array(ROWS).T
    left = comparison.input_condition(
        dispersion_full=columns[0], dispersion=columns[1], separation=columns[2], sink_ratio=columns[3] / 5
    )
    np.testing.assert_allclose(left, columns[5], atol=6e-7)


def test_sympy_derives_the_printed_inequalities_from_the_theorems():
    s, h, gap, beta, bound = sympy.symbols(
        "dispersion_full dispersion separation sink_ratio logit_bound", positive=True
    )
    c1, c2 = sympy.symbols("c1 c2", positive=True)
    ratios = {h: c1 * s, gap: c2 * s}
    printed_276 = c1 + sympy.log(2 * (1 + 1 / (s * c2))) / s
    printed_277 = c1 + sympy.log(s * (1 + beta) * (1 + 1 / (s * c2)) + beta) / s - sympy.log(s + 1) / s

    def difference(expression, printed):
        return sympy.simplify(sympy.expand_log(sympy.simplify(expression.subs(ratios) - printed), force=True))

    assert difference(comparison.parameter.expression, printed_276) == 0
    assert difference(comparison.input.expression, printed_277) == 0
    assert difference(comparison.input_general.expression.subs(bound, s / 2), printed_277) == 0


def test_the_left_hand_side_is_one_plus_the_log_ratio_of_the_theorems():
    import theory

    norms = {"token_norm": 1.7, "score_norm": 0.9, "value_norm": 3.0, "length": 20.0}
    shared = {"dispersion_full": 4.0, "dispersion": 1.5, "separation": 0.3, "sink_ratio": 2.2}
    sparse = theory.heavy_hitter.input_stability.log(**norms, **shared)
    dense = theory.full.input_stability.log(**norms, dispersion=4.0)
    left = comparison.input_condition(**shared, logit_bound=0.9 * 1.7**2)
    assert left == pytest.approx(1 + (sparse - dense) / 4.0, rel=1e-13)


@pytest.mark.parametrize("name", ["dispersion_full", "dispersion", "separation", "sink_ratio"])
def test_negative_values_are_refused_by_name_and_value(name):
    arguments = {"dispersion_full": 2.0, "dispersion": 1.0, "separation": 0.1, "sink_ratio": 1.0, name: -0.25}
    with pytest.raises(ValueError, match=rf"`{name}`.*-0\.25"):
        comparison.input_condition(**arguments)


def test_limits():
    shared = {"dispersion_full": [1e-3, 1.0, 1e4], "dispersion": [0.0, 1.0, 1e4]}
    assert (comparison.parameter_condition(**shared, separation=0.0) == np.inf).all()
    assert np.isfinite(comparison.parameter_condition(**shared, separation=1e-300)).all()
    assert np.isfinite(comparison.input_condition(**shared, separation=1e-300, sink_ratio=[0.0, 1.0, 1e6])).all()
    assert np.isnan(comparison.parameter_condition(dispersion_full=1.0, dispersion=np.nan, separation=1.0))
    assert comparison.parameter_condition(dispersion_full=0.0, dispersion=0.0, separation=1.0) == np.inf
