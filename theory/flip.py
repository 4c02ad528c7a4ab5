"""How far a condition of Appendix F.4 is from flipping: the value at which it just holds, one quantity at a time."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from theory.comparison import Condition

Array = NDArray[np.float64]


def flips(condition: Condition, quantities: Mapping[str, Array]) -> dict[str, Array]:
    """Find, for each quantity alone, the value at which the two sides are equal, the others held.

    Args:
        condition: an inequality.
        quantities: the value of each of its symbols, shape (rows,).

    Returns:
        By name, shape (rows,); NaN where no value of that quantity alone flips the verdict. In the paper's form of the
        input condition `dispersion_full` also stands for 2 Gamma Xi^2.
    """
    log_ratio = condition.ratio.log(**quantities)
    found = {
        "dispersion_full": _where_equal(condition, quantities),
        # The ratio is e^dispersion times something without it.
        "dispersion": _possible(quantities["dispersion"] - log_ratio),
        # The ratio is affine in 1 / separation and in the sink ratio: two evaluations give the line.
        "separation": 1 / _solve_line(condition, quantities, "separation", at_zero=np.inf),
    }
    if "sink_ratio" in quantities:
        found["sink_ratio"] = _solve_line(condition, quantities, "sink_ratio", at_zero=0.0)
    return found


def _possible(values: Array) -> Array:
    # Drop values that no quantity can have.
    return np.where(np.isfinite(values) & (values >= 0), values, np.nan)


def _solve_line(condition: Condition, quantities: Mapping[str, Array], name: str, *, at_zero: float) -> Array:
    # Solve ratio(x) = a + b x = 1, where x is the quantity or its inverse, so that both give b at 1.
    log_a = condition.ratio.log(**{**quantities, name: np.full_like(quantities[name], at_zero)})
    log_sum = condition.ratio.log(**{**quantities, name: np.ones_like(quantities[name])})
    with np.errstate(all="ignore"):
        x = -np.expm1(log_a) / (np.exp(log_sum) - np.exp(log_a))
    return np.where(np.isfinite(x) & (x > 0), x, np.nan)


def _where_equal(condition: Condition, quantities: Mapping[str, Array]) -> Array:
    # Solve for full attention's dispersion by bisection. The logarithm of the ratio rises up to a top at most and falls
    # from there on; the crossing looked for is on the falling side, where more dispersion makes it hold.
    def log_ratio(dispersion_full: Array) -> Array:
        return condition.ratio.log(**{**quantities, "dispersion_full": dispersion_full})

    # The top lies below 0.62, where the derivative -1 - 1 / (1 + d) + 1 / (b + d), b >= 0, has its only zero.
    grid = np.linspace(0, 1, 101)[:, None]
    values = np.stack([log_ratio(row + 0 * quantities["dispersion"]) for row in grid])
    low = grid[np.nan_to_num(values, nan=-np.inf).argmax(0), 0]
    top = log_ratio(low)
    high = low + np.where(np.isfinite(top), np.maximum(top, 0), 0) + 1
    for _ in range(12):
        high = np.where(log_ratio(high) > 0, 2 * high, high)
    known = (top > 0) & np.isfinite(top)
    for _ in range(80):
        middle = (low + high) / 2
        above = log_ratio(middle) > 0
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.where(known, (low + high) / 2, np.nan)
