"""The smallest and the largest logits of each query, the one costly step that an accelerator helps.

With numba installed (the extra `fast`) each row is read once. Without it the same is done with torch, in groups of
keys where rows are long: the n largest lie in the n groups with the largest maxima.
"""

from __future__ import annotations

import importlib.util

import torch
from jaxtyping import Bool, Float
from torch import Tensor

ACCELERATED = importlib.util.find_spec("numba") is not None
"""Whether to use numba; the numbers are the same either way."""

GROUP = 64
"""Keys in a group; groups pay from about fifty of them on."""


def extremes_and_leading(
    logits: Float[Tensor, "batch head query key"],
    allowed: Bool[Tensor, "batch head query key"] | None,
    number: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Smallest logit, and the largest ones with their keys, among the allowed keys.

    Args:
        logits: scores in nats.
        allowed: which keys take part; all where None.
        number: how many of the largest, at most the number of keys.

    Returns:
        Smallest (inf where no key is allowed), largest in falling order (-inf past the allowed keys), keys of the
        largest; which of equal logits come first is not defined, nor what a NaN does.
    """
    if ACCELERATED and logits.device.type == "cpu" and logits.dtype in (torch.float32, torch.float64):
        from probes import fast

        return fast.extremes_and_leading(logits, allowed, number)
    low = (logits if allowed is None else logits.masked_fill(~allowed, torch.inf)).amin(-1)
    high = logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)
    values, indices = leading(high, number)
    return low, values, indices


def leading(scores: Float[Tensor, "*rows key"], number: int) -> tuple[Tensor, Tensor]:
    """The largest scores of each row, in falling order, and where they are.

    Args:
        scores: one row a query.
        number: how many.

    Returns:
        Values and indices, (*rows, number).
    """
    keys = scores.shape[-1]
    groups = keys // GROUP
    if groups < 3 * number or groups < 32:
        largest = scores.topk(number, dim=-1)
        return largest.values, largest.indices
    grouped = scores[..., : groups * GROUP].reshape(*scores.shape[:-1], groups, GROUP)
    best = grouped.amax(-1).topk(number, dim=-1).indices  # (*rows, number)
    inside = grouped.gather(-2, best[..., None].expand(*best.shape, GROUP)).flatten(-2)
    position = (best[..., None] * GROUP + torch.arange(GROUP, device=scores.device)).flatten(-2)
    if groups * GROUP < keys:
        inside = torch.cat([inside, scores[..., groups * GROUP :]], dim=-1)
        rest = torch.arange(groups * GROUP, keys, device=scores.device)
        position = torch.cat([position, rest.expand(*position.shape[:-1], len(rest))], dim=-1)
    largest = inside.topk(number, dim=-1)
    return largest.values, position.gather(-1, largest.indices)
