"""Keep the largest: the exact cut that all ranking rules share.

Ties are cut at the lowest index first, so that every rule keeps exactly as many keys as it says. A NaN score ranks with
minus infinity; infinite scores are real values.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

FIRST_CANDIDATES = 64
"""Keys looked at first where the count isn't known; then more, up to all."""

FEW = 16
"""Fewer largest values than this are found by torch, more by numpy where the scores are in its reach."""


def masked(scores: Float[Tensor, "... key"], eligible: Bool[Tensor, "... key"]) -> Float[Tensor, "... key"]:
    """Scores with minus infinity at keys that may not be chosen, and for NaN.

    Args:
        scores: any scores.
        eligible: the keys to choose among.

    Returns:
        The scores to rank.
    """
    ranked = scores.masked_fill(~eligible, -torch.inf)
    return ranked.nan_to_num_(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)


def largest(scores: Float[Tensor, "... key"], eligible: Bool[Tensor, "... key"], k: int) -> Bool[Tensor, "... key"]:
    """The k largest scores among the eligible keys, the lowest index first among equals.

    Args:
        scores: any scores.
        eligible: the keys to choose among.
        k: how many.

    Returns:
        True at min(k, number of eligible) keys of each row.
    """
    if k >= scores.shape[-1]:
        return eligible
    ranked = masked(scores, eligible)
    return cut(ranked, eligible, top(ranked, k)[..., -1:], k)


def top(ranked: Float[Tensor, "... key"], count: int) -> Float[Tensor, "... count"]:
    """The largest scores of each row, in falling order.

    Args:
        ranked: scores without NaN.
        count: how many, at most the number of keys.

    Returns:
        The values alone.
    """
    if ranked.device.type != "cpu" or count < FEW:
        return ranked.topk(count, dim=-1).values
    # numpy sorts and partitions values with vector instructions, torch sorts pairs of value and index one by one.
    values = ranked.detach().numpy()
    if count < values.shape[-1]:
        values = np.partition(values, values.shape[-1] - count, axis=-1)[..., -count:]
    return torch.from_numpy(np.sort(values, axis=-1)).flip(-1)


def cut(
    ranked: Float[Tensor, "... key"],
    eligible: Bool[Tensor, "... key"],
    threshold: Float[Tensor, "... 1"],
    k: int | Int[Tensor, "... 1"],
) -> Bool[Tensor, "... key"]:
    """The eligible keys at or above the k-th largest score, and of those that equal it only the first.

    Args:
        ranked: scores, minus infinity where not eligible.
        eligible: the keys to choose among.
        threshold: the k-th largest score of each row.
        k: how many to keep.

    Returns:
        The kept keys.
    """
    kept = (ranked >= threshold) & eligible
    if not bool((kept.sum(-1, keepdim=True, dtype=torch.int32) > k).any()):
        return kept
    above = ranked > threshold
    tied = kept & ~above
    return above | (tied & (tied.cumsum(-1) <= k - above.sum(-1, keepdim=True)))


def leading(
    scores: Float[Tensor, "... key"],
    eligible: Bool[Tensor, "... key"],
    count: Callable[[Float[Tensor, "... candidate"], Float[Tensor, "... key"]], Int[Tensor, "... 1"]],
) -> Bool[Tensor, "... key"]:
    """The largest scores of each row, as many as `count` says.

    A row whose largest score is plus infinity is ranked by its limit (0 there, minus infinity elsewhere), and a row of
    minus infinities as equal scores, so that `count` sees no infinite maximum.

    Args:
        scores: any scores.
        eligible: the keys to choose among.
        count: told the largest scores in falling order and all scores, how many to keep; an answer that is not less
            than the number of candidates is asked again with more.

    Returns:
        The kept keys.
    """
    ranked = masked(scores, eligible)
    high = ranked.amax(-1, keepdim=True)
    if bool(high.isinf().any()):
        limit = torch.zeros_like(ranked).masked_fill_(~eligible | (ranked < high), -torch.inf)
        ranked = torch.where(high.isinf(), limit, ranked)
    keys = ranked.shape[-1]
    size = min(FIRST_CANDIDATES, keys)
    while True:
        values = top(ranked, size)
        counts = count(values, ranked).clamp(1, keys)
        if size == keys or not bool((counts >= size).any()):
            break
        size = keys if ranked.device.type == "cpu" else min(8 * size, keys)
    counts = counts.clamp(max=size)
    return cut(ranked, eligible, values.gather(-1, counts - 1), counts)
