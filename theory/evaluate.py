r"""Evaluate a sympy expression in the log domain: the logarithm of its value, without ever forming the value.

A dispersion of 88 nats is seen in practice and :math:`e^{88}` overflows float32; 10 000 nats overflow everything. So
each node of the expression is represented by the logarithm of its magnitude and by its sign. Products add logarithms,
sums go through log-sum-exp, and a difference through :math:`\log(1 - e^{-x})` in the form that keeps its digits. Sums
that are linear in the arguments (such as k - 1) are formed directly, since logarithms would cost digits there.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import numpy as np
import sympy
from numpy.typing import NDArray

from theory.symbols import Expression

Array = NDArray[np.float64]
Arguments = Mapping[str, Array]


def log_value(expression: Expression, arguments: Arguments) -> Array:
    """Evaluate the logarithm of a non-negative expression.

    Args:
        expression: made of numbers, symbols, sums, products, real powers, exp, log, tanh, Min and Max.
        arguments: the value of each symbol, by name; they broadcast together.

    Returns:
        The logarithm; -inf where the value is 0, +inf where it is infinite, NaN where an argument is NaN or the value
        is negative.
    """
    with np.errstate(all="ignore"):
        log, sign = signed_log(expression, arguments)
        log = np.where(sign < 0, np.nan, log)
    shape = np.broadcast_shapes(log.shape, *(arguments[str(symbol)].shape for symbol in expression.free_symbols))
    return np.array(np.broadcast_to(log, shape))


def signed_log(expression: Expression, arguments: Arguments) -> tuple[Array, Array]:
    """Evaluate the logarithm of the magnitude, and the sign.

    Args:
        expression: see `log_value`.
        arguments: see `log_value`.

    Returns:
        The logarithm of the absolute value, and -1, 0 or 1.

    Raises:
        TypeError: if the expression holds a function that is not known here.
    """
    if expression.is_Symbol or expression.is_number or _is_linear(expression):
        value = _real(expression, arguments)
        return np.log(np.abs(value)), np.sign(value)
    terms = expression.args
    if expression.is_Add:
        return _add([signed_log(term, arguments) for term in terms])
    if expression.is_Mul:
        factors = [signed_log(term, arguments) for term in terms]
        log = reduce(np.add, (factor[0] for factor in factors))
        # Zero times infinity: no finite bound is known, so the answer is infinity and not NaN.
        infinite = reduce(np.logical_or, (np.isposinf(factor[0]) for factor in factors))
        undefined = reduce(np.logical_or, (np.isnan(factor[0]) for factor in factors))
        sign = reduce(np.multiply, (np.where(factor[1] == 0, 1.0, factor[1]) for factor in factors))
        return np.where(infinite & ~undefined, np.inf, log), sign
    if isinstance(expression, sympy.exp):
        exponent = _real(terms[0], arguments)
        return exponent, np.ones_like(exponent)
    if expression.is_Pow:
        log, sign = signed_log(terms[0], arguments)
        return _real(terms[1], arguments) * log, sign if terms[1].is_odd else np.where(sign < 0, np.nan, 1.0)
    if isinstance(expression, (sympy.Max, sympy.Min)):
        # Compared on a scale that keeps the order of signed numbers and collapses no two of them.
        choose = np.maximum if isinstance(expression, sympy.Max) else np.minimum
        logs = [np.where(sign < 0, -np.inf, log) for log, sign in (signed_log(term, arguments) for term in terms)]
        log = reduce(choose, logs)
        return log, np.ones_like(log)
    if isinstance(expression, sympy.tanh):
        twice = 2 * _real(terms[0], arguments)
        return _log_one_minus_exp(twice) - np.log1p(np.exp(-twice)), np.ones_like(twice)
    if isinstance(expression, sympy.log):
        value = _real(expression, arguments)
        return np.log(np.abs(value)), np.sign(value)
    raise TypeError(f"Expected sums, products, powers, exp, log, tanh, Min and Max, but got {expression.func}.")


def _real(expression: Expression, arguments: Arguments) -> Array:
    # The plain value, for arguments of exp and for logarithms.
    if expression.is_Symbol:
        return arguments[str(expression)]
    if expression.is_number:
        return np.asarray(float(expression))
    if isinstance(expression, sympy.log):
        log, sign = signed_log(expression.args[0], arguments)
        return np.where(sign < 0, np.nan, log)
    if expression.is_Add or expression.is_Mul:
        combine = np.add if expression.is_Add else np.multiply
        return np.asarray(reduce(combine, (_real(term, arguments) for term in expression.args)))
    log, sign = signed_log(expression, arguments)
    return np.asarray(sign * np.exp(log))


def _is_linear(expression: Expression) -> bool:
    # Whether this is a sum of numbers and multiples of symbols.
    return bool(expression.is_Add) and all(
        term.is_number
        or term.is_Symbol
        or (term.is_Mul and len(term.args) == 2 and term.args[0].is_number and term.args[1].is_Symbol)
        for term in expression.args
    )


def _add(terms: list[tuple[Array, Array]]) -> tuple[Array, Array]:
    # Add numbers given as logarithm and sign.
    nothing = np.asarray(-np.inf)
    plus = reduce(np.logaddexp, (np.where(sign < 0, -np.inf, log) for log, sign in terms), nothing)
    minus = reduce(np.logaddexp, (np.where(sign < 0, log, -np.inf) for log, sign in terms), nothing)
    high, gap = np.maximum(plus, minus), np.abs(plus - minus)
    log = np.where(np.isneginf(np.minimum(plus, minus)), high, high + _log_one_minus_exp(gap))
    return log, np.where(np.isnan(log), np.nan, np.where(plus == minus, 0.0, np.where(plus > minus, 1.0, -1.0)))


def _log_one_minus_exp(gap: Array) -> Array:
    # log(1 - e^-gap), by the form that keeps its digits on either side of ln 2 (Maechler 2012).
    return np.where(gap < np.log(2), np.log(-np.expm1(-gap)), np.log1p(-np.exp(-gap)))
