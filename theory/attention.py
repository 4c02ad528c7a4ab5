r"""Theorems 3, 4 and 5: Lipschitz constants of one attention with respect to its parameters and its input.

The map is :math:`A(X) = V X\, \mathrm{softmax}_K(X^T W X)`; distances between token matrices are sums of token norms,
:math:`\|X\|_{2,1}`, those between W or V spectral norms.

The full text of the theorems was not at hand: the published forms are *reconstructed* from first principles and agree
with every ratio in Appendix F.4 of [1]. The sharp forms are ours and rigorous; docs/theory.md derives them.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025.
[2] Yudin et al., Pay Attention to Attention Distribution: A New Local Lipschitz Bound for Transformers, 2025.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import sympy
from numpy.typing import ArrayLike, NDArray

from theory import softmax
from theory.bound import PAPER, RECONSTRUCTED, Bound
from theory.softmax import LARGEST, ONE_NORM, PUBLISHED_SETS, SHARP_SETS, spectral_factor
from theory.symbols import Expression, symbol

_length, _keys, _beta = symbol("length"), symbol("keys"), symbol("sink_ratio")
_tokens, _score, _value = symbol("token_norm"), symbol("score_norm"), symbol("value_norm")
_dispersion = symbol("dispersion")
_received, _largest, _norm = symbol("queries_per_key"), symbol("largest_probability"), symbol("jacobian_norm")
_logits: Expression = _score * _tokens**2
_scale: Expression = _length * _value * _tokens**3


@dataclass(frozen=True)
class Constants:
    """The three Lipschitz constants of one attention.

    Args:
        parameter_stability: with respect to W, in output norm (2, 1) per unit of spectral norm.
        input_stability: with respect to X, dimensionless.
        value_stability: with respect to V, in output norm (2, 1) per unit of spectral norm.
    """

    parameter_stability: Bound
    input_stability: Bound
    value_stability: Bound

    @property
    def bounds(self) -> tuple[Bound, ...]:
        """The three, in the order of the fields."""
        return self.parameter_stability, self.input_stability, self.value_stability


@dataclass(frozen=True)
class Theorem(Constants):
    """A theorem of the paper: its published constants and what can be said rigorously instead.

    Args:
        name: `theorem-3`, `theorem-4` or `theorem-5`.
        assumptions: what it assumes, in words.
        sharp: our rigorous constants from the same quantities.
        local_input_stability: the rigorous constant for infinitesimal changes, where the kept sets stay.
    """

    name: str
    assumptions: str
    sharp: Constants
    local_input_stability: Bound

    @property
    def all_bounds(self) -> tuple[Bound, ...]:
        """Published, sharp and local constants."""
        return (*self.bounds, *self.sharp.bounds, self.local_input_stability)

    def explain(self) -> str:
        """Describe the theorem and all its constants.

        Returns:
            Several lines: assumptions first, then each constant with LaTeX, symbols and source.
        """
        head = [self.name, f"  Assumes: {self.assumptions}", ""]
        return "\n".join([*head, *(f"{bound.explain()}\n" for bound in self.all_bounds)]).rstrip()


def _theorem(
    number: int,
    assumptions: str,
    letters: dict[str, str],
    published: tuple[Expression, Expression],
    sharp: tuple[Expression, Expression],
    local: Expression,
) -> Theorem:
    # Put the published, sharp and local forms of one theorem together; the pairs are lambda_W and lambda_X.
    name = f"theorem-{number}"
    common = f"token norms at most Xi, ||W||_2 at most Gamma, ||V||_2 at most Upsilon; {assumptions}"
    printed, ours = f"{PAPER}, Theorem {number}; {RECONSTRUCTED}", "this project; derivation in docs/theory.md"
    defaults = {"keys": "length"} if number == 3 else {}
    held = f"{common}; infinitesimal changes, the kept sets stay"
    equal = f"{common}. Reached when all tokens are equal"

    def bound(suffix: str, bounded: str, expression: Expression, assumed: str, source: str) -> Bound:
        return Bound(f"{name}-{suffix}", bounded, expression, assumed, source, letters, defaults)

    return Theorem(
        parameter_stability=bound("parameter", r"\lambda_W", published[0], common, printed),
        input_stability=bound("input", r"\lambda_X", published[1], common, printed),
        value_stability=bound("value", r"\lambda_V", _length * _tokens, equal, printed),
        name=name,
        assumptions=common,
        sharp=Constants(
            parameter_stability=bound("sharp-parameter", r"\lambda_W", sharp[0], common, ours),
            input_stability=bound("sharp-input", r"\lambda_X", sharp[1], common, ours),
            value_stability=bound("sharp-value", r"\lambda_V", _length * _tokens, equal, ours),
        ),
        local_input_stability=bound("local-input", r"\lambda_X", local, held, ours),
    )


masked = Bound(
    "masked-input",
    r"\lambda_X",
    _value * (_received * _largest + _logits * (_received * _norm + 1)),
    "each query has its own kept keys, such as under a causal mask; every key is kept by at most c queries, no weight "
    "exceeds p_1 and no softmax Jacobian exceeds j in the 1-norm (0 for a query with one key); infinitesimal "
    "changes, or kept sets that don't depend on the input",
    "this project; derivation in docs/theory.md",
)

masked_sets = Bound(
    "masked-sets-input",
    r"\lambda_X",
    _value * (_received * _largest + 2 * _largest * SHARP_SETS * (_keys + _received) * _logits),
    "each query keeps its own number of largest logits, at most k; every key is kept by at most c queries and no "
    "weight exceeds p_1, at both points; separation of kept from masked logits at least Delta_h at both points",
    "this project; derivation in docs/theory.md",
    {"separation": r"\Delta_h"},
)


def _uniform(expression: Expression, beta: Expression) -> Expression:
    # All queries keep at least k keys, and a key is kept by at most beta k queries.
    return expression.subs({_received: beta * _keys, _largest: LARGEST, _norm: ONE_NORM})


def _same_sets(number: int, assumptions: str, letter: str, beta: Expression) -> Theorem:
    # Theorems 3 and 4: the kept sets don't depend on the input.
    published = (_scale * sympy.exp(_dispersion), _value * sympy.exp(_dispersion) * (1 + 2 * _logits))
    inputs = _uniform(masked.expression, beta)
    sharp = (_scale * sympy.Min(1, _keys * ONE_NORM), inputs)
    return _theorem(number, assumptions, {"dispersion": letter}, published, sharp, inputs)


full: Theorem = _same_sets(
    3,
    "every query attends to all keys (k = L), and the dispersion of each query's logits is at most delta_s "
    "at both points",
    r"\delta_s",
    sympy.Integer(1),
)
regular: Theorem = _same_sets(
    4,
    "each query keeps k keys and each key is kept by k queries, whatever the input, and the dispersion over kept keys "
    "is at most delta_r at both points. No gain over Theorem 3 unless delta_r is below delta_s",
    r"\delta_r",
    sympy.Integer(1),
)
heavy_hitter: Theorem = _theorem(
    5,
    "each query keeps its k largest logits, each key is kept by at most beta k queries; dispersion over kept keys at "
    "most delta_h and separation of kept from masked logits at least Delta_h at both points",
    {"dispersion": r"\delta_h", "separation": r"\Delta_h"},
    published=(
        2 * _scale * sympy.exp(_dispersion) * PUBLISHED_SETS,
        _value * sympy.exp(_dispersion) * (2 * _logits * (1 + _beta) * PUBLISHED_SETS + _beta),
    ),
    sharp=(
        2 * _scale * _keys * LARGEST * SHARP_SETS,
        _uniform(masked_sets.expression, _beta),
    ),
    local=_uniform(masked.expression, _beta),
)
THEOREMS = (full, regular, heavy_hitter)

yudin = Bound(
    "yudin",
    r"\|D A(X)\|_2",
    _value * (symbol("score_spectral_norm") + 2 * symbol("tokens_spectral_norm") ** 2 * _score * symbol("curvature")),
    "infinitesimal changes at the tokens where the attention matrix P was measured; Frobenius norms of token matrices",
    "[2] Yudin et al. 2025",
)


def masked_input_stability(
    *,
    dispersion: ArrayLike,
    keys: ArrayLike,
    queries_per_key: float,
    token_norm: float,
    score_norm: float,
    value_norm: float,
    separation: float | None = None,
) -> float:
    r"""Evaluate the sharp input stability where each query has its own number of keys, as under a causal mask.

    Query i enters with its own :math:`(\delta_i, n_i)`; the largest :math:`p(\delta_i, n_i)` counts. A query with a
    single key has dispersion 0 and weight 1, and its softmax doesn't move.

    Args:
        dispersion: dispersion of each query, shape (query,), in nats; NaN for a query that keeps no key.
        keys: keys that each query keeps, same shape; 0 or NaN for none.
        queries_per_key: largest number of queries that keep one key.
        token_norm: largest token norm.
        score_norm: spectral norm of W.
        value_norm: spectral norm of V.
        separation: smallest separation, where the kept sets may change with the input; held sets where omitted.

    Returns:
        The constant.

    Raises:
        ValueError: if no query keeps a key.
    """
    spread, counts = np.asarray(dispersion, dtype=np.float64), np.asarray(keys, dtype=np.float64)
    used = counts > 0
    if not used.any():
        raise ValueError("Expected `keys` to hold a query that keeps a key, but got none.")
    spread, counts = spread[used], counts[used]
    jacobians = softmax.full_sharp.value(dispersion=spread, keys=counts)
    quantities = {
        "largest_probability": softmax.largest_probability.value(dispersion=spread, keys=counts).max(),
        "jacobian_norm": np.where(counts == 1, 0.0, jacobians).max(),
        "keys": counts.max(),
        "queries_per_key": queries_per_key,
        "token_norm": token_norm,
        "score_norm": score_norm,
        "value_norm": value_norm,
    }
    if separation is None:
        return float(masked.value(**quantities))
    return float(masked_sets.value(**quantities, separation=separation))


def yudin_bound(weights: ArrayLike, tokens: ArrayLike, *, score_norm: float, value_norm: float) -> float:
    r"""Evaluate :math:`\|V\| (\|P\| + 2 \|X\|^2 \|W\| \max_i g_1(P_i))` from a measured attention matrix [2].

    Args:
        weights: attention matrix P, shape (query, key), rows that sum to 1.
        tokens: tokens X, shape (key, dim).
        score_norm: spectral norm of W.
        value_norm: spectral norm of V.

    Returns:
        A bound on the local Lipschitz constant in the Frobenius norm.

    Raises:
        ValueError: if the shapes don't fit.
    """
    matrix, points = np.asarray(weights, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    if matrix.ndim != 2 or points.ndim != 2 or matrix.shape[1] != points.shape[0]:
        raise ValueError(
            f"Expected `weights` (query, key) and `tokens` (key, dim), but got {matrix.shape} and {points.shape}."
        )
    return float(
        yudin.value(
            score_spectral_norm=np.linalg.norm(matrix, 2),
            tokens_spectral_norm=np.linalg.norm(points, 2),
            curvature=spectral_factor(matrix).max(),
            score_norm=score_norm,
            value_norm=value_norm,
        )
    )


def measured_value_stability(weights: ArrayLike, tokens: ArrayLike) -> float:
    r"""Measure :math:`\lambda_V = \sum_i \|X s_i\|_2` exactly: what V does at most to the mean tokens of all queries.

    Args:
        weights: attention matrix, shape (query, key), rows that sum to 1.
        tokens: tokens, shape (key, dim).

    Returns:
        The constant, at most the number of queries times the largest token norm.
    """
    means = np.asarray(weights, dtype=np.float64) @ np.asarray(tokens, dtype=np.float64)  # (query, dim)
    return float(np.linalg.norm(means, axis=-1).sum())


def measured_parameter_stability(weights: ArrayLike, *, token_norm: float, value_norm: float) -> float:
    r"""Bound the local parameter stability from a measured attention matrix, the kept sets held.

    The constant is :math:`\Upsilon \Xi^3 \sum_i \min(1, \sum_j 2 s_{ji} (1 - s_{ji}))`.

    Args:
        weights: attention matrix, shape (query, key), rows that sum to 1.
        token_norm: largest token norm.
        value_norm: spectral norm of V.

    Returns:
        The constant.
    """
    matrix = np.asarray(weights, dtype=np.float64)
    return float(value_norm * token_norm**3 * np.minimum(1.0, (2 * matrix * (1 - matrix)).sum(1)).sum())


def measured_input_stability(
    weights: ArrayLike, *, token_norm: float, score_norm: float, value_norm: float
) -> NDArray[np.float64]:
    r"""Bound the local input stability from a measured attention matrix, the kept sets held.

    With :math:`s_{ji}` the weight of key j for query i, the constant is the largest over keys j of
    :math:`\Upsilon [ \sum_i s_{ji} + \Gamma \Xi^2 ( \sum_i 2 s_{ji} (1 - s_{ji}) + h_j ) ]`, where
    :math:`h_j = \min(1, \sum_l 2 s_{lj} (1 - s_{lj}))` bounds the effect of moving j as a query.

    Args:
        weights: attention matrix, shape (query, key), rows that sum to 1; queries and keys are the same tokens.
        token_norm: largest token norm.
        score_norm: spectral norm of W.
        value_norm: spectral norm of V.

    Returns:
        The constant, a 0-d array.

    Raises:
        ValueError: if the matrix isn't square.
    """
    matrix = np.asarray(weights, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ValueError(f"Expected `weights` to be a square matrix (query, key), but got shape {matrix.shape}.")
    twice = 2 * matrix * (1 - matrix)
    as_query = np.minimum(1.0, twice.sum(1))
    return np.asarray(value_norm * (matrix.sum(0) + score_norm * token_norm**2 * (twice.sum(0) + as_query)).max())
