r"""From the constants of each attention to those of the whole encoder and of the training objective.

The encoder is the pre-norm one of [1]: a block maps tokens :math:`x` to :math:`y = x + A(\nu(x))` and then to
:math:`y + R\,\alpha(P\,\nu(y))`, with LayerNorm :math:`\nu`; the last block's tokens are averaged, mapped by a linear
head and compared with the label by cross-entropy. Distances between token matrices are sums of token norms, those
between parameters spectral norms (and hence Frobenius norms). The rules are the usual ones: constants multiply along a
composition, a residual adds 1, and the change of a parameter reaches the loss through the blocks behind it.

Constants that come from measured quantities hold where those quantities hold: at the parameters and inputs at which
they were measured for derivatives, and for finite changes only where they hold all along the way.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import sympy

from theory.bound import PAPER, Bound
from theory.symbols import Expression, symbol

_norm, _inner, _outer, _activation = (
    symbol(name) for name in ("normalization", "mlp_in_norm", "mlp_out_norm", "activation")
)
_length, _tokens, _head = symbol("length"), symbol("token_norm"), symbol("head_norm")
_SOURCE = f"composition of Lipschitz maps, for the encoder of {PAPER}; this project, derivation in docs/theory.md"
_ATTENTION: Expression = 1 + _norm * symbol("input_stability")
_MLP: Expression = 1 + _norm * _activation * _inner * _outer
_OBJECTIVE: Expression = sympy.sqrt(2) * _head / _length


def _bound(name: str, bounded: str, expression: Expression, assumptions: str) -> Bound:
    return Bound(name, bounded, expression, assumptions, _SOURCE)


layer_norm = _bound(
    "layer-norm",
    r"\|D\,\mathrm{LayerNorm}\|_2",
    1 / symbol("token_deviation"),
    "LayerNorm without affine map at tokens whose coordinates deviate by at least s (sqrt(variance + eps)); times the "
    "largest factor where there is an affine map",
)
attention_gain = _bound(
    "network-attention",
    r"\eta_A",
    _ATTENTION,
    "residual around attention behind LayerNorm; lambda_X summed over the heads",
)
mlp_gain = _bound(
    "network-mlp",
    r"\eta_F",
    _MLP,
    "residual around an MLP behind LayerNorm, with an activation of constant alpha (1 for ReLU, not for GELU and Mish)",
)
block_gain = _bound(
    "network-block", r"\eta", _ATTENTION * _MLP, "both residuals of one block; one constant for both LayerNorms"
)
encoder = _bound(
    "network-encoder",
    r"\|X_N - X_N'\|_{2,1} / \|X_0 - X_0'\|_{2,1}",
    symbol("block_gain") ** symbol("layers"),
    "N blocks with one constant",
)
objective_input = _bound(
    "network-objective-input",
    r"|\ell - \ell'| / \|X_0 - X_0'\|_{2,1}",
    _OBJECTIVE * symbol("block_gain") ** symbol("layers"),
    "N blocks, mean over the L tokens, linear head, cross-entropy (constant sqrt(2) in the logits)",
)
objective_output = _bound(
    "network-objective-output",
    r"|\ell - \ell'| / \|X_N - X_N'\|_{2,1}",
    _OBJECTIVE,
    "mean over the L tokens, linear head, cross-entropy (constant sqrt(2) in the logits)",
)
score_gain = _bound(
    "network-score", r"\|y - y'\|_{2,1} / \|W - W'\|_2", symbol("parameter_stability"), "one head's score matrix"
)
value_gain = _bound(
    "network-value", r"\|y - y'\|_{2,1} / \|V - V'\|_2", symbol("value_stability"), "one head's value map"
)
mlp_in_gain = _bound(
    "network-mlp-in",
    r"\|y - y'\|_{2,1} / \|P - P'\|_2",
    _activation * _outer * _length * _tokens,
    "token norms at most Xi behind the MLP's LayerNorm",
)
mlp_out_gain = _bound(
    "network-mlp-out",
    r"\|y - y'\|_{2,1} / \|R - R'\|_2",
    _activation * _inner * _length * _tokens,
    "as network-mlp-in; the activation maps 0 to 0; biases are taken in by a constant coordinate of the tokens",
)
head_gain = _bound(
    "network-head", r"|\ell - \ell'| / \|H - H'\|_2", sympy.sqrt(2) * _tokens, "the mean token has a norm of at most Xi"
)
BOUNDS = (
    layer_norm,
    attention_gain,
    mlp_gain,
    block_gain,
    encoder,
    objective_input,
    objective_output,
    score_gain,
    value_gain,
    mlp_in_gain,
    mlp_out_gain,
    head_gain,
)


@dataclass(frozen=True)
class Block:
    """What one encoder block contributes.

    Args:
        input_stability: lambda_X, summed over the heads.
        parameter_stability: lambda_W; with several heads the root of the sum of its squares.
        value_stability: lambda_V, likewise.
        attention_normalization: constant of the LayerNorm before attention.
        mlp_normalization: constant of the LayerNorm before the MLP.
        mlp_in_norm: spectral norm of the MLP's first matrix, with its bias as a further column where it has one.
        mlp_out_norm: spectral norm of the MLP's second matrix.
        token_norm: largest token norm behind the MLP's LayerNorm, with a constant coordinate where there are biases.
        activation: Lipschitz constant of the activation.
    """

    input_stability: float
    parameter_stability: float
    value_stability: float
    attention_normalization: float
    mlp_normalization: float
    mlp_in_norm: float
    mlp_out_norm: float
    token_norm: float
    activation: float = 1.0


@dataclass(frozen=True)
class Network:
    """Lipschitz constants of an encoder and its objective, as natural logarithms.

    Args:
        encoder: of the last tokens with respect to the first.
        objective_input: of the loss with respect to the first tokens.
        scores: of the loss with respect to each block's W, likewise `values`, `mlp_in`, `mlp_out`.
        values: with respect to each block's V.
        mlp_in: with respect to each block's first MLP matrix.
        mlp_out: with respect to each block's second MLP matrix.
        head: with respect to the linear head.
        behind_attention: of the loss with respect to the tokens behind each block's attention.
        behind_mlp: of the loss with respect to the tokens behind each block.
    """

    encoder: float
    objective_input: float
    scores: tuple[float, ...]
    values: tuple[float, ...]
    mlp_in: tuple[float, ...]
    mlp_out: tuple[float, ...]
    head: float
    behind_attention: tuple[float, ...]
    behind_mlp: tuple[float, ...]

    @property
    def objective_parameters(self) -> float:
        """The logarithm of the constant with respect to all parameters together, in the Euclidean norm.

        A change of the loss is at most the sum of each constant times the norm of its change, hence at most the root of
        the sum of squared constants times the Euclidean norm of all changes.
        """
        return log_root_sum_square([*self.scores, *self.values, *self.mlp_in, *self.mlp_out, self.head])


def log_root_sum_square(logs: Sequence[float]) -> float:
    """Combine constants, given as logarithms, to one in the Euclidean norm.

    Args:
        logs: logarithms of constants.

    Returns:
        The logarithm of the root of the sum of their squares.
    """
    return float(np.logaddexp.reduce(2 * np.asarray(logs, dtype=np.float64)) / 2)


def compose(blocks: Sequence[Block], *, length: float, head_norm: float, pooled_norm: float) -> Network:
    """Compose the constants of blocks to those of the network.

    Args:
        blocks: the encoder's blocks, first to last.
        length: tokens that are averaged.
        head_norm: spectral norm of the linear head.
        pooled_norm: largest norm of the mean token, with a constant coordinate where the head has a bias.

    Returns:
        The constants, as logarithms.

    Raises:
        ValueError: if there are no blocks.
    """
    if not blocks:
        raise ValueError("Expected `blocks` to hold at least one block, but got none.")
    known = [
        {field.name: getattr(block, field.name) for field in fields(block)} | {"length": length} for block in blocks
    ]
    attention = [float(attention_gain.log(**_only(one, "attention"))) for one in known]
    mlp = [float(mlp_gain.log(**_only(one, "mlp"))) for one in known]
    output = float(objective_output.log(length=length, head_norm=head_norm))
    behind_attention: list[float] = []
    behind_mlp: list[float] = []
    behind = output
    for through_attention, through_mlp in zip(reversed(attention), reversed(mlp), strict=True):
        behind_mlp.insert(0, behind)
        behind_attention.insert(0, behind + through_mlp)
        behind += through_mlp + through_attention

    def reach(places: Sequence[float], gain: Bound) -> tuple[float, ...]:
        return tuple(place + float(gain.log(**_only(one, "mlp"))) for place, one in zip(places, known, strict=True))

    return Network(
        encoder=sum(attention) + sum(mlp),
        objective_input=behind,
        scores=reach(behind_attention, score_gain),
        values=reach(behind_attention, value_gain),
        mlp_in=reach(behind_mlp, mlp_in_gain),
        mlp_out=reach(behind_mlp, mlp_out_gain),
        head=float(head_gain.log(token_norm=pooled_norm)),
        behind_attention=tuple(behind_attention),
        behind_mlp=tuple(behind_mlp),
    )


def _only(known: dict[str, float], branch: str) -> dict[str, float]:
    # The two LayerNorms of a block share one symbol in the formulas.
    rest = {name: value for name, value in known.items() if not name.endswith("_normalization")}
    return rest | {"normalization": known[f"{branch}_normalization"]}
