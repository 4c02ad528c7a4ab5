"""Selections by the logits alone: heavy-hitters (Theorem 5 of [1]) and their controls.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025.
[2] Correia, Niculae and Martins, Adaptively Sparse Transformers, EMNLP 2019.
[3] Peters, Niculae and Martins, Sparse Sequence-to-Sequence Models, ACL 2019.
[4] Holtzman et al., The Curious Case of Neural Text Degeneration, ICLR 2020 (top-p).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from probes.selection.base import Kind, Selection, positive
from probes.selection.positions import compact
from probes.selection.ranking import largest, leading, masked, top
from probes.selection.registry import selection

if TYPE_CHECKING:
    from probes.attention import AttentionCall


@selection("full")
@dataclass(frozen=True)
class Full(Selection):
    """Keep every allowed key (Theorem 3 of [1])."""

    kind: ClassVar[Kind] = "full"
    summary: ClassVar[str] = "full: every allowed key"

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        return allowed


@selection("observed")
@dataclass(frozen=True)
class Observed(Selection):
    """Keep what the model itself kept: the call's own selection where the layer has one, else every allowed key."""

    kind: ClassVar[Kind] = "observed"
    summary: ClassVar[str] = "observed: the keys that the model itself kept"

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        own = None if call is None else call.selection
        return allowed if own is None else own.keep(logits, allowed, start=rows, call=call)


@selection("topk")
@dataclass(frozen=True)
class TopK(Selection):
    """Keep the k allowed keys with the largest logits (Theorem 5 of [1]); all of them where fewer are allowed.

    Args:
        k: how many keys to keep.
        ties: `exact` keeps exactly k, the lowest index first among equals; `threshold` keeps all that equal the k-th.

    Raises:
        ValueError: if `k` is not a positive whole number or `ties` is not one of the two.
    """

    kind: ClassVar[Kind] = "heavy-hitter"
    summary: ClassVar[str] = (
        "topk:K[:threshold]: the K largest logits; ties keep the lowest index, or with :threshold all equals"
    )

    k: int
    ties: Literal["exact", "threshold"] = "exact"

    @property
    def per_query(self) -> int | None:
        """`k`; None with ties kept."""
        return self.k if self.ties == "exact" else None

    def __post_init__(self) -> None:
        positive(self.k, "k")
        if self.ties not in ("exact", "threshold"):
            raise ValueError(f"Expected `ties` to be 'exact' or 'threshold', but got {self.ties!r}.")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        if self.ties == "exact" or self.k >= logits.shape[-1]:
            return largest(logits, allowed, self.k)
        ranked = masked(logits, allowed)
        return (ranked >= top(ranked, self.k)[..., -1:]) & allowed


@selection("hardmax")
@dataclass(frozen=True)
class Hardmax(Selection):
    """Keep the one largest logit, the lowest index among equals."""

    kind: ClassVar[Kind] = "heavy-hitter"
    summary: ClassVar[str] = "hardmax: the largest logit alone; ties keep the lowest index"

    @property
    def per_query(self) -> int | None:
        """One."""
        return 1

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        return largest(logits, allowed, 1)


@selection("top-p")
@dataclass(frozen=True)
class TopP(Selection):
    """Keep the smallest set of largest logits whose softmax mass over the allowed keys reaches p [4].

    Equal logits are taken at the lowest index first. With p = 1 every allowed key is kept. The mass is summed in
    float64 from the largest down.

    Args:
        p: the mass to reach, in (0, 1].

    Raises:
        ValueError: if `p` is not in (0, 1].
    """

    kind: ClassVar[Kind] = "heavy-hitter"
    summary: ClassVar[str] = "top-p:P: the fewest largest logits whose softmax mass reaches P"

    p: float

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ValueError(f"Expected `p` of a top-p selection to be above 0 and at most 1, but got {self.p!r}.")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        return allowed if self.p == 1 else leading(logits, allowed, self._count)

    def _count(self, values: Float[Tensor, "... candidate"], ranked: Float[Tensor, "... key"]) -> Int[Tensor, "... 1"]:
        high = values[..., :1]
        total = (ranked - high).exp_().sum(-1, keepdim=True, dtype=torch.float64)
        mass = (values - high).double().exp_().cumsum(-1) / total  # (..., candidate)
        return (mass < self.p).sum(-1, keepdim=True) + 1


@selection("threshold")
@dataclass(frozen=True)
class Threshold(Selection):
    """Keep every logit within `tau` of the largest, s >= max - tau.

    Args:
        tau: distance from the largest logit, in nats.

    Raises:
        ValueError: if `tau` is negative or not a number.
    """

    kind: ClassVar[Kind] = "heavy-hitter"
    summary: ClassVar[str] = "threshold:TAU: every logit that is at least the largest minus TAU (nats)"

    tau: float

    def __post_init__(self) -> None:
        if not self.tau >= 0:
            raise ValueError(f"Expected `tau` of a threshold selection to be at least 0, but got {self.tau!r}.")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        ranked = masked(logits, allowed)
        lowest = ranked.amax(-1, keepdim=True) - self.tau
        # An infinite maximum minus an infinite tau has no value; then every key is within reach.
        return (ranked >= lowest.nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)) & allowed


def entmax_support(
    logits: Float[Tensor, "... key"], allowed: Bool[Tensor, "... key"], alpha: float
) -> Bool[Tensor, "... key"]:
    r"""The keys with positive probability under alpha-entmax [2, 3].

    The probabilities are :math:`[(\alpha - 1) z_j - \tau]_+^{1/(\alpha - 1)}`, with :math:`\tau` making them sum to
    one. That sum falls with :math:`\tau`, so key j is in the support exactly where :math:`\sum_i [(\alpha - 1)(z_i -
    z_j)]_+^{1/(\alpha - 1)} < 1`: no :math:`\tau` has to be found. Float64.

    Args:
        logits: scores in nats.
        allowed: the keys that take part.
        alpha: above 1; 2 is sparsemax.

    Returns:
        The support.
    """
    power = 1 / (alpha - 1)

    def count(values: Tensor, ranked: Tensor) -> Tensor:
        # A score at or below -1 is never in the support; bounding it keeps infinities out of the differences.
        scaled = ((values - values[..., :1]).double() * (alpha - 1)).nan_to_num_(nan=-2.0, neginf=-2.0).clamp_(min=-2.0)
        low = torch.ones_like(scaled[..., :1], dtype=torch.long)  # the first `low` keys are in the support
        high = torch.full_like(low, scaled.shape[-1])
        for _ in range(math.ceil(math.log2(scaled.shape[-1])) if scaled.shape[-1] > 1 else 0):
            middle = (low + high + 1) // 2
            mass = (scaled - scaled.gather(-1, middle - 1)).clamp_(min=0).pow_(power).sum(-1, keepdim=True)
            low, high = torch.where(mass < 1, middle, low), torch.where(mass < 1, high, middle - 1)
            high = torch.maximum(high, low)
        return low

    return leading(logits, allowed, count)


@selection("entmax")
@dataclass(frozen=True)
class Entmax(Selection):
    """Keep the support of alpha-entmax over the allowed keys [2]: few keys where the logits are far apart.

    Args:
        alpha: above 1; towards 1 every key is kept (softmax), 2 is sparsemax.

    Raises:
        ValueError: if `alpha` is not above 1.
    """

    kind: ClassVar[Kind] = "heavy-hitter"
    summary: ClassVar[str] = "entmax:ALPHA: the keys to which alpha-entmax gives probability"

    alpha: float

    def __post_init__(self) -> None:
        if not 1 < self.alpha < math.inf:
            raise ValueError(f"Expected `alpha` of an entmax selection to be above 1, but got {self.alpha!r}.")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        return entmax_support(logits, allowed, self.alpha)


@selection("sparsemax")
@dataclass(frozen=True)
class Sparsemax(Selection):
    """Keep the support of sparsemax, the 2-entmax, over the allowed keys."""

    kind: ClassVar[Kind] = "heavy-hitter"
    summary: ClassVar[str] = "sparsemax: the keys to which sparsemax (2-entmax) gives probability"

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        return entmax_support(logits, allowed, 2.0)


@selection("bottom-k")
@dataclass(frozen=True)
class BottomK(Selection):
    """Keep the k allowed keys with the smallest logits, the lowest index first among equals: a control.

    Args:
        k: how many keys to keep.

    Raises:
        ValueError: if `k` is not a positive whole number.
    """

    kind: ClassVar[Kind] = "control"
    summary: ClassVar[str] = "bottom-k:K: the K smallest logits; ties keep the lowest index"

    k: int

    @property
    def per_query(self) -> int | None:
        """`k`."""
        return self.k

    def __post_init__(self) -> None:
        positive(self.k, "k")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        return largest(-logits, allowed, self.k)


@selection("random-k")
@dataclass(frozen=True)
class RandomK(Selection):
    """Keep k allowed keys at random: a control.

    The draw is a function of the seed and of the positions of query and key, so that it is the same in any split into
    blocks, heads and batches, and a probe draws what the model drew. Heads and batch elements share it. For a new draw
    at each training step, change the seed: `dataclasses.replace(selection, seed=step)`.

    Args:
        k: how many keys to draw.
        seed: of the draw.
        draw: `distinct` draws without replacement, exactly k keys; `replacement` with it, at most k (as the code of [1]
            does: 26 % of its rows keep fewer than k = 5).

    Raises:
        ValueError: if `k` is not a positive whole number, `seed` not a whole number or `draw` not one of the two.
    """

    kind: ClassVar[Kind] = "control"
    summary: ClassVar[str] = "random-k:K[:SEED[:replacement]]: K random keys; with :replacement at most K"

    k: int
    seed: int = 0
    draw: Literal["distinct", "replacement"] = "distinct"

    @property
    def per_query(self) -> int | None:
        """`k`; None with replacement."""
        return self.k if self.draw == "distinct" else None

    def __post_init__(self) -> None:
        positive(self.k, "k")
        positive(self.seed, "seed", least=0)
        if self.draw not in ("distinct", "replacement"):
            raise ValueError(f"Expected `draw` to be 'distinct' or 'replacement', but got {self.draw!r}.")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        allowed = compact(allowed)
        if self.draw == "distinct":
            columns = torch.arange(allowed.shape[-1], device=allowed.device)
            return largest(uniform(self.seed, rows[:, None], columns).expand(allowed.shape), allowed, self.k)
        draws = torch.arange(self.k, device=allowed.device)
        ranks = allowed.cumsum(-1)  # (batch, head, query, key), 1 for the first allowed key
        count = ranks[..., -1:]
        drawn = (
            (uniform(self.seed, rows[:, None], draws).double() * count).floor_().long()
        )  # (batch, head, query, draw)
        hit = torch.zeros_like(allowed, dtype=torch.bool).scatter_(-1, drawn.clamp(max=allowed.shape[-1] - 1), True)
        return hit.gather(-1, (ranks - 1).clamp(min=0)) & allowed


def uniform(seed: int, row: Int[Tensor, "query 1"], column: Int[Tensor, " key"]) -> Float[Tensor, "query key"]:
    """Hash a seed and two indices to a number in [0, 1), 24 bits of it (the mixing steps of SplitMix64).

    Args:
        seed: any whole number.
        row: the first index.
        column: the second.

    Returns:
        float32 numbers, the same on every device.
    """

    def mix(x: Tensor) -> Tensor:
        for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
            x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
        return x ^ ((x >> 31) & ((1 << 33) - 1))

    mixed = mix(mix(row + (seed + 1) * 0x1E3779B97F4A7C15 % (1 << 62)) + column)
    return ((mixed >> 39) & ((1 << 24) - 1)).float() / (1 << 24)
