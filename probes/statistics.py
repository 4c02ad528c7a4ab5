r"""What is measured on each query's logits: dispersion, separation, and what stands beside them.

Notation: z are one query's logits in nats, C its allowed keys, K the keys it keeps, p the softmax of z over K (and
over the sink logits, where the model has any), P the softmax over C.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025, Definitions 2 and 3.
[2] Tzachristas et al., arXiv 2512.07647: a bound on the error of top-k attention that needs only the separation.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

PER_QUERY = (
    "dispersion",
    "separation",
    "kept",
    "largest_probability",
    "entropy",
    "max_logit",
    "max_abs_logit",
    "tail_mass",
    "tail_mass_bound",
    "jacobian_1_norm",
    "jacobian_inf_1_norm",
)
PER_KEY = ("sink_ratio", "queries_per_key", "attention_received")
METRICS = (*PER_QUERY, *PER_KEY)

SUBSET_KEYS = 8


def dispersion(logits: Float[Tensor, "*rows key"], kept: Bool[Tensor, "*rows key"]) -> Float[Tensor, "*rows"]:
    r"""Spread of each query's logits over the keys it keeps, :math:`\max_{j \in K} z_j - \min_{j \in K} z_j` [1].

    Args:
        logits: scores in nats, after bias and soft-cap.
        kept: the keys that each query keeps.

    Returns:
        float64, in nats; 0 for a single kept key, NaN where no key is kept or a kept logit is NaN.

    Raises:
        ValueError: if the two shapes differ.
    """
    if logits.shape != kept.shape:
        raise ValueError(_shapes(logits, kept))
    high = logits.masked_fill(~kept, -torch.inf).amax(-1)
    low = logits.masked_fill(~kept, torch.inf).amin(-1)
    spread = torch.where(kept.sum(-1) == 1, 0 * high.double(), high.double() - low.double())
    return torch.where(kept.any(-1), spread, torch.nan)


def separation(
    logits: Float[Tensor, "*rows key"], kept: Bool[Tensor, "*rows key"], allowed: Bool[Tensor, "*rows key"]
) -> Float[Tensor, "*rows"]:
    r"""Gap between kept logits and those left out, :math:`\min_{j \in K} z_j - \max_{j \in C \setminus K} z_j` [1].

    Taken in float64 from the logits as they are, so its resolution is that of the logits.

    Args:
        logits: scores in nats, after bias and soft-cap.
        kept: the keys that each query keeps.
        allowed: the keys that it may attend to.

    Returns:
        float64, in nats; NaN where nothing is left out, nothing is kept, or a logit of either set is NaN.

    Raises:
        ValueError: if the shapes differ.
    """
    if not logits.shape == kept.shape == allowed.shape:
        raise ValueError(_shapes(logits, kept, allowed))
    left = allowed & ~kept
    low = logits.masked_fill(~kept, torch.inf).amin(-1).double()
    rest = logits.masked_fill(~left, -torch.inf).amax(-1).double()
    return torch.where(kept.any(-1) & left.any(-1), low - rest, torch.nan)


def sink_ratio(kept: Bool[Tensor, "*rows query key"], k: int | None = None) -> Float[Tensor, "*rows key"]:
    """How many queries keep each key, over the number of keys that a query keeps [1].

    Args:
        kept: the keys that each query keeps; a query that keeps none does not count.
        k: that number, where the rule fixes it (the largest number kept, where that is smaller); where omitted, the
            mean number kept.

    Returns:
        One value a key; NaN where no query keeps any.
    """
    counts = kept.sum(-2).double()
    if k is not None:
        return counts / kept.sum(-1).amax(-1, keepdim=True).clamp(max=k)
    rows = kept.any(-1).sum(-1).double()
    return counts * (rows / counts.sum(-1)).unsqueeze(-1)


def tail_mass_bound(
    separation: Float[Tensor, "*rows"], kept: Float[Tensor, "*rows"], allowed: Float[Tensor, "*rows"]
) -> Float[Tensor, "*rows"]:
    r"""The certificate of [2], :math:`1 / (1 + \tfrac{k}{n - k} e^{\Delta})`: no more mass is left out by top-k.

    The output error is at most twice the largest norm of a value times that.

    Args:
        separation: in nats.
        kept: k, the number of keys kept.
        allowed: n, the number of keys allowed.

    Returns:
        Between 0 and 1; 0 where nothing is left out.
    """
    left = allowed - kept
    return torch.where((left == 0) & (kept > 0), 0.0, torch.sigmoid((left / kept).log() - separation))


def largest_subset_variance(probabilities: Float[Tensor, "*rows key"]) -> Float[Tensor, "*rows"]:
    r"""The largest :math:`p(S) (1 - p(S))` over sets of keys, a quarter of the softmax Jacobian's norm from inf to 1.

    Exact for at most nine keys and wherever one probability is at least a half. Elsewhere the sets tried are those of
    the eight largest probabilities, which is a lower bound; no set exceeds 1/4.

    Args:
        probabilities: one row a query; the mass missing from 1 counts as one more outcome.

    Returns:
        Between 0 and 1/4.
    """
    largest = probabilities.topk(min(SUBSET_KEYS, probabilities.shape[-1]), dim=-1).values
    return subset_variance(largest)


def subset_variance(largest: Float[Tensor, "*rows few"]) -> Float[Tensor, "*rows"]:
    """The largest p(S) (1 - p(S)) over the sets of a few keys; see `largest_subset_variance`.

    Args:
        largest: probabilities, at most `SUBSET_KEYS` a row.

    Returns:
        Between 0 and 1/4.
    """
    few = largest.shape[-1]
    subsets = (
        torch.arange(2**few, device=largest.device)[None, :] >> torch.arange(few, device=largest.device)[:, None] & 1
    )
    mass = largest @ subsets.to(largest.dtype)  # (*rows, 2 ** few)
    return (mass * (1 - mass)).amax(-1)


def _shapes(logits: Tensor, *others: Tensor) -> str:
    shapes = " and ".join(str(tuple(other.shape)) for other in others)
    return f"Expected the kept and allowed keys to have the shape of `logits`, {tuple(logits.shape)}, but got {shapes}."


def per_query(
    logits: Float[Tensor, "batch head query key"],
    kept: Bool[Tensor, "batch head query key"],
    allowed: Bool[Tensor, "batch head query key"],
    sinks: Float[Tensor, " head"] | None = None,
) -> dict[str, Tensor]:
    """All statistics that have one value a query, for any set of kept keys.

    Args:
        logits: scores in nats, after bias and soft-cap.
        kept: the keys that each query keeps.
        allowed: the keys that it may attend to.
        sinks: logits that take part in the softmax and belong to no key.

    Returns:
        A tensor (batch, head, query) for each name in `PER_QUERY`; NaN where it is undefined, all NaN where no key is
        kept. Beside them `weights`, (batch, head, query, key), for what is summed over queries.
    """
    some = kept.any(-1)
    count, total = kept.sum(-1).double(), allowed.sum(-1).double()
    gap = separation(logits, kept, allowed)
    high = logits.masked_fill(~kept, -torch.inf).amax(-1)
    weights, entropy = _softmax(logits, kept, sinks)
    top = weights.amax(-1)
    tail = _softmax(logits, allowed, sinks)[0].masked_fill(kept, 0.0).sum(-1)
    values = {
        "dispersion": dispersion(logits, kept),
        "separation": gap,
        "kept": count,
        "largest_probability": top,
        "entropy": entropy,
        "max_logit": high,
        "max_abs_logit": logits.abs().masked_fill(~kept, 0.0).amax(-1),
        "tail_mass": tail,
        "tail_mass_bound": tail_mass_bound(gap, count, total),
        "jacobian_1_norm": 2 * top * (1 - top),
        "jacobian_inf_1_norm": 4 * largest_subset_variance(weights),
    }
    values = {name: torch.where(some, value, torch.nan) for name, value in values.items()}
    values["weights"] = weights
    return values


def _softmax(logits: Tensor, kept: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    # Weights and entropy. Logits are taken relative to the largest, which keeps their differences exact where they
    # are large.
    masked = logits.masked_fill(~kept, -torch.inf)
    high = masked.amax(-1, keepdim=True)
    if sinks is not None:
        high = torch.maximum(high, sinks.to(logits.dtype)[None, :, None, None])
    below = (logits - high).masked_fill(~kept, 0.0)
    powers = below.exp().masked_fill(~kept, 0.0)  # (batch, head, query, key)
    total = powers.sum(-1)
    distance = -(powers * below).masked_fill(powers == 0, 0.0).sum(-1)
    if sinks is not None:
        behind = sinks.to(logits.dtype)[None, :, None] - high[..., 0]
        total = total + behind.exp()
        distance = distance - behind.exp() * behind
    return powers / total[..., None], (total.log() + distance / total).clamp_min(0.0)
