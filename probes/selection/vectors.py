"""Queries and keys of a whole attention call, for rules that look beyond the logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from probes.selection.positions import Positions, once

if TYPE_CHECKING:
    from probes.attention import AttentionCall


def vectors(
    call: AttentionCall | None, rule: str
) -> tuple[AttentionCall, Float[Tensor, "batch head query dim"], Float[Tensor, "batch key_head key dim"]]:
    """The queries and keys of a call, in float32 at least.

    Args:
        call: the attention call.
        rule: name of the selection that needs them, for the message.

    Returns:
        The call, its queries and its keys; the number of key heads divides that of the query heads.

    Raises:
        ValueError: if there is no call, or it has scores only.
    """
    if call is None or call.query is None or call.key is None:
        name = "the model" if call is None else call.module_name or "the model"
        what = "there is no attention call" if call is None else f"{name} gives its scores only"
        raise ValueError(
            f"Expected the queries and keys of the attention call for the selection {rule}, but {what}; "
            "choose a selection that needs logits or positions alone, such as topk or banded."
        )
    query, key = (t if t.dtype == torch.float64 else t.float() for t in (call.query, call.key))
    return call, query, key


def heads(tensor: Float[Tensor, "batch key_head *rest"], count: int) -> Float[Tensor, "batch head *rest"]:
    """Repeat what belongs to key heads for the query heads that share them.

    Args:
        tensor: one slice a key head.
        count: number of query heads.

    Returns:
        One slice a query head.
    """
    return tensor if tensor.shape[1] == count else tensor.repeat_interleave(count // tensor.shape[1], dim=1)


class Blocks:
    """Blocks of `size` consecutive real keys, seen from a block of queries.

    Args:
        allowed: (batch, head, query, key), the allowed keys.
        rows: positions of the queries among all queries of the call.
        call: the attention call.
        size: keys in a block.
    """

    def __init__(
        self, allowed: Bool[Tensor, "batch head query key"], rows: Tensor, call: AttentionCall | None, size: int
    ) -> None:
        self.size = size
        self.positions = at = Positions.of(allowed, rows, call)
        self.number = -(-allowed.shape[-1] // size)
        self.own: Int[Tensor, "#batch 1 query 1"] = at.query // size
        self.of_key: Int[Tensor, "#batch 1 1 key"] = at.key // size
        self._call = call

    def any(self, keys: Bool[Tensor, "#batch #head query key"]) -> Bool[Tensor, "#batch #head query block"]:
        """Which blocks hold a key of a set.

        Args:
            keys: the set of each query.

        Returns:
            True where some key of the block is in the set.
        """
        index = self.of_key.expand(max(len(keys), len(self.of_key)), *keys.shape[1:])
        counts = torch.zeros(*index.shape[:-1], self.number, dtype=torch.float32, device=keys.device)
        return counts.scatter_add_(-1, index, keys.expand(index.shape).float()) > 0

    def keys(self, blocks: Bool[Tensor, "batch head query block"]) -> Bool[Tensor, "batch head query key"]:
        """The keys of some blocks.

        Args:
            blocks: the blocks of each query.

        Returns:
            True at every key of these blocks.
        """
        return blocks.gather(-1, self.of_key.expand(*blocks.shape[:-1], self.of_key.shape[-1]))

    def is_own(self) -> Bool[Tensor, "#batch 1 query block"]:
        """The query's own block.

        Returns:
            True at one block a query.
        """
        return torch.arange(self.number, device=self.own.device) == self.own

    def reduce(
        self, vectors: Float[Tensor, "batch key_head key dim"], how: str
    ) -> Float[Tensor, "batch key_head block dim"]:
        """Mean, largest or smallest of the real keys of each block, coordinate by coordinate.

        Args:
            vectors: one a key.
            how: `mean`, `amax` or `amin`.

        Returns:
            One vector a block; zeros for a block without real keys.
        """

        def make() -> Tensor:
            index = self.of_key.mT.expand(vectors.shape)
            real = self.positions.real.mT.expand(vectors.shape)
            empty = {"mean": 0.0, "amax": -torch.inf, "amin": torch.inf}[how]
            out = vectors.new_full((*vectors.shape[:2], self.number, vectors.shape[-1]), empty)
            filled = vectors.masked_fill(~real, empty)
            if how != "mean":
                return out.scatter_reduce_(2, index, filled, how).nan_to_num(posinf=0.0, neginf=0.0)
            count = torch.zeros_like(out).scatter_add_(2, index, real.to(out.dtype))
            return out.scatter_add_(2, index, filled) / count.clamp(min=1)

        return make() if self._call is None else once(self._call, (how, self.size), make)
