r"""Appendix F.4 of [1]: when is heavy-hitter attention at least as stable as full attention?

Both conditions say that a constant of Theorem 5 is at most that of Theorem 3. Divided by :math:`\delta_s`, with
:math:`c_1 = \delta_h / \delta_s` and :math:`\delta_s c_2 = \Delta_h`, they read
(equation numbers of the arXiv version, then of the camera-ready)

* parameter stability (276/304): :math:`c_1 + \frac{1}{\delta_s} \ln(2 (1 + \frac{1}{\delta_s c_2})) \le 1`
* input stability (277/305), with :math:`2 \Gamma \Xi^2 = \delta_s`:
  :math:`c_1 + \frac{1}{\delta_s} \ln(\delta_s (1 + \beta) (1 + \frac{1}{\delta_s c_2}) + \beta)
  - \frac{1}{\delta_s} \ln(\delta_s + 1) \le 1`

Neither is typed here: both are formed from the theorem objects.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import sympy
from numpy.typing import ArrayLike, NDArray

from theory.attention import full, heavy_hitter
from theory.bound import PAPER, RECONSTRUCTED, Bound
from theory.evaluate import signed_log
from theory.symbols import Expression, check, symbol

Array = NDArray[np.float64]

_full, _kept, _gap = symbol("dispersion_full"), symbol("dispersion"), symbol("separation")
_bound = symbol("logit_bound")
_c1 = symbol("dispersion_ratio")
_LETTERS = {"dispersion": r"\delta_h", "separation": r"\Delta_h"}


@dataclass(frozen=True)
class Condition:
    """One inequality: heavy-hitter attention's constant is at most full attention's.

    Args:
        name: `f4-parameter`, `f4-input` or `f4-input-general`.
        ratio: Theorem 5's constant over Theorem 3's, as a bound object; the condition is ratio <= 1.
        assumptions: in words.
        source: where it comes from.
    """

    name: str
    ratio: Bound
    assumptions: str
    source: str

    @cached_property
    def expression(self) -> Expression:
        """The left-hand side, a sympy expression; the right-hand side is 1."""
        scaled = sympy.powsimp(self.ratio.expression * sympy.exp(_full - _kept))
        return _kept / _full + sympy.log(scaled) / _full

    @cached_property
    def boundary(self) -> Bound:
        """The smallest separation ratio c2 at which the condition holds, in closed form.

        The ratio of the constants is e^(delta_h - delta_s) (a + b / Delta_h) with a and b free of both, so that
        equality gives Delta_h = b / (e^(delta_s - delta_h) - a); there is none where that isn't positive.
        """
        inverse = sympy.Symbol("inverse", positive=True)
        scaled = sympy.powsimp(self.ratio.expression * sympy.exp(_full - _kept)).subs(_gap, 1 / inverse)
        a = scaled.subs(inverse, 0)
        b = sympy.factor(scaled - a).coeff(inverse)
        smallest = b / (_full * (sympy.exp(_full * (1 - _c1)) - a))
        assumptions = f"c_1 below 1; {self.assumptions}"
        return Bound(
            f"{self.name}-boundary", "c_2", smallest, assumptions, self.source, {"dispersion_full": r"\delta_s"}
        )

    @property
    def symbols(self) -> tuple[Expression, ...]:
        """The symbols; their names are the keywords of `left_hand_side`."""
        return self.ratio.symbols

    @property
    def latex(self) -> str:
        """The inequality as LaTeX, in the form ln(ratio) <= 0."""
        return rf"1 + \frac{{1}}{{\delta_s}} \ln\left[ {self.ratio.latex} \right] \le 1"

    def left_hand_side(self, **arguments: ArrayLike) -> Array:
        r"""Evaluate :math:`1 + \ln(\mathrm{ratio}) / \delta_s`, the left-hand side of the inequality.

        Args:
            **arguments: numbers or arrays by the names of the symbols.

        Returns:
            The left-hand side; the condition holds where it is at most 1. +inf at separation 0; where `dispersion_full`
            is 0, the limit: +inf, 1 or -inf.
        """
        log_ratio = self.ratio.log(**arguments)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(log_ratio == 0, 1.0, 1 + log_ratio / np.asarray(arguments["dispersion_full"], dtype=float))[
                ()
            ]

    def explain(self) -> str:
        """Describe the condition in a few lines of text.

        Returns:
            The inequality in LaTeX, symbols, assumptions and source.
        """
        lines = self.ratio.explain().splitlines()
        return "\n".join(
            [self.name, f"  ${self.latex}$", *lines[2:-2], f"  Assumes: {self.assumptions}", f"  Source: {self.source}"]
        )


def _condition(name: str, published: Expression, source: str, assumptions: str) -> Condition:
    # Wrap a ratio of two theorem constants.
    origin = f"{PAPER}, Appendix F.4, {source}; formed from Theorems 3 and 5, which are {RECONSTRUCTED.split(':')[0]}"
    ratio = Bound(
        f"{name}-ratio",
        r"\lambda(\mathrm{heavy\ hitter}) / \lambda(\mathrm{full})",
        published,
        assumptions,
        origin,
        _LETTERS,
    )
    return Condition(name, ratio, assumptions, origin)


def _ratio(sparse: Bound, dense: Bound) -> Expression:
    # Theorem 5's constant over Theorem 3's: common prefactors cancel, score_norm token_norm^2 becomes logit_bound.
    dense_expression = dense.expression.subs(_kept, _full)
    plain = {symbol("score_norm"): _bound / symbol("token_norm") ** 2}
    return sympy.powsimp((sparse.expression / dense_expression).subs(plain))


_ASSUMED = "the assumptions of Theorems 3 and 5 with the same norms; smaller constants are no proof of faster learning"

parameter = _condition(
    "f4-parameter",
    _ratio(heavy_hitter.parameter_stability, full.parameter_stability),
    "equation (276), camera-ready (304)",
    _ASSUMED,
)
input_general = _condition(
    "f4-input-general",
    _ratio(heavy_hitter.input_stability, full.input_stability),
    "equation (277), camera-ready (305), before 2 Gamma Xi^2 = delta_s is put in",
    _ASSUMED,
)
input = _condition(
    "f4-input",
    input_general.ratio.expression.subs(_bound, _full / 2),
    "equation (277), camera-ready (305)",
    f"2 Gamma Xi^2 = delta_s; {_ASSUMED}",
)
CONDITIONS = (parameter, input, input_general)


def region_boundary(
    condition: Condition, *, dispersion_ratio: ArrayLike, dispersion_full: ArrayLike, **arguments: ArrayLike
) -> Array:
    """Evaluate the smallest c2 = separation / dispersion_full at which a condition holds.

    Args:
        condition: `parameter`, `input` or `input_general`.
        dispersion_ratio: c1 = dispersion / dispersion_full.
        dispersion_full: dispersion of full attention, in nats.
        **arguments: what else the condition depends on, `sink_ratio` or `logit_bound`.

    Returns:
        The boundary, broadcast over the arguments; +inf where the condition fails for every separation.
    """
    given = check({"dispersion_ratio": dispersion_ratio, "dispersion_full": dispersion_full, **arguments})
    with np.errstate(all="ignore"):
        log, sign = signed_log(condition.boundary.expression, given)
        unknown = sum(np.isnan(array) for array in given.values())
        return np.where(unknown, np.nan, np.where(sign > 0, np.exp(log), np.inf))[()]


def parameter_condition(*, dispersion_full: ArrayLike, dispersion: ArrayLike, separation: ArrayLike) -> Array:
    """Evaluate the left-hand side of (276): parameter stability gains where it is at most 1.

    Args:
        dispersion_full: dispersion of full attention, in nats.
        dispersion: dispersion of heavy-hitter attention, in nats.
        separation: separation of heavy-hitter attention, in nats.

    Returns:
        The left-hand side.
    """
    return parameter.left_hand_side(dispersion_full=dispersion_full, dispersion=dispersion, separation=separation)


def input_condition(
    *,
    dispersion_full: ArrayLike,
    dispersion: ArrayLike,
    separation: ArrayLike,
    sink_ratio: ArrayLike,
    logit_bound: ArrayLike | None = None,
) -> Array:
    """Evaluate the left-hand side of (277): input stability gains where it is at most 1.

    Args:
        dispersion_full: dispersion of full attention, in nats.
        dispersion: dispersion of heavy-hitter attention, in nats.
        separation: separation of heavy-hitter attention, in nats.
        sink_ratio: beta, queries that keep the most kept key divided by k.
        logit_bound: Gamma Xi^2; half of `dispersion_full` where omitted, as in the paper.

    Returns:
        The left-hand side with the right-hand logarithm subtracted.
    """
    shared = {
        "dispersion_full": dispersion_full,
        "dispersion": dispersion,
        "separation": separation,
        "sink_ratio": sink_ratio,
    }
    if logit_bound is None:
        return input.left_hand_side(**shared)
    return input_general.left_hand_side(**shared, logit_bound=logit_bound)
