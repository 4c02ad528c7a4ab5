r"""Input-stability of softmax: how far the weights move when the logits do.

Throughout, :math:`J = \mathrm{diag}(s) - s s^T` is the Jacobian of softmax and
:math:`p(\delta, n) = e^\delta / (e^\delta + n - 1)` the largest probability that n logits of dispersion at most
:math:`\delta` allow. Bounds on the change of the weights are per unit of the 1-norm of the change of the logits.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025.
[2] Yudin et al., Pay Attention to Attention Distribution: A New Local Lipschitz Bound for Transformers, 2025.
[3] Nair, Softmax is 1/2-Lipschitz, 2025 (arXiv 2510.23012).
[4] Emadi, 2026 (arXiv 2602.18849).
[5] Tzachristas et al., 2025 (arXiv 2512.07647).
"""

from __future__ import annotations

import numpy as np
import sympy
from numpy.typing import ArrayLike, NDArray

from theory.bound import PAPER, RECONSTRUCTED, Bound
from theory.symbols import Expression, symbol

_dispersion, _keys, _separation = symbol("dispersion"), symbol("keys"), symbol("separation")
_first, _second, _length = symbol("largest_probability"), symbol("second_probability"), symbol("length")

# Written with e^-dispersion, so that its logarithm keeps all digits where the probability is close to 1.
LARGEST: Expression = 1 / (1 + (_keys - 1) * sympy.exp(-_dispersion))
CAPPED: Expression = sympy.Min(LARGEST, sympy.Rational(1, 2))
ONE_NORM: Expression = 2 * CAPPED * (1 - CAPPED)
PUBLISHED_SETS: Expression = 1 + 1 / _separation
SHARP_SETS: Expression = sympy.Max(2, 1 / _separation)

_SAME_SET = "both logit vectors have dispersion at most delta over the same keys, at least k of them"
_TWO_SETS = (
    "the kept sets M and M' are the k largest logits of z and of z' (at least k for sets of varying size), each with "
    "dispersion at most delta within and separation at least Delta to the rest; the change of the logits is counted "
    "over the keys in M or M'"
)
_OURS = "this project; derivation in docs/theory.md"

largest_probability = Bound(
    "largest-probability",
    r"\max_j s_j",
    LARGEST,
    "at least k logits with dispersion at most delta; reached when one logit lies delta above k - 1 equal ones",
    _OURS,
)
full = Bound(
    "softmax-full",
    r"\|s - s'\|_1 / \|z - z'\|_1",
    sympy.exp(_dispersion) / _keys,
    f"{_SAME_SET}. Too small by up to 2 (1 - 1/k) where e^delta is below about 0.41 k",
    f"{PAPER}, as used by Theorems 3 and 4; {RECONSTRUCTED}",
)
full_sharp = Bound(
    "softmax-full-sharp",
    r"\|s - s'\|_1 / \|z - z'\|_1",
    ONE_NORM,
    f"{_SAME_SET}; it is the largest 1-norm 2 s_j (1 - s_j) of the Jacobian, reached for k of at least 2",
    _OURS,
)
heavy_hitter = Bound(
    "softmax-heavy-hitter",
    r"\|s - s'\|_1 / \|(z - z')_{M \cup M'}\|_1",
    sympy.exp(_dispersion) / _keys * PUBLISHED_SETS,
    f"{_TWO_SETS}. Too small by up to 2 (1 - 1/k) where Delta is large and e^delta is not",
    f"{PAPER}, as used by Theorem 5; {RECONSTRUCTED}",
    {"dispersion": r"\delta_h", "separation": r"\Delta_h"},
)
heavy_hitter_sharp = Bound(
    "softmax-heavy-hitter-sharp",
    r"\|s - s'\|_1 / \|(z - z')_{M \cup M'}\|_1",
    LARGEST * SHARP_SETS,
    _TWO_SETS,
    _OURS,
    {"dispersion": r"\delta_h", "separation": r"\Delta_h"},
)
inf_to_one = Bound(
    "softmax-inf-to-1",
    r"\|J\|_{\infty \to 1}",
    sympy.Integer(1),
    "any logits; exactly the largest 4 P(A) (1 - P(A)) over sets of keys A (see `balanced_mass`)",
    "[4] Emadi 2026, arXiv 2602.18849 (balanced-mass factor)",
)
p_to_p = Bound(
    "softmax-p-to-p",
    r"\|J\|_{p \to p}",
    sympy.Rational(1, 2),
    "any logits, any p of at least 1",
    "[3] Nair 2025, arXiv 2510.23012",
)
spectral = Bound(
    "softmax-spectral",
    r"\|J\|_2",
    _first * (1 - _first + _second),
    "p1 and p2 are the largest and the second largest weight",
    "[2] Yudin et al. 2025, g_1",
)
total_variation = Bound(
    "softmax-tanh",
    r"\mathrm{TV}(s, s')",
    sympy.tanh(symbol("logit_change") / 2),
    "any two logit vectors over the same keys; a finite change, not a derivative",
    "Hilbert's projective metric (Birkhoff 1957); derivation in docs/theory.md",
)
tail_mass = Bound(
    "tail-mass",
    r"\mathrm{TV}(s_{\mathrm{full}}, s_{\mathrm{kept}})",
    1 / (1 + _keys / sympy.Max(0, _length - _keys) * sympy.exp(_separation)),
    "k of L keys are kept and each lies at least Delta above the rest; 0 where all are kept. "
    "The output moves by at most 2 max ||v|| times this",
    "[5] Tzachristas et al. 2025, arXiv 2512.07647",
)

BOUNDS = (
    largest_probability,
    full,
    full_sharp,
    heavy_hitter,
    heavy_hitter_sharp,
    inf_to_one,
    p_to_p,
    spectral,
    total_variation,
    tail_mass,
)


def one_norm(weights: ArrayLike) -> NDArray[np.float64]:
    r"""Measure :math:`\|J\|_{1 \to 1} = \max_j 2 s_j (1 - s_j)`.

    Args:
        weights: attention weights, shape (..., keys), rows that sum to 1.

    Returns:
        One number a row.
    """
    array = np.asarray(weights, dtype=np.float64)
    return np.asarray((2 * array * (1 - array)).max(-1))


def spectral_factor(weights: ArrayLike) -> NDArray[np.float64]:
    r"""Measure :math:`g_1 = p_1 (1 - p_1 + p_2)`, an upper bound of :math:`\|J\|_2` [2].

    Args:
        weights: attention weights, shape (..., keys), rows that sum to 1.

    Returns:
        One number a row; 0 for a single key.
    """
    ordered = np.sort(np.asarray(weights, dtype=np.float64), -1)
    first = ordered[..., -1]
    second = ordered[..., -2] if ordered.shape[-1] > 1 else np.zeros_like(first)
    return np.asarray(first * (1 - first + second))


def balanced_mass(weights: ArrayLike) -> float:
    r"""Measure :math:`\|J\|_{\infty \to 1} = \max_A 4 P(A) (1 - P(A))` by trying all sets of keys [4].

    Args:
        weights: attention weights of one query, shape (keys,), that sum to 1.

    Returns:
        The norm.

    Raises:
        ValueError: if there are more than 20 keys, since all sets are tried.
    """
    array = np.asarray(weights, dtype=np.float64)
    if array.ndim != 1 or array.size > 20:
        raise ValueError(f"Expected `weights` of one query with at most 20 keys, but got shape {array.shape}.")
    masses = np.zeros(1)
    for weight in array:
        masses = np.concatenate([masses, masses + weight])
    return float((4 * masses * (1 - masses)).max())
