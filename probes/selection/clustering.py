"""Selections by grouping the keys of a call: clusters, and matched blocks. The grouping looks at all real keys.

[1] Roy, Saffar, Vaswani and Grangier, Efficient Content-Based Sparse Attention with Routing Transformers, TACL 2021.
[2] Tay et al., Sparse Sinkhorn Attention, ICML 2020.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from probes.selection.base import Kind, Selection, positive
from probes.selection.largest import uniform
from probes.selection.positions import Positions, compact, once
from probes.selection.registry import selection
from probes.selection.vectors import Blocks, heads, vectors

if TYPE_CHECKING:
    from probes.attention import AttentionCall

CLUSTER_STEPS = 10
SINKHORN_STEPS = 20
_ROWS = 512


@selection("cluster")
@dataclass(frozen=True)
class Cluster(Selection):
    """Keep the keys of the query's cluster, like the Routing Transformer [1].

    Like it only: in [1] the centroids are learned over training; here they come from 10 steps of k-means on the
    directions of the call's own real keys, begun at keys drawn by the seed. So under a causal mask later keys have a
    say in the grouping, though none is ever kept. Equal distances go to the first cluster.

    Args:
        clusters: how many clusters.
        seed: of the draw.

    Raises:
        ValueError: if `clusters` is not a positive or `seed` not a whole number.
    """

    kind: ClassVar[Kind] = "input-dependent"
    summary: ClassVar[str] = "cluster:CLUSTERS[:SEED]: keys of the query's cluster, like the Routing Transformer"

    clusters: int
    seed: int = 0

    def __post_init__(self) -> None:
        positive(self.clusters, "clusters")
        positive(self.seed, "seed", least=0)

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        call, query, key = vectors(call, self.name)
        real = Positions.of(allowed, rows, call).real
        unit = F.normalize(key, dim=-1)
        centroids = once(call, self, lambda: self._centroids(unit, real[:, 0, 0]))  # (batch, head, cluster, dim)
        of_key = once(call, (self, "keys"), lambda: (unit @ centroids.mT).argmax(-1))
        of_query = (query[:, :, rows] @ heads(centroids, query.shape[1]).mT).argmax(-1)
        return of_query[..., None] == heads(of_key, query.shape[1])[..., None, :]

    def _centroids(self, unit: Tensor, real: Tensor) -> Tensor:
        batch, count, length, dim = unit.shape
        here = torch.arange(length, device=unit.device)
        draw = uniform(self.seed, here[:1, None], here).masked_fill(~real, -1.0).expand(batch, length)
        first = draw.topk(min(self.clusters, length), dim=-1).indices  # (batch, cluster)
        # With fewer real keys than clusters, the clusters left over repeat the first, which goes first among equals.
        left_over = first.new_tensor(range(first.shape[1])) >= real.sum(-1, keepdim=True)
        first = torch.where(left_over, first[:, :1], first)
        centroids = unit.gather(2, first[:, None, :, None].expand(-1, count, -1, dim))
        for _ in range(CLUSTER_STEPS):
            members = F.one_hot((unit @ centroids.mT).argmax(-1), centroids.shape[2]).to(unit.dtype)
            members *= real[:, None, :, None]  # (batch, head, key, cluster)
            means = F.normalize(members.mT @ unit, dim=-1)
            centroids = torch.where(members.sum(2)[..., None] > 0, means, centroids)
            centroids = torch.where(left_over[:, None, :, None], centroids[:, :, :1], centroids)
        return centroids


@selection("sinkhorn-like")
@dataclass(frozen=True)
class Sinkhorn(Selection):
    """Keep the block of keys that the query's block is matched with, like Sparse Sinkhorn Attention [2].

    Like it only: in [2] the matching is learned; here it comes from the scaled inner products of mean queries and mean
    keys, made doubly stochastic by 20 Sinkhorn steps in the log domain, each block then taking its best match (the
    lowest of equals). Blocks that may not attend to each other at all are never matched, but within what is allowed the
    matching looks at the whole sequence. [2] adds the own block: `sinkhorn-like:16+block:16`.

    Args:
        block: keys in a block.

    Raises:
        ValueError: if `block` is not a positive whole number.
    """

    kind: ClassVar[Kind] = "input-dependent"
    summary: ClassVar[str] = (
        "sinkhorn-like:BLOCK: the block matched with the query's own, after Sparse Sinkhorn Attention"
    )

    block: int

    def __post_init__(self) -> None:
        positive(self.block, "block")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        call, query, key = vectors(call, self.name)
        match = once(call, self, lambda: self._match(call, query, key))  # (batch, head, block)
        blocks = Blocks(allowed, rows, call, self.block)
        own = blocks.own[..., 0].expand(query.shape[0], query.shape[1], -1)
        return match.gather(-1, own)[..., None] == blocks.of_key

    def _match(self, call: AttentionCall, query: Tensor, key: Tensor) -> Tensor:
        batch, count, queries, dim = query.shape
        number = -(-key.shape[2] // self.block)
        # Sums over each block's real queries that attend at all; the last column counts them.
        sums = query.new_zeros(batch, count, number, dim + 1)
        meets = query.new_zeros(batch, count, number, number)
        for first in range(0, queries, _ROWS):
            rows = torch.arange(first, min(first + _ROWS, queries), device=query.device)
            allowed = call.allowed(rows)
            blocks = Blocks(allowed, rows, call, self.block)
            own = blocks.own.expand(batch, count, -1, 1)
            attending = compact(allowed).any(-1, keepdim=True)
            if call.queries is not None:
                attending = attending & call.queries[:, None, rows, None]
            counted = F.pad(query[:, :, rows], (0, 1), value=1.0) * attending
            sums.scatter_add_(2, own.expand(-1, -1, -1, dim + 1), counted)
            meeting = blocks.any(compact(allowed) & attending).to(meets.dtype).expand(batch, count, -1, -1)
            meets.scatter_add_(2, own.expand(-1, -1, -1, number), meeting)
        mean_query = sums[..., :dim] / sums[..., dim:].clamp(min=1)
        mean_key = heads(blocks.reduce(key, "mean"), count)
        plan = (call.scale * mean_query @ mean_key.mT).double().masked_fill(meets == 0, -torch.inf)
        for _ in range(SINKHORN_STEPS):
            for dimension in (-1, -2):
                total = plan.logsumexp(dimension, keepdim=True)
                plan = plan - total.masked_fill(total == -torch.inf, 0.0)
        return plan.argmax(-1)  # (batch, head, block of queries)
