"""Attention under a selection: the operator that models are trained with and that probes recognise.

`attend` behaves like `torch.nn.functional.scaled_dot_product_attention` with a selection in place of only a mask. It
takes part in torch's function-override protocol, so that capture sees it exactly as it sees torch's own attention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from probes.attention import AttentionCall
from probes.selection import Full, Hardmax, Selection, TopK

Dropout = float | Callable[[Tensor], Tensor]

SPARSE_FROM = 128
"""Number of keys from which adding up the few kept values beats a product with a matrix that is mostly zeros."""


def attend(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch head key dim"],
    value: Float[Tensor, "batch head key value_dim"],
    selection: Selection,
    *,
    allowed: Bool[Tensor, "#batch #head #query key"] | None = None,
    scale: float | None = None,
    dropout: Dropout = 0.0,
) -> Float[Tensor, "batch head query value_dim"]:
    r"""Average the values of the kept keys, :math:`\sum_{j \in K_i} \mathrm{softmax}_{K_i}(s\, q_i \cdot k_j)\, v_j`.

    Args:
        query: queries.
        key: keys.
        value: values.
        selection: the rule that chooses the kept keys among the allowed ones; no gradient passes through the choice.
        allowed: the keys that each query may attend to, all where omitted.
        scale: factor on the inner products; one over the square root of the head dimension where omitted.
        dropout: probability of dropping an attention weight, or a function of the weights that drops some (to choose
            the source of randomness); pass 0 outside training.

    Returns:
        One vector a query; zeros where no key is kept.
    """
    if has_torch_function((query, key, value)):
        return handle_torch_function(
            attend, (query, key, value), query, key, value, selection, allowed=allowed, scale=scale, dropout=dropout
        )
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if isinstance(selection, Full):
        if not callable(dropout):
            return F.scaled_dot_product_attention(query, key, value, allowed, dropout, scale=factor)
        return _dense((query * factor) @ key.mT, value, allowed, dropout)
    few = _few(selection)
    logits = (query * factor) @ key.mT if few == 0 or key.shape[-2] < SPARSE_FROM else None
    if 0 < few < key.shape[-2]:
        mixed = _leading(query * factor, key, value, logits, allowed, few, dropout)
        if mixed is not None:
            return mixed
    if logits is None:
        logits = (query * factor) @ key.mT
    with torch.no_grad():
        if selection.kind == "regular" and allowed is None:
            kept = _pattern(selection, *logits.shape[-2:], logits.device)
        else:
            everything = torch.ones((), dtype=torch.bool, device=logits.device) if allowed is None else allowed
            q, k, v = query.detach(), key.detach(), value.detach()
            # Some rules look at more than the logits.
            call = AttentionCall("", None, "self", query=q, key=k, value=v, scale=factor, mask=allowed)
            kept = selection.keep(logits, everything.expand_as(logits), call=call)
    return _dense(logits, value, kept, dropout)


def _few(selection: Selection) -> int:
    # How many keys a rule keeps that takes the largest logits, 0 for other rules.
    if isinstance(selection, TopK):
        return selection.k if selection.ties == "exact" else 0
    return int(isinstance(selection, Hardmax))


def _dense(logits: Tensor, value: Tensor, kept: Bool[Tensor, ...] | None, dropout: Dropout) -> Tensor:
    if kept is None:
        weights = logits.softmax(-1)
    else:
        weights = logits.masked_fill(~kept, -torch.inf).softmax(-1)
        # A query that keeps nothing would be NaN; its weights are set to zero instead, as torch's own attention does.
        bare = ~kept.any(-1, keepdim=True)
        if bool(bare.any()):
            weights = weights.masked_fill(bare, 0.0)
    return _dropped(weights, dropout) @ value


def _dropped(weights: Tensor, dropout: Dropout) -> Tensor:
    if callable(dropout):
        return dropout(weights)
    return F.dropout(weights, dropout) if dropout else weights


@functools.lru_cache(maxsize=32)
def _pattern(selection: Selection, queries: int, keys: int, device: torch.device) -> Bool[Tensor, "1 1 query key"]:
    # A rule by position alone gives the same keys whatever the logits are.
    nothing = torch.zeros(1, 1, queries, keys, device=device)
    return selection.keep(nothing, torch.ones_like(nothing, dtype=torch.bool)).contiguous()


def _leading(
    query: Tensor, key: Tensor, value: Tensor, logits: Tensor | None, allowed: Tensor | None, k: int, dropout: Dropout
) -> Tensor | None:
    # Attention to the k largest logits where they are distinct from the rest; None where ties, NaN or queries without
    # keys need the selection's own careful rule. `query` carries the scale.
    with torch.no_grad():
        scores = query @ key.mT if logits is None else logits
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        values, index = scores.detach().topk(k + 1, dim=-1)
        last, next_one = values[..., k - 1], values[..., k]
        plain = ((last > next_one) | (last == -torch.inf)) & (values[..., 0] > -torch.inf)
        if not bool(plain.all()):
            return None
        values, index = values[..., :k], index[..., :k]
    if logits is None:
        weights = _GatheredLogits.apply(query, key, values, index).softmax(-1)  # type: ignore[no-untyped-call]
        return _GatheredMix.apply(_dropped(weights, dropout), value, index)  # type: ignore[no-any-return,no-untyped-call]
    chosen = logits.gather(-1, index)
    if allowed is not None:
        chosen = chosen.masked_fill(values == -torch.inf, -torch.inf)
    weights = _dropped(chosen.softmax(-1), dropout)
    return torch.zeros_like(logits).scatter(-1, index, weights) @ value


class _GatheredLogits(torch.autograd.Function):
    """The logits of the chosen keys, whose gradients touch the chosen keys only."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, values: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(query, key, index)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, index = ctx.saved_tensors
        gradient = gradient.contiguous()
        return _mix(gradient, key, index), _spread(gradient, query, index, key.shape[-2]), None, None


class _GatheredMix(torch.autograd.Function):
    """The weighted sum of the chosen values."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, value: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(weights, value, index)
        return _mix(weights, value, index)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weights, value, index = ctx.saved_tensors
        of_weights = (_rows(value, index) @ gradient.unsqueeze(-1)).squeeze(-1)  # (batch, head, query, k)
        return of_weights, _spread(weights, gradient, index, value.shape[-2]), None


def _rows(x: Float[Tensor, "batch head key dim"], index: Int[Tensor, "batch head query k"]) -> Tensor:
    # The chosen rows of `x`, (batch, head, query, k, dim).
    return x.flatten(0, 2).index_select(0, _flat(index, x.shape[-2])).view(*index.shape, x.shape[-1])


def _flat(index: Tensor, keys: int) -> Int[Tensor, " chosen"]:
    # Row numbers in a tensor whose batch, head and key dimensions are flattened into one.
    batch, heads = index.shape[:2]
    first = torch.arange(batch * heads, device=index.device).mul_(keys).view(batch, heads, 1, 1)
    return (index + first).flatten()


def _mix(weights: Tensor, x: Tensor, index: Tensor) -> Float[Tensor, "batch head query dim"]:
    # Sum over the chosen keys of weight times row.
    return F.embedding_bag(
        _flat(index, x.shape[-2]).view(-1, index.shape[-1]),
        x.flatten(0, 2),
        per_sample_weights=weights.reshape(-1, index.shape[-1]),
        mode="sum",
    ).view(*index.shape[:-1], x.shape[-1])


def _spread(weights: Tensor, x: Tensor, index: Tensor, keys: int) -> Float[Tensor, "batch head key dim"]:
    # The transpose of `_mix`: add weight times the query's row to each chosen key.
    batch, heads = index.shape[:2]
    result = x.new_zeros(batch * heads * keys, x.shape[-1])
    rows = weights.unsqueeze(-1) * x.unsqueeze(-2)  # (batch, head, query, k, dim)
    return result.index_add_(0, _flat(index, keys), rows.flatten(0, 3)).view(batch, heads, keys, -1)
