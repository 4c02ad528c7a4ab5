"""Selections by codes of queries and keys: hash buckets and a space-filling curve. Random directions come from a seed.

[1] Kitaev, Kaiser and Levskaya, Reformer: The Efficient Transformer, ICLR 2020.
[2] Zeng et al., ZETA: Leveraging Z-order Curves for Efficient Top-k Attention, ICLR 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from probes.selection.base import Kind, Selection, positive
from probes.selection.positions import once
from probes.selection.ranking import largest
from probes.selection.registry import selection
from probes.selection.vectors import heads, vectors

if TYPE_CHECKING:
    from probes.attention import AttentionCall

CURVE_DIMENSIONS = 3
CURVE_BITS = 8


def random_directions(shape: tuple[int, ...], seed: int, like: Tensor) -> Tensor:
    """Independent standard normal numbers, the same on every device.

    Args:
        shape: how many.
        seed: of the generator.
        like: gives dtype and device.

    Returns:
        The numbers.
    """
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(like.device, like.dtype)


@selection("lsh")
@dataclass(frozen=True)
class LSH(Selection):
    """Keep the keys that share the query's bucket in any of several hashes, the angular hashing of Reformer [1].

    The bucket of x is argmax [x R; -x R] with R random. How many keys that is varies. Unlike in [1], queries and keys
    are different vectors here, the model's own, and buckets are not cut into chunks.

    Args:
        buckets: buckets of each hash, an even number.
        hashes: independent hashes.
        seed: of the random directions.

    Raises:
        ValueError: if `buckets` is not a positive even number, `hashes` not a positive or `seed` not a whole number.
    """

    kind: ClassVar[Kind] = "input-dependent"
    summary: ClassVar[str] = "lsh:BUCKETS:HASHES[:SEED]: keys in the query's bucket, Reformer's angular hashing"

    buckets: int
    hashes: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        positive(self.buckets, "buckets", least=2)
        if self.buckets % 2:
            raise ValueError(f"Expected `buckets` to be even, but got {self.buckets}.")
        positive(self.hashes, "hashes")
        positive(self.seed, "seed", least=0)

    @property
    def name(self) -> str:
        """The short name; the seed is left out where it is 0."""
        return f"lsh:{self.buckets}:{self.hashes}" + (f":{self.seed}" if self.seed else "")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        call, query, key = vectors(call, self.name)
        shape = (self.hashes, key.shape[-1], self.buckets // 2)
        directions = random_directions(shape, self.seed, key)

        def bucket(x: Tensor) -> Tensor:
            projected = torch.einsum("bhld,rdn->rbhln", x, directions)
            return torch.cat([projected, -projected], dim=-1).argmax(-1)  # (hash, batch, head, length)

        keys = once(call, self, lambda: bucket(key))
        kept = torch.zeros_like(allowed)
        for of_query, of_key in zip(bucket(query[:, :, rows]), keys, strict=True):
            kept |= of_query[..., None] == heads(of_key, query.shape[1])[..., None, :]
        return kept


@selection("zeta")
@dataclass(frozen=True)
class Zeta(Selection):
    """Keep the k allowed keys nearest to the query along a z-order curve, after ZETA [2]: an approximate top-k.

    Queries and keys are scaled to length one and projected on the same 3 random orthogonal directions; each coordinate
    is cut into 256 levels of [-1, 1], and the bits of the three are interleaved to one number. In [2] the projection is
    learned and search goes chunk by chunk; here it is exact. Ties keep the lowest index.

    Args:
        k: how many keys to keep.
        seed: of the directions.

    Raises:
        ValueError: if `k` is not a positive or `seed` not a whole number.
    """

    kind: ClassVar[Kind] = "input-dependent"
    summary: ClassVar[str] = "zeta:K[:SEED]: the K keys nearest along a z-order curve, an approximate top-k"

    k: int
    seed: int = 0

    def __post_init__(self) -> None:
        positive(self.k, "k")
        positive(self.seed, "seed", least=0)

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        call, query, key = vectors(call, self.name)
        keys = heads(once(call, self, lambda: morton(key, self.seed)), query.shape[1])
        distance = (morton(query[:, :, rows], self.seed)[..., None] - keys[..., None, :]).abs_()
        return largest(distance.neg_(), allowed, self.k)


def morton(x: Float[Tensor, "*length dim"], seed: int) -> Float[Tensor, " *length"]:
    """The place of each vector's direction on a z-order curve in three dimensions.

    Args:
        x: the vectors.
        seed: of the directions on which they are projected.

    Returns:
        Whole numbers below 2 ** 24, exact in float32.
    """
    dimensions = min(CURVE_DIMENSIONS, x.shape[-1])
    directions = torch.linalg.qr(random_directions((x.shape[-1], dimensions), seed, x.double())).Q
    projected = torch.nn.functional.normalize(x.double(), dim=-1) @ directions  # in [-1, 1]
    levels: Int[Tensor, "*length dimensions"] = ((projected + 1) / 2 * 2**CURVE_BITS).nan_to_num(0.0).long()
    levels = levels.clamp(0, 2**CURVE_BITS - 1)
    code = torch.zeros_like(levels[..., 0])
    for bit in range(CURVE_BITS):
        for dimension in range(dimensions):
            code |= ((levels[..., dimension] >> bit) & 1) << (bit * dimensions + dimension)
    return code.float()
