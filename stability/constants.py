"""Lipschitz constants of one of our encoders at a sequence: measured per layer, composed by `theory.network`.

The constants are local: they hold for small changes around the parameters and tokens at which they were measured,
because dispersions, norms and deviations of tokens change with both. Biases are taken in by a constant last
coordinate of the tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

import theory
from stability.attention import SelfAttention
from stability.errors import UserError
from stability.layer import Layer
from stability.model import EPSILON, Block, Encoder
from theory.network import Network, compose, log_root_sum_square

# Largest slopes: of ReLU 1; of GELU 1.1290 at sqrt(2); of Mish 1.0885 near 1.49. Rounded upwards.
ACTIVATION = {"relu": 1.0, "gelu": 1.13, "mish": 1.09}
Form = Literal["measured", "sharp"]


@dataclass(frozen=True)
class Constants:
    """Constants of an encoder and its cross-entropy, as natural logarithms.

    Args:
        network: what `theory.network.compose` made of the blocks.
        parameters: of the loss of one sequence with respect to each linear layer's weight and bias together and to the
            embedding, in the Euclidean norm, by module name.
        layers: the attention of each block, one list of heads a block, of the sequence with the largest constants.
    """

    network: Network
    parameters: dict[str, float]
    layers: list[list[Layer]]

    @property
    def objective_parameters(self) -> float:
        """The logarithm of the constant with respect to all parameters together, in the Euclidean norm."""
        return log_root_sum_square(list(self.parameters.values()))


@dataclass(frozen=True)
class _Seen:
    """What went into one block: tokens before and behind both norms, shape (token, width)."""

    before: Tensor
    normed: Tensor
    middle: Tensor
    behind: Tensor


@torch.no_grad()
def constants(model: Encoder, tokens: Int[Tensor, " token"], *, form: Form = "measured") -> Constants:
    """Measure an encoder at one sequence and compose its constants.

    Args:
        model: an encoder that averages over tokens, with plain logits and without a causal mask; it is not changed.
        tokens: one sequence without padding.
        form: `measured` takes each attention's constant from its attention matrix, `sharp` from dispersion and sinks.

    Returns:
        The constants.

    Raises:
        UserError: if the encoder is of another make or the sequence has padding.
    """
    config = model.config
    if config.readout != "mean" or config.scalable_softmax or config.causal or config.paper_compat:
        raise UserError(
            "Expected an encoder with the mean as readout, plain logits, no causal mask and without `paper_compat`, "
            f"but got {config}."
        )
    if tokens.ndim != 1 or (config.padding is not None and bool((tokens == config.padding).any())):
        raise UserError(f"Expected one sequence without padding, but got shape {tuple(tokens.shape)} or padded tokens.")
    seen, pooled = _watch(model, tokens)
    blocks, heads = [], []
    for index, (module, inside) in enumerate(zip(model.blocks, seen, strict=True)):
        layers = heads_of(cast(Block, module).attention, inside.normed, index)
        heads.append(layers)
        blocks.append(_block(cast(Block, module), inside, layers, form, config.activation))
    network = compose(
        blocks,
        length=len(tokens),
        head_norm=_norm(model.linear.weight),
        pooled_norm=float(_extend(pooled[None]).norm()),
    )
    return Constants(network, _parameters(model, network, blocks, heads, len(tokens)), heads)


def heads_of(attention: SelfAttention, tokens: Float[Tensor, "token width"], index: int) -> list[Layer]:
    """Write one attention module as the theorems see it.

    Args:
        attention: the module.
        tokens: its input, one sequence.
        index: of its block.

    Returns:
        One layer a head; the tokens have a constant last coordinate that can't move.
    """
    extended = _extend(tokens.double())
    layers = []
    for head in range(attention.heads):
        query, key, value, out = _matrices(attention, head)
        score = attention.scale * key.T @ query
        logits = (extended @ score.T @ extended.T)[None, None]
        kept = attention.selection.keep(logits, torch.ones_like(logits, dtype=torch.bool))[0, 0]
        kind = attention.selection.kind
        name = f"blocks.{index}.attention"
        layers.append(Layer(extended, score, out @ value, kept, kind, name, index, head, free=tokens.shape[1]))
    return layers


def _matrices(attention: SelfAttention, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    # Query, key and value maps of one head with their biases as last columns, and its part of the output map.
    rows = slice(head * attention.head_width, (head + 1) * attention.head_width)
    maps = [_joined(layer)[rows] for layer in (attention.query, attention.key, attention.value)]
    return maps[0], maps[1], maps[2], attention.out.weight.double()[:, rows]


def _joined(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], dim=1).double()


def _extend(tokens: Tensor) -> Tensor:
    return nn.functional.pad(tokens, (0, 1), value=1.0)


def _norm(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix.double(), 2))


def _watch(model: Encoder, tokens: Tensor) -> tuple[list[_Seen], Tensor]:
    # The tokens at every place of every block, without dropout, from one forward pass.
    found: list[dict[str, Tensor]] = []

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], *rest: Any) -> None:
            if name == "before":
                found.append({})
            found[-1][name] = inputs[0][0].clone()

        return hook

    pooled: list[Tensor] = []
    handles = [model.linear.register_forward_pre_hook(lambda _, inputs: pooled.append(inputs[0][0].clone()))]
    for block in model.blocks:
        module = cast(Block, block)
        handles.append(module.register_forward_pre_hook(note("before")))
        handles.append(module.attention.register_forward_pre_hook(note("normed")))
        handles.append(module.attention.register_forward_hook(_add_output(found)))
        handles.append(module.rise.register_forward_pre_hook(note("behind")))
    training = model.training
    try:
        model.eval()
        model(tokens[None])
    finally:
        model.train(training)
        for handle in handles:
            handle.remove()
    return [_Seen(**one) for one in found], pooled[0]


def _add_output(found: list[dict[str, Tensor]]) -> Callable[..., None]:
    def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        found[-1]["middle"] = found[-1]["before"] + output[0]

    return hook


def _slope_of_norm(tokens: Tensor, epsilon: float) -> float:
    deviation = (tokens.double().var(-1, correction=0) + epsilon).sqrt().amin()
    return float(theory.network.layer_norm.value(token_deviation=float(deviation)))


def _block(block: Block, seen: _Seen, heads: list[Layer], form: Form, activation: str) -> theory.network.Block:
    inputs, scores, values = [], [], []
    for head in heads:
        known = head.quantities()
        weights = head.weights().numpy()
        norms = {name: known[name] for name in ("token_norm", "score_norm", "value_norm")}
        if form == "measured":
            inputs.append(float(theory.attention.measured_input_stability(weights, **norms)))
        else:
            shared = {"dispersion": known["dispersions"], "keys": known["kept"]}
            inputs.append(
                theory.attention.masked_input_stability(**shared, queries_per_key=known["queries_per_key"], **norms)
            )
        norms.pop("score_norm")
        scores.append(theory.attention.measured_parameter_stability(weights, **norms))
        values.append(theory.attention.measured_value_stability(weights, head.tokens.numpy()))
    return theory.network.Block(
        input_stability=sum(inputs),
        parameter_stability=math.hypot(*scores),
        value_stability=math.hypot(*values),
        attention_normalization=_slope_of_norm(seen.before, block.epsilon),
        mlp_normalization=_slope_of_norm(seen.middle, EPSILON),
        mlp_in_norm=_norm(_joined(block.rise)),
        mlp_out_norm=_norm(block.fall.weight),
        token_norm=float(_extend(seen.behind).norm(dim=1).max()),
        activation=ACTIVATION[activation],
    )


def _parameters(
    model: Encoder, network: Network, blocks: list[theory.network.Block], heads: list[list[Layer]], length: int
) -> dict[str, float]:
    # From W and V to the maps that make them up: ||dW|| <= scale (||K|| ||dQ|| + ||dK|| ||Q||), ||dV|| likewise.
    found = {"embedding": network.objective_input + math.log(length * math.sqrt(model.config.width))}
    for index, module in enumerate(model.blocks):
        block, name = cast(Block, module), f"blocks.{index}"
        attention = block.attention
        behind = network.behind_attention[index]
        parts: dict[str, list[float]] = {"query": [], "key": [], "value": [], "out": []}
        for number, head in enumerate(heads[index]):
            query, key, value, out = (_norm(matrix) for matrix in _matrices(attention, number))
            weights, known = head.weights().numpy(), head.quantities()
            norms = {name: known[name] for name in ("token_norm", "value_norm")}
            score_gain = theory.attention.measured_parameter_stability(weights, **norms)
            value_gain = theory.attention.measured_value_stability(weights, head.tokens.numpy())
            parts["query"].append(score_gain * attention.scale * key)
            parts["key"].append(score_gain * attention.scale * query)
            parts["value"].append(value_gain * out)
            parts["out"].append(value_gain * value)
        parts["out"].append(length)  # its bias reaches every token
        # A gain of 0 (a softmax over a single key never moves) has the logarithm minus infinity.
        logs = {part: math.log(gain) if (gain := math.hypot(*gains)) else -math.inf for part, gains in parts.items()}
        found |= {f"{name}.attention.{part}": behind + log for part, log in logs.items()}
        found[f"{name}.rise"] = network.mlp_in[index]
        bias = network.behind_mlp[index] + math.log(length)
        found[f"{name}.fall"] = log_root_sum_square([network.mlp_out[index], bias])
    return found | {"linear": network.head}
