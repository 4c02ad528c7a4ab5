"""Every bound: one source for symbols and numbers, log domain, limits, refusals."""

from __future__ import annotations

import mpmath
import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

import theory
from theory import attention, catalogue, comparison, softmax
from theory.symbols import QUANTITIES

BOUNDS = {bound.name: bound for bound in catalogue.bounds()}
COUNTS = {"length", "keys", "queries_per_key", "layers", "steps", "samples"}
SHARES = {"largest_probability", "second_probability", "jacobian_norm"}


def random_point(name, generator):
    """A value over the range that the package promises to handle."""
    if name in {"dispersion", "dispersion_full", "logit_change"}:
        return generator.choice([generator.uniform(0, 1e4), generator.uniform(0, 30), 10 ** generator.uniform(-8, 0)])
    if name == "separation":
        return 10 ** generator.uniform(-300, 3)
    if name in {"sink_ratio", "logit_bound"}:
        return generator.choice([10 ** generator.uniform(-3, 6), generator.uniform(0, 8)])
    if name in COUNTS:
        return float(generator.integers(2, 100_000))
    if name in SHARES:
        return generator.uniform(0.001, 0.5)
    return 10 ** generator.uniform(-3, 3)


def points(bound, count, seed):
    generator = np.random.default_rng(seed)
    names = [str(symbol) for symbol in bound.symbols]
    table = {name: np.array([random_point(name, generator) for _ in range(count)]) for name in names}
    if bound.name == "tail-mass":  # fewer keys than tokens
        table["length"] += table["keys"]
    return table


@pytest.mark.parametrize("name", BOUNDS)
def test_numbers_agree_with_the_sympy_expression(name):
    bound = BOUNDS[name]
    theorems = name.startswith(("theorem", "softmax", "tail", "f4", "largest"))
    table = points(bound, 1000 if theorems else 200, seed=len(name))
    computed = np.broadcast_to(bound.log(**table), (1000 if theorems else 200,))
    ordered = sorted(bound.expression.free_symbols, key=str)
    function = sympy.lambdify(ordered, bound.expression, "mpmath")
    for index in range(len(computed)):
        with mpmath.workdps(350):  # a bound may differ from 1 by 1e-300
            value = function(*(mpmath.mpf(float(table[str(symbol)][index])) for symbol in ordered))
            exact = float(mpmath.log(value))
        # Powers of a bound near 1 leave a small difference of large logarithms: there relative to those, not to it.
        assert computed[index] == pytest.approx(exact, rel=1e-12, abs=1e-300 if theorems else 1e-12)


@pytest.mark.parametrize("name", BOUNDS)
def test_every_bound_is_complete(name):
    bound = BOUNDS[name]
    assert bound.assumptions
    assert bound.source
    assert bound.latex
    assert {str(symbol) for symbol in bound.symbols} == {str(symbol) for symbol in bound.expression.free_symbols}
    text = catalogue.explain(name)
    assert bound.latex in text
    assert bound.source in text
    assert bound.assumptions in text
    values = {symbol: sympy.Rational(50 - 7 * place, 9) for place, symbol in enumerate(bound.symbols)}
    assert sympy.N(bound.log_expression.subs(values) - sympy.log(bound.expression.subs(values)), 20) == pytest.approx(
        0, abs=1e-15
    )


def test_names_are_distinct():
    assert len(BOUNDS) == len(catalogue.bounds())


def test_published_forms_say_reconstructed_and_ours_do_not():
    for theorem in attention.THEOREMS:
        assert all("reconstructed" in bound.source for bound in theorem.bounds)
        assert not any("reconstructed" in bound.source for bound in theorem.sharp.bounds)
    assert "reconstructed" in softmax.full.source
    assert "reconstructed" in softmax.heavy_hitter.source


@pytest.mark.parametrize("name", [n for n in BOUNDS if n.startswith(("theorem", "softmax", "f4"))])
def test_finite_over_the_promised_range(name):
    bound = BOUNDS[name]
    names = {str(symbol) for symbol in bound.symbols}
    grid = {
        "dispersion": np.array([0.0, 1e-12, 1.0, 88.0, 1e4])[:, None, None],
        "dispersion_full": np.array([0.0, 1e-12, 1.0, 88.0, 1e4])[:, None, None],
        "separation": np.array([1e-300, 1e-9, 1.0, 1e4])[:, None],
        "sink_ratio": np.array([0.0, 1e-6, 1.0, 1e6]),
    }
    rest = {"keys": 5, "length": 40, "token_norm": 2.0, "score_norm": 3.0, "value_norm": 0.5, "logit_bound": 7.0}
    rest |= {"largest_probability": 0.5, "second_probability": 0.2, "logit_change": 1e4}
    log = bound.log(**{key: value for key, value in (grid | rest).items() if key in names})
    usable = np.isfinite(log)
    if name.endswith("value") or "input" not in name:
        assert usable.all()
    else:  # a value term of beta = 0 alone may make the constant 0
        assert (usable | np.isneginf(log)).all()
        assert usable[..., 1:].all() if log.ndim and log.shape[-1] > 1 else usable.all()
    if "separation" in names:
        grid["separation"] = np.array([0.0])
        at_zero = bound.log(**{key: value for key, value in (grid | rest).items() if key in names})
        assert np.isposinf(at_zero).all()


@pytest.mark.parametrize("name", [n for n in BOUNDS if BOUNDS[n].symbols])
def test_nan_in_gives_nan_out_and_negative_is_refused(name):
    bound = BOUNDS[name]
    table = points(bound, 3, seed=1)
    for one in table:
        values = table[one].copy()
        values[1] = np.nan
        assert np.isnan(bound.log(**(table | {one: values}))).tolist() == [False, True, False]
        with pytest.raises(ValueError, match=rf"`{one}`.*-0\.5"):
            bound.value(**(table | {one: [1.0, -0.5, 1.0]}))
        if one in COUNTS:
            with pytest.raises(ValueError, match=rf"`{one}` to be at least 1 .* got 0"):
                bound.value(**(table | {one: 0}))


def test_calling_is_value_and_spare_quantities_are_ignored():
    assert theory.softmax.full(dispersion=1.0, keys=5) == pytest.approx(np.e / 5)
    assert theory.softmax.full.value(dispersion=1.0, keys=5, separation=0.1) == pytest.approx(np.e / 5)
    assert softmax.p_to_p() == 0.5
    assert softmax.inf_to_one() == 1.0


def test_full_attention_keeps_all_tokens_unless_told_otherwise():
    norms = {"token_norm": 1.0, "score_norm": 100.0, "value_norm": 1.0}
    assert theory.full.sharp.input_stability(dispersion=0.0, length=40, **norms) == pytest.approx(296.0)
    assert theory.full.sharp.input_stability(dispersion=0.0, keys=40, **norms) == pytest.approx(296.0)
    with pytest.raises(TypeError, match="got no keys"):
        theory.regular.sharp.input_stability(dispersion=0.0, length=40, **norms)


def test_missing_and_unknown_arguments():
    with pytest.raises(TypeError, match="got no keys"):
        softmax.full(dispersion=1.0)
    with pytest.raises(TypeError, match="`spread`"):
        softmax.full(spread=1.0, keys=5)
    with pytest.raises(ValueError, match=r"`dispersion` to be a number.*'wide'"):
        softmax.full(dispersion="wide", keys=5)


def test_broadcasting_and_scalars():
    value = softmax.heavy_hitter_sharp(dispersion=np.zeros((3, 1)), keys=[2, 4, 8, 16], separation=1.0)
    np.testing.assert_allclose(value, np.tile([1.0, 0.5, 0.25, 0.125], (3, 1)))
    assert np.ndim(softmax.full(dispersion=0.0, keys=4)) == 0
    assert softmax.full(dispersion=np.zeros((0, 3)), keys=4).shape == (0, 3)


def test_unknown_names_list_near_ones():
    with pytest.raises(ValueError, match=r"'theorm-5'.*theorem-5.*Known: .*softmax-full"):
        catalogue.explain("theorm-5")
    assert catalogue.explain("Theorem_5").startswith("theorem-5")


def test_published_theorems_are_as_written():
    length, xi, gamma, upsilon, delta, gap, beta = (
        QUANTITIES[name].symbol
        for name in ("length", "token_norm", "score_norm", "value_norm", "dispersion", "separation", "sink_ratio")
    )
    growth = sympy.exp(delta)
    for theorem in (theory.full, theory.regular):
        assert sympy.simplify(theorem.parameter_stability.expression - length * upsilon * xi**3 * growth) == 0
        assert sympy.simplify(theorem.input_stability.expression - upsilon * growth * (1 + 2 * gamma * xi**2)) == 0
    heavy = theory.heavy_hitter
    expected = 2 * length * upsilon * xi**3 * growth * (1 + 1 / gap)
    assert sympy.simplify(heavy.parameter_stability.expression - expected) == 0
    expected = upsilon * growth * (2 * gamma * xi**2 * (1 + beta) * (1 + 1 / gap) + beta)
    assert sympy.simplify(heavy.input_stability.expression - expected) == 0


def test_sharp_theorems_are_as_derived():
    values = {"length": 9, "keys": 4, "token_norm": 1.3, "score_norm": 0.7, "value_norm": 2.1}
    values |= {"dispersion": 0.8, "separation": 0.3, "sink_ratio": 1.7}
    p = np.exp(0.8) / (np.exp(0.8) + 3)
    q, logits, beta, k = min(p, 0.5), 0.7 * 1.3**2, 1.7, 4
    for theorem in (theory.full, theory.regular):
        assert theorem.sharp.input_stability(**values) == pytest.approx(
            2.1 * (k * p + logits * (2 * k * q * (1 - q) + 1)), rel=1e-13
        )
        assert theorem.sharp.parameter_stability(**values) == pytest.approx(
            9 * 2.1 * 1.3**3 * min(1, 2 * k * q * (1 - q)), rel=1e-13
        )
    heavy = theory.heavy_hitter
    sets = max(2, 1 / 0.3)
    assert heavy.sharp.input_stability(**values) == pytest.approx(
        2.1 * (beta * k * p + 2 * k * p * sets * (1 + beta) * logits), rel=1e-13
    )
    assert heavy.sharp.parameter_stability(**values) == pytest.approx(2 * 9 * 2.1 * 1.3**3 * k * p * sets, rel=1e-13)
    assert heavy.local_input_stability(**values) == pytest.approx(
        2.1 * (beta * k * p + logits * (2 * beta * k * q * (1 - q) + 1)), rel=1e-13
    )


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=10))
def test_measured_norms_of_one_softmax(logits):
    weights = np.exp(np.array(logits) - max(logits))
    weights /= weights.sum()
    jacobian = np.diag(weights) - np.outer(weights, weights)
    assert softmax.one_norm(weights) == pytest.approx(np.abs(jacobian).sum(0).max(), abs=1e-15)
    signs = np.array(np.meshgrid(*[[-1, 1]] * len(logits))).reshape(len(logits), -1)
    assert softmax.balanced_mass(weights) == pytest.approx(np.abs(jacobian @ signs).sum(0).max(), abs=1e-12)
    assert np.linalg.norm(jacobian, 2) <= softmax.spectral_factor(weights) + 1e-12


def test_masked_queries_take_their_own_numbers_of_keys():
    dispersion, keys = np.array([0.0, 1.0, 0.5, np.nan]), np.array([1, 2, 3, np.nan])
    got = attention.masked_input_stability(
        dispersion=dispersion, keys=keys, queries_per_key=3, token_norm=1.0, score_norm=2.0, value_norm=1.5
    )
    # The single key has weight 1 and Jacobian 0; the query with two keys has the largest Jacobian, 1/2.
    assert got == pytest.approx(1.5 * (3 * 1.0 + 2.0 * (3 * 0.5 + 1)))


def test_measured_forms_reject_odd_shapes():
    with pytest.raises(ValueError, match="square"):
        attention.measured_input_stability(np.ones((2, 3)) / 3, token_norm=1, score_norm=1, value_norm=1)
    with pytest.raises(ValueError, match=r"\(2, 3\) and \(2, 2\)"):
        attention.yudin_bound(np.ones((2, 3)) / 3, np.ones((2, 2)), score_norm=1, value_norm=1)
    with pytest.raises(ValueError, match="at most 20 keys"):
        softmax.balanced_mass(np.ones(30) / 30)


def test_conditions_explain_themselves():
    for condition in comparison.CONDITIONS:
        text = catalogue.explain(condition.name)
        assert condition.latex in text
        assert "reconstructed" in text
