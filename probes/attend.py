"""Attention under a selection: the one operator that models are trained with and that probes recognise.

`attend` behaves like `torch.nn.functional.scaled_dot_product_attention` with a selection in place of only a mask. It takes
part in torch's function-override protocol, so that capture sees it exactly as it sees torch's own attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from probes.selection import Full, Selection


def attend(
    query: Float[Tensor, "batch head query dim"],
    key: Float[Tensor, "batch head key dim"],
    value: Float[Tensor, "batch head key value_dim"],
    selection: Selection,
    *,
    allowed: Bool[Tensor, "#batch #head #query key"] | None = None,
    scale: float | None = None,
    dropout: float | Callable[[Tensor], Tensor] = 0.0,
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
    if isinstance(selection, Full) and not callable(dropout):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, dropout_p=dropout, scale=scale)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = (query * factor) @ key.mT  # (batch, head, query, key)
    with torch.no_grad():
        everything = torch.ones((), dtype=torch.bool, device=logits.device) if allowed is None else allowed
        kept = selection.keep(logits, everything.expand_as(logits))
    # A query that keeps nothing would be NaN; its weights are set to zero instead, as torch's own attention does.
    weights = logits.masked_fill(~kept, -torch.inf).softmax(-1)
    if not bool(kept.any(-1).all()):
        weights = weights.masked_fill(~kept.any(-1, keepdim=True), 0.0)
    if callable(dropout):
        return dropout(weights) @ value
    return F.dropout(weights, dropout) @ value if dropout else weights @ value
