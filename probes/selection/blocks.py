"""Selections of whole blocks of keys by a score of the block: input-dependent, and no heavy-hitters.

Blocks are of consecutive real keys (`positions`). A block is a candidate of a query where the query may attend to any
key of it, so that under a causal mask no future block is ever one; inside a chosen block, what is not allowed stays
out. The lowest block goes first among equal scores. Memory beside the logits: one score for each query and block.

[1] Lu et al., MoBA: Mixture of Block Attention for Long-Context LLMs, 2025.
[2] Tang et al., Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference, ICML 2024.
[3] Yuan et al., Native Sparse Attention, ACL 2025.
[4] Gao et al., SeerAttention: Learning Intrinsic Sparse Attention in Your LLMs, 2024.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from probes.selection.base import Kind, Selection, positive
from probes.selection.positions import compact
from probes.selection.ranking import largest
from probes.selection.registry import selection
from probes.selection.vectors import Blocks, heads, vectors

if TYPE_CHECKING:
    from probes.attention import AttentionCall


@selection("moba")
@dataclass(frozen=True)
class MoBA(Selection):
    """Keep the blocks with the largest inner product of the query and the block's mean key [1].

    The query's own block is always kept and counts as one of `top`, as in [1].

    Args:
        block: keys in a block.
        top: blocks kept, the own one among them.

    Raises:
        ValueError: if either is not a positive whole number.
    """

    kind: ClassVar[Kind] = "input-dependent"
    summary: ClassVar[str] = "moba:BLOCK:TOP: the own block of BLOCK keys and the best by mean key, TOP in all"

    block: int
    top: int

    def __post_init__(self) -> None:
        positive(self.block, "block")
        positive(self.top, "top")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        call, query, key = vectors(call, self.name)
        blocks = Blocks(allowed, rows, call, self.block)
        means = heads(blocks.reduce(key, "mean"), query.shape[1])
        scores = (query[:, :, rows] @ means.mT).masked_fill(blocks.is_own(), torch.inf)  # (batch, head, query, block)
        candidates = blocks.any(compact(allowed)).expand(scores.shape)
        return blocks.keys(largest(scores, candidates, self.top))


@selection("quest")
@dataclass(frozen=True)
class Quest(Selection):
    r"""Keep the pages with the largest bound on their logits [2].

    The bound of a page is :math:`\sum_d \max(q_d \min_j k_{jd}, q_d \max_j k_{jd})` over the keys j of the page.
    The minimum and maximum of the query's own page are taken over the keys in it that the query may attend to, as a
    cache would hold them, so that under a causal mask no later key has a say.

    Args:
        page: keys in a page.
        top: pages kept.

    Raises:
        ValueError: if either is not a positive whole number.
    """

    kind: ClassVar[Kind] = "input-dependent"
    summary: ClassVar[str] = "quest:PAGE:TOP: the TOP pages of PAGE keys with the largest bound by minimum and maximum"

    page: int
    top: int

    def __post_init__(self) -> None:
        positive(self.page, "page")
        positive(self.top, "top")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        call, query, key = vectors(call, self.name)
        pages = Blocks(allowed, rows, call, self.page)
        high, low = (heads(pages.reduce(key, how), query.shape[1]) for how in ("amax", "amin"))
        chosen = query[:, :, rows]
        scores = chosen.clamp(min=0) @ high.mT + chosen.clamp(max=0) @ low.mT  # (batch, head, query, page)
        own = _own_page_score(chosen, key, compact(allowed), pages)
        scores = torch.where(pages.is_own(), own, scores)
        candidates = pages.any(compact(allowed)).expand(scores.shape)
        return pages.keys(largest(scores, candidates, self.top))


def _own_page_score(query: Tensor, key: Tensor, allowed: Tensor, pages: Blocks) -> Tensor:
    # (batch, head, query, 1): the bound of each query's own page over the keys in it that it may attend to.
    batch, count, queries, _ = query.shape
    inside = (pages.of_key == pages.own) & pages.positions.real & allowed  # (#batch, #head, query, key)
    # The first `page` columns of a stable sort are the keys of the page; the rest of them is masked again.
    size = min(pages.size, key.shape[2])
    index = inside.to(torch.uint8).topk(size, dim=-1).indices  # (#batch, #head, query, page)
    there = inside.gather(-1, index)
    best = torch.empty(batch, count, queries, 1, dtype=query.dtype, device=query.device)
    for head in range(count):  # one head at a time: a page of keys for every query
        shared = key[:, head * key.shape[1] // count]  # (batch, key, dim)
        at = index[:, min(head, index.shape[1] - 1)].expand(batch, -1, -1)
        members = shared[torch.arange(batch, device=key.device)[:, None, None], at]  # (batch, query, page, dim)
        mask = there[:, min(head, there.shape[1] - 1)].expand(batch, -1, -1)[..., None]
        products = (query[:, head, :, None] * members).masked_fill(~mask, -torch.inf)
        best[:, head] = products.amax(-2).sum(-1, keepdim=True)
    return best


@selection("nsa-like")
@dataclass(frozen=True)
class NSALike(Selection):
    """Keep the own block and the blocks with the most attention on their mean key, like Native Sparse Attention [3].

    Like it only: the learned compression of blocks is not reproduced, mean-pooled keys stand for it, and each query
    head chooses for itself, also where heads share keys. Attention is the softmax over the mean keys of the candidates;
    it ranks as its logits do, which are compared. The window of [3] is added by name, `nsa-like:32:4+window:64`.

    Args:
        block: keys in a block.
        top: blocks kept beside the own one.

    Raises:
        ValueError: if either is not a positive whole number.
    """

    kind: ClassVar[Kind] = "input-dependent"
    summary: ClassVar[str] = "nsa-like:BLOCK:TOP: the own block and the TOP by attention on mean-pooled keys"

    block: int
    top: int

    def __post_init__(self) -> None:
        positive(self.block, "block")
        positive(self.top, "top")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        call, query, key = vectors(call, self.name)
        blocks = Blocks(allowed, rows, call, self.block)
        means = heads(blocks.reduce(key, "mean"), query.shape[1])
        scores = call.scale * query[:, :, rows] @ means.mT  # (batch, head, query, block)
        own = blocks.is_own()
        candidates = (blocks.any(compact(allowed)) & ~own).expand(scores.shape)
        return blocks.keys(largest(scores, candidates, self.top) | own)


@selection("gate")
@dataclass(frozen=True)
class LearnedGate(Selection):
    """Keep the blocks with the largest scores of a trained gate, such as SeerAttention's [4].

    The gate itself is yours: the short name `gate:BLOCK:TOP` alone has no scores.

    Args:
        block: keys in a block.
        top: blocks kept.
        scores: (batch, head, query or block of queries, block of keys), broadcastable in the first two; or a function
            that makes them of the attention call, for models with several layers.

    Raises:
        ValueError: if `block` or `top` is not a positive whole number, or `scores` is neither.
    """

    kind: ClassVar[Kind] = "input-dependent"
    summary: ClassVar[str] = "gate:BLOCK:TOP: the TOP blocks by the scores of your own trained gate (from Python)"

    block: int
    top: int
    scores: Tensor | Callable[[AttentionCall], Tensor] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        positive(self.block, "block")
        positive(self.top, "top")
        if not (self.scores is None or isinstance(self.scores, Tensor) or callable(self.scores)):
            raise ValueError(f"Expected `scores` to be a tensor or a function of the call, but got {self.scores!r}.")

    @property
    def name(self) -> str:
        """The short name, without the scores."""
        return f"gate:{self.block}:{self.top}"

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        if self.scores is None or (call is None and not isinstance(self.scores, Tensor)):
            raise ValueError(
                f"Expected the scores of a trained gate for the selection {self.name}, but there are none; "
                "build it in Python as LearnedGate(block, top, scores)."
            )
        gate = self.scores if isinstance(self.scores, Tensor) else self.scores(call)  # type: ignore[arg-type]
        blocks = Blocks(allowed, rows, call, self.block)
        total = int(rows.max()) + 1 if call is None else call.shape[2]
        if gate.ndim != 4 or gate.shape[-1] != blocks.number or gate.shape[-2] not in (total, -(-total // self.block)):
            raise ValueError(
                f"Expected gate scores of shape (batch, head, {-(-total // self.block)} or {total}, {blocks.number}), "
                f"but got {tuple(gate.shape)}."
            )
        index = rows if gate.shape[-2] == total else rows // self.block
        scores = gate[:, :, index].expand(*logits.shape[:3], -1)
        candidates = blocks.any(compact(allowed)).expand(scores.shape)
        return blocks.keys(largest(scores, candidates, self.top))
