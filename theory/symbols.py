"""The quantities that the bounds speak of: one name in code, one letter on paper, one meaning, one domain.

The names follow the measurements (`dispersion`, `separation`, `sink_ratio`); the letters follow [1].

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import sympy
from numpy.typing import ArrayLike, NDArray

Expression = Any  # a sympy expression; sympy ships no types


@dataclass(frozen=True)
class Quantity:
    """One quantity.

    Args:
        name: its keyword in every call.
        letter: its LaTeX.
        meaning: what it is, with its unit where it has one.
        lowest: the smallest value that makes sense, 0 for sizes and 1 for counts.
    """

    name: str
    letter: str
    meaning: str
    lowest: float = 0.0

    @property
    def symbol(self) -> Expression:
        """The sympy symbol; positive, since zero is reached as a limit."""
        return sympy.Symbol(self.name, positive=True)


_ALL = (
    Quantity("length", "L", "tokens in the sequence", 1),
    Quantity("keys", "k", "keys that one query keeps (at least)", 1),
    Quantity("token_norm", r"\Xi", "largest Euclidean norm of a token at the attention input"),
    Quantity("score_norm", r"\Gamma", "spectral norm of W_K^T W_Q / sqrt(d_head), temperature included"),
    Quantity("value_norm", r"\Upsilon", "spectral norm of the value(-output) map"),
    Quantity(
        "logit_bound", r"\Gamma \Xi^2", "score_norm times token_norm squared, the largest possible logit, in nats"
    ),
    Quantity("dispersion", r"\delta", "largest spread of a query's logits over the keys it keeps, in nats"),
    Quantity("dispersion_full", r"\delta_s", "largest spread of a query's logits under full attention, in nats"),
    Quantity("separation", r"\Delta", "smallest gap between a query's kept and masked logits, in nats"),
    Quantity("sink_ratio", r"\beta", "most queries that keep one key, divided by the keys that a query keeps"),
    Quantity("dispersion_ratio", "c_1", "dispersion divided by dispersion_full"),
    Quantity("separation_ratio", "c_2", "separation divided by dispersion_full"),
    Quantity("largest_probability", "p_{1}", "largest attention weight of a query"),
    Quantity("second_probability", "p_{2}", "second largest attention weight of a query"),
    Quantity("queries_per_key", "c", "most queries that keep one key", 1),
    Quantity("jacobian_norm", "j", "largest 1-norm of a query's softmax Jacobian"),
    Quantity("logit_change", r"\|z - z'\|_\infty", "largest change of one logit, in nats"),
    Quantity("score_spectral_norm", r"\|P\|", "spectral norm of the attention matrix"),
    Quantity("tokens_spectral_norm", r"\|X\|", "spectral norm of the token matrix"),
    Quantity("curvature", "g_1", "largest p1 (1 - p1 + p2) over the queries"),
    Quantity("input_stability", r"\lambda_X", "Lipschitz constant of an attention with respect to its input"),
    Quantity(
        "parameter_stability", r"\lambda_W", "Lipschitz constant of an attention with respect to its score matrix"
    ),
    Quantity("value_stability", r"\lambda_V", "Lipschitz constant of an attention with respect to its value matrix"),
    Quantity("normalization", r"\nu", "Lipschitz constant of one LayerNorm (1 / s where tokens deviate by at least s)"),
    Quantity("token_deviation", "s", "smallest standard deviation of a token's coordinates, sqrt(variance + eps)"),
    Quantity("mlp_in_norm", "B_P", "spectral norm of the first matrix of the MLP"),
    Quantity("mlp_out_norm", "B_R", "spectral norm of the second matrix of the MLP"),
    Quantity("activation", r"\alpha", "Lipschitz constant of the activation (ReLU 1, GELU 1.13, Mish 1.09)"),
    Quantity("block_gain", r"\eta", "Lipschitz constant of one encoder block with respect to its input"),
    Quantity("layers", "N", "encoder blocks", 1),
    Quantity("head_norm", "B_H", "spectral norm of the linear head"),
    Quantity("lipschitz", "G", "Lipschitz constant of the loss of one sample in the parameters"),
    Quantity("smoothness", "B", "Lipschitz constant of the gradient of the loss in the parameters"),
    Quantity("steps", "T", "gradient steps", 1),
    Quantity("samples", "n", "training samples", 1),
    Quantity("suboptimality", "D", "loss at the start minus its infimum"),
    Quantity("noise", r"\sigma", "root mean squared deviation of the stochastic gradient"),
    Quantity("step_factor", "a", "step t has a step size of at most a / t"),
    Quantity("loss_range", "M", "largest minus smallest value of the loss on one sample"),
)
QUANTITIES: dict[str, Quantity] = {quantity.name: quantity for quantity in _ALL}


def symbol(name: str) -> Expression:
    """Look up the sympy symbol of a quantity.

    Args:
        name: one of `QUANTITIES`.

    Returns:
        The symbol.
    """
    return QUANTITIES[name].symbol


def check(arguments: Mapping[str, ArrayLike]) -> dict[str, NDArray[np.float64]]:
    """Turn arguments into float64 arrays and refuse impossible values.

    Args:
        arguments: values by quantity name; NaN passes.

    Returns:
        The arrays.

    Raises:
        TypeError: if a name is not a quantity.
        ValueError: if a value is not a number or lies below what the quantity allows; the message names both.
    """
    arrays = {}
    for name, values in arguments.items():
        quantity = QUANTITIES.get(name)
        if quantity is None:
            raise TypeError(f"Expected quantities among {', '.join(QUANTITIES)}, but got `{name}`.")
        try:
            array = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            raise ValueError(f"Expected `{name}` to be a number or an array of numbers, but got {values!r}.") from None
        low = array < quantity.lowest
        if low.any():
            raise ValueError(
                f"Expected `{name}` to be at least {quantity.lowest:g} ({quantity.meaning}), but got {array[low][0]:g}."
            )
        arrays[name] = array
    return arrays
