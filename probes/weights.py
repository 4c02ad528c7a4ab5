r"""The constants of the bounds, from a model's weights and inputs: Gamma, Upsilon and MLP norms, and Xi.

Of each head, with weights :math:`W_Q, W_K, W_V` and its share :math:`W_O` of the output map, without biases [1]:
:math:`\Gamma = \|s W_K^\top W_Q\|_2` with the scale s of the logits, :math:`\Upsilon = \|W_O W_V\|_2`; of each layer
:math:`\Xi = \max_i \|x_i\|_2` over the real tokens at the attention's input.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025, Section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor, nn

from probes.attention import AttentionCall
from probes.capture import Capture
from probes.capture.audit import Findings
from probes.measure import evaluating, run

QUANTITIES = ("score_norm", "value_norm", "token_norm", "mlp_norm")
COLUMNS = ("model", "module", "layer", "head", "quantity", "value", "note")
TRIPLES = (("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"), ("q", "k", "v"))
OUTPUTS = ("out", "o_proj", "out_proj", "out_lin", "o", "dense")
NOT_MULTIPLIED = ("q_norm", "k_norm", "q_layernorm", "k_layernorm", "query_norm", "key_norm")


@dataclass(frozen=True)
class Maps:
    """The maps of one attention layer, as matrices from inputs to outputs.

    Args:
        query: all heads below each other.
        key: the same, for the key heads.
        value: the same.
        out: from all heads to the layer's output; None if it was not found.
    """

    query: Float[Tensor, "head_dim width"]
    key: Float[Tensor, "key_head_dim width"]
    value: Float[Tensor, "key_head_dim width"]
    out: Float[Tensor, "width head_dim"] | None


def norms(model: nn.Module, batches: Iterable[Any], *, name: str | None = None) -> pd.DataFrame:
    """Gamma, Upsilon, Xi and MLP norms of a model.

    Args:
        model: any torch module; the weights are read from BERT-, GPT-2- and Llama-style layers, torch's own attention
            and this project's encoder.
        batches: inputs, as for `probes.measure`: they say which layers attend, with which scale, and how large tokens
            are.
        name: the model's name in the table; its class where omitted.

    Returns:
        One row a number, columns `COLUMNS`; `quantity` is `score_norm` (Gamma), `value_norm` (Upsilon), `token_norm`
        (Xi) or `mlp_norm`. Where a number can't be had, `value` is NaN and `note` says `not available` and why.
    """
    calls: dict[str, AttentionCall] = {}
    tokens: dict[str, float] = {}
    capture: Capture

    def receive(call: AttentionCall) -> None:
        calls.setdefault(call.module_name, call)
        frame = next((f for f in reversed(capture.frames.stack) if f.name == call.module_name.partition("#")[0]), None)
        states = None if frame is None else next((v for v in frame.arguments.values() if _is_states(v, call)), None)
        if states is not None:
            largest = states.float().norm(dim=-1)
            real = call.queries if call.queries is not None and call.queries.shape == largest.shape else None
            largest = largest if real is None else largest[real]
            seen = float(largest.max()) if largest.numel() else 0.0
            tokens[call.module_name] = max(tokens.get(call.module_name, 0.0), seen)

    capture = Capture(model, receive, Findings())
    with evaluating(model), torch.no_grad(), capture:
        for batch in batches:
            run(model, batch)
    rows = [row for call in calls.values() for row in _of_layer(model, call, tokens.get(call.module_name))]
    rows += [
        {"module": path, "layer": layer, "quantity": "mlp_norm", "value": value} for path, layer, value in _mlps(model)
    ]
    frame = pd.DataFrame(rows, columns=list(COLUMNS)).astype({"layer": "Int64", "head": "Int64", "value": "float64"})
    frame["model"] = name or type(model).__name__
    return frame.assign(note=frame["note"].fillna(""))


def _is_states(value: Any, call: AttentionCall) -> bool:
    return (
        isinstance(value, Tensor) and value.ndim == 3 and value.shape[1] == call.shape[2] and value.is_floating_point()
    )


def _of_layer(model: nn.Module, call: AttentionCall, xi: float | None) -> Iterator[dict[str, Any]]:
    path = call.module_name.partition("#")[0]
    base, heads = {"module": call.module_name, "layer": call.layer}, call.shape[1]
    maps, reason = maps_of(model, path)
    scale: float | None = call.scale
    if maps is not None and call.scores is not None:
        # torch's own attention has one scale; other scores that were written out don't show theirs.
        fixed = isinstance(model.get_submodule(path), nn.MultiheadAttention)
        scale = (maps.query.shape[0] // heads) ** -0.5 if fixed else None
    if scale is None:
        maps, reason = None, "the scale of written-out scores is not known"
    for head in range(heads):
        where = base | {"head": head}
        if maps is None or scale is None:
            note = f"not available: {reason}"
            yield where | {"quantity": "score_norm", "value": float("nan"), "note": note}
            yield where | {"quantity": "value_norm", "value": float("nan"), "note": note}
            continue
        query, key, value = (
            _head(w, head, heads, maps.query.shape[0] // heads) for w in (maps.query, maps.key, maps.value)
        )
        rotated = "before rotary embedding" if _is_rotary(model, path) else ""
        yield where | {"quantity": "score_norm", "value": scale * product_norm(key.T, query), "note": rotated}
        if maps.out is None:
            yield where | {
                "quantity": "value_norm",
                "value": float("nan"),
                "note": "not available: no output map found",
            }
            continue
        width = maps.out.shape[1] // heads
        out = maps.out[:, head * width : (head + 1) * width]
        yield where | {"quantity": "value_norm", "value": product_norm(out, value), "note": ""}
    note = "" if xi is not None else "not available: the layer's input was not found"
    yield base | {"quantity": "token_norm", "value": float("nan") if xi is None else xi, "note": note}


def _head(weight: Tensor, head: int, heads: int, size: int) -> Tensor:
    # Rows of one head; heads in a group share the rows of their key.
    number = weight.shape[0] // size
    index = head * number // heads
    return weight[index * size : (index + 1) * size]


def product_norm(left: Float[Tensor, "a inner"], right: Float[Tensor, "inner b"]) -> float:
    """Spectral norm of a product of two thin matrices, without forming it.

    Args:
        left: tall.
        right: wide.

    Returns:
        The largest singular value of `left @ right`, computed in float64.
    """
    left, right = left.double(), right.double()
    first, second = torch.linalg.qr(left, mode="r").R, torch.linalg.qr(right.T, mode="r").R
    return float(torch.linalg.matrix_norm(first @ second.T, 2).detach())


def maps_of(model: nn.Module, path: str) -> tuple[Maps | None, str]:
    """Find the maps of an attention layer by the names that libraries give them.

    Args:
        model: the model.
        path: the attending module's path.

    Returns:
        The maps and an empty string, or None and the reason.
    """
    module: nn.Module = model.get_submodule(path)
    if any(hasattr(module, name) for name in NOT_MULTIPLIED):
        return None, "queries and keys are normalised after their maps"
    if isinstance(module, nn.MultiheadAttention):
        packed: Any = module.in_proj_weight
        if packed is None:
            query, key, value = module.q_proj_weight, module.k_proj_weight, module.v_proj_weight
        else:
            query, key, value = packed.chunk(3)
        return Maps(query, key, value, module.out_proj.weight), ""
    packed, out = getattr(module, "c_attn", None), getattr(module, "c_proj", None)
    if packed is not None and out is not None and packed.weight.shape[1] == 3 * packed.weight.shape[0]:
        query, key, value = packed.weight.T.chunk(3)  # transformers' Conv1D keeps (input, output)
        return Maps(query, key, value, out.weight.T), ""
    for triple in TRIPLES:
        found = [getattr(module, name, None) for name in triple]
        if all(isinstance(part, nn.Linear) for part in found):
            first, second, third = (part.weight for part in found if isinstance(part, nn.Linear))
            return Maps(first, second, third, _output(model, path)), ""
    return None, f"the maps of {type(module).__name__} are not known"


def _output(model: nn.Module, path: str) -> Tensor | None:
    module = model.get_submodule(path)
    # BERT keeps the output map beside the attending module: attention.self, attention.output.dense.
    beside = getattr(model.get_submodule(path.rpartition(".")[0]), "output", None) if path else None
    for place in (module, beside):
        for name in OUTPUTS:
            layer = getattr(place, name, None)
            if isinstance(layer, nn.Linear):
                return layer.weight
    return None


def _is_rotary(model: nn.Module, path: str) -> bool:
    parts = path.split(".")
    above = (model.get_submodule(".".join(parts[:n])) for n in range(len(parts) + 1))
    return any("rotary" in child or "rope" in child for module in above for child, _ in module.named_children())


def _mlps(model: nn.Module) -> Iterator[tuple[str, int | None, float]]:
    for path, module in model.named_modules():
        weight = getattr(module, "weight", None)
        linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
        number = next((part for part in path.split(".") if part.isdigit()), None)
        inside = any(word in path.lower() for word in ("attention", "attn", "embed", "crossatt"))
        if linear and number is not None and not inside and isinstance(weight, Tensor):
            yield path, int(number), float(torch.linalg.matrix_norm(weight.detach().double(), 2))
