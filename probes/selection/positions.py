"""Selections by position alone (Theorem 4 of [1]), and what a position is.

The position of a key is the number of real keys before it: padding doesn't count, so that a padded sequence keeps the
same keys as the bare one, whichever side the padding is on. Real keys are the call's real queries in self-attention
where the call knows them, otherwise the keys that some query may attend to. The query's position is that of the key at
its own index; where the keys outnumber the queries of a self-attention call (cached decoding), the queries are the last
ones. In cross-attention query i stands at key i, or at the last.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025.
[2] Beltagy, Peters and Cohan, Longformer, 2020 (dilated windows, global tokens).
[3] Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024.
[4] Jiang et al., MInference 1.0, NeurIPS 2024 (A-shape).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from probes.selection.base import Kind, Selection, positive
from probes.selection.registry import selection

if TYPE_CHECKING:
    from probes.attention import AttentionCall

_ROWS = 512  # queries whose allowed keys are looked at together; bounds the memory of `real_keys`
_DERIVED: weakref.WeakKeyDictionary[AttentionCall, dict[Hashable, Tensor]] = weakref.WeakKeyDictionary()


def once(call: AttentionCall, name: Hashable, make: Callable[[], Tensor]) -> Tensor:
    """Compute something of a call the first time it is asked for, and keep it as long as the call lives.

    Args:
        call: the attention call.
        name: what it is.
        make: computes it.

    Returns:
        What `make` returned.
    """
    derived = _DERIVED.setdefault(call, {})
    if name not in derived:
        derived[name] = make()
    return derived[name]


def compact(tensor: Tensor) -> Tensor:
    """Drop the copies that `expand` made of batch elements and heads.

    Args:
        tensor: (batch, head, ...).

    Returns:
        A view with size 1 in each of the first two dimensions along which all elements are one.
    """
    for dimension in (0, 1):
        if tensor.stride(dimension) == 0:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def real_keys(
    allowed: Bool[Tensor, "batch head query key"], call: AttentionCall | None
) -> Bool[Tensor, "#batch 1 1 key"]:
    """The keys that are not padding.

    Args:
        allowed: the allowed keys of a block of queries.
        call: the call that the block belongs to, where there is one; without it the block is taken for the whole.

    Returns:
        True where the key is real.
    """
    if call is None:
        return compact(allowed).any((1, 2), keepdim=True)
    batch, _, queries, keys = call.shape
    if call.kind == "self" and call.queries is not None and queries == keys:
        return call.queries.expand(batch, keys)[:, None, None]
    if call.mask is None and call.mask_function is None:
        return torch.ones(1, 1, 1, keys, dtype=torch.bool, device=allowed.device)

    def look() -> Tensor:
        blocks = (compact(call.allowed(slice(first, first + _ROWS))) for first in range(0, queries, _ROWS))
        return torch.stack([block.any((1, 2), keepdim=True) for block in blocks]).any(0)

    return once(call, "real keys", look)


def query_index(rows: Tensor, keys: int, call: AttentionCall | None) -> Int[Tensor, " query"]:
    """The key index at which each query stands.

    Args:
        rows: positions of the queries among all queries of the call.
        keys: number of keys.
        call: the attention call, which knows how many queries there are in all.

    Returns:
        Indices from 0 to keys - 1.
    """
    cached = keys - call.shape[2] if call is not None and call.kind == "self" else 0
    return (rows + max(cached, 0)).clamp(max=keys - 1)


@dataclass(frozen=True)
class Positions:
    """Positions of a block's queries and of all keys among the real keys.

    Args:
        query: (#batch, 1, query, 1).
        key: (#batch, 1, 1, key).
        real: (#batch, 1, 1, key), True where the key is real.
        count: (#batch, 1, 1, 1), the number of real keys.
    """

    query: Int[Tensor, "#batch 1 query 1"]
    key: Int[Tensor, "#batch 1 1 key"]
    real: Bool[Tensor, "#batch 1 1 key"]
    count: Int[Tensor, "#batch 1 1 1"]

    @classmethod
    def of(cls, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Positions:
        """Count the real keys before each key and query.

        Args:
            allowed: (batch, head, query, key), the allowed keys of a block of queries.
            rows: positions of the queries among all queries of the call.
            call: the attention call, where there is one.

        Returns:
            The positions.
        """
        real = real_keys(allowed, call)
        until = real.cumsum(-1)
        before = until - real.long()  # real keys before each key
        index = query_index(rows, allowed.shape[-1], call)
        return cls(before[..., index].mT, before, real, until[..., -1:])


@selection("banded")
@dataclass(frozen=True)
class Banded(Selection):
    """Keep k allowed keys around the query: (k - 1) // 2 before it and the rest after, shifted inward at the borders.

    The borders are those of the query's own allowed keys, so that exactly k stay wherever k are allowed: beside padding
    too, and under a causal mask the last k up to the query. Keys in between that are not allowed are passed over.

    Args:
        k: how many keys to keep.

    Raises:
        ValueError: if `k` is not a positive whole number.
    """

    kind: ClassVar[Kind] = "regular"
    summary: ClassVar[str] = "banded:K: K keys around the query, shifted inward at the borders"

    k: int

    @property
    def per_query(self) -> int | None:
        """`k`."""
        return self.k

    def __post_init__(self) -> None:
        positive(self.k, "k")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        allowed = compact(allowed)
        rank = allowed.cumsum(-1) - allowed.long()  # allowed keys before each key, (#batch, #head, query, key)
        count = rank[..., -1:] + allowed[..., -1:].long()
        index = query_index(rows, allowed.shape[-1], call)[:, None].expand(*allowed.shape[:-1], 1)
        low = (rank.gather(-1, index) - (self.k - 1) // 2).minimum(count - self.k).clamp(min=0)
        return (rank >= low) & (rank < low + self.k) & allowed


@selection("block")
@dataclass(frozen=True)
class Block(Selection):
    """Keep the keys of the query's own block, blocks of `size` from the first real key on.

    Args:
        size: keys in a block.

    Raises:
        ValueError: if `size` is not a positive whole number.
    """

    kind: ClassVar[Kind] = "regular"
    summary: ClassVar[str] = "block:SIZE: the query's own block of SIZE keys"

    size: int

    @property
    def per_query(self) -> int | None:
        """`size`."""
        return self.size

    def __post_init__(self) -> None:
        positive(self.size, "size")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        at = Positions.of(allowed, rows, call)
        return (at.query // self.size) == (at.key // self.size)


@selection("strided")
@dataclass(frozen=True)
class Strided(Selection):
    """Keep the keys at multiples of `stride` from the query, at most window // 2 away on either side [2].

    Args:
        stride: distance between kept keys; 1 is a plain window.
        window: width of the window around the query.

    Raises:
        ValueError: if either is not a positive whole number.
    """

    kind: ClassVar[Kind] = "regular"
    summary: ClassVar[str] = (
        "strided:STRIDE:WINDOW: every STRIDE-th key from the query, up to WINDOW // 2 on either side"
    )

    stride: int
    window: int

    def __post_init__(self) -> None:
        positive(self.stride, "stride")
        positive(self.window, "window")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        at = Positions.of(allowed, rows, call)
        distance = (at.query - at.key).abs()
        return (distance <= self.window // 2) & (distance % self.stride == 0)


@selection("global")
@dataclass(frozen=True)
class Global(Selection):
    """Keep the last `count` real keys, and let the queries at these positions keep everything [2].

    Global tokens stand at the end of the sequence: all queries attend to them and they attend to all. Meant to be added
    to another selection, `banded:5+global:1`.

    Args:
        count: how many global tokens there are.

    Raises:
        ValueError: if `count` is not a positive whole number.
    """

    kind: ClassVar[Kind] = "regular"
    summary: ClassVar[str] = "global:COUNT: the last COUNT tokens attend to all and all attend to them"

    count: int

    def __post_init__(self) -> None:
        positive(self.count, "count")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        at = Positions.of(allowed, rows, call)
        first = at.count - self.count
        return (at.key >= first) | (at.query >= first)


@selection("sink")
@dataclass(frozen=True)
class Sink(Selection):
    """Keep the first `count` real keys of the sequence [3].

    Args:
        count: how many.

    Raises:
        ValueError: if `count` is not a positive whole number.
    """

    kind: ClassVar[Kind] = "regular"
    summary: ClassVar[str] = "sink:COUNT: the first COUNT keys"

    count: int

    def __post_init__(self) -> None:
        positive(self.count, "count")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        return Positions.of(allowed, rows, call).key < self.count


@selection("window")
@dataclass(frozen=True)
class Window(Selection):
    """Keep the last `width` real keys up to the query, its own included; none after it, in an encoder either.

    Args:
        width: how many.

    Raises:
        ValueError: if `width` is not a positive whole number.
    """

    kind: ClassVar[Kind] = "regular"
    summary: ClassVar[str] = "window:WIDTH: the last WIDTH keys up to the query"

    width: int

    def __post_init__(self) -> None:
        positive(self.width, "width")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        at = Positions.of(allowed, rows, call)
        return (at.key <= at.query) & (at.key > at.query - self.width)


@selection("streaming")
@dataclass(frozen=True)
class Streaming(Selection):
    """Keep the first `sink` real keys and the last `window` up to the query [3]; none after it, in an encoder either.

    Args:
        sink: keys kept at the beginning.
        window: keys kept up to the query, its own included.

    Raises:
        ValueError: if `sink` is negative or `window` not a positive whole number.
    """

    kind: ClassVar[Kind] = "regular"
    summary: ClassVar[str] = "streaming:SINK:WINDOW: the first SINK keys and the last WINDOW up to the query"

    sink: int
    window: int

    def __post_init__(self) -> None:
        positive(self.sink, "sink", least=0)
        positive(self.window, "window")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        at = Positions.of(allowed, rows, call)
        return (at.key < self.sink) | ((at.key <= at.query) & (at.key > at.query - self.window))


@selection("a-shape")
@dataclass(frozen=True)
class AShape(Streaming):
    """The A-shape pattern of MInference [4]: the first keys and a local window, the same keys as `Streaming`."""

    summary: ClassVar[str] = "a-shape:SINK:WINDOW: MInference's A-shape, the same keys as streaming"
