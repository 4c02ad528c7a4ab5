"""Vertical and slash lines, chosen for a whole head by its last queries.

[1] Jiang et al., MInference 1.0: Accelerating Pre-filling for Long-Context LLMs, NeurIPS 2024.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from probes.selection.base import Kind, Selection, positive
from probes.selection.positions import Positions, compact, once, query_index
from probes.selection.ranking import largest
from probes.selection.registry import selection

if TYPE_CHECKING:
    from probes.attention import AttentionCall

LAST_QUERIES = 64
FORCED = 30


@selection("vertical-slash")
@dataclass(frozen=True)
class VerticalSlash(Selection):
    """Keep the columns and the diagonals that get most attention from the last 64 queries [1].

    The first 30 columns and the 30 diagonals from the main one down are always among those chosen, and count: with
    fewer than 30 asked for, 30 are kept. Equal sums: the lowest column, and the diagonal nearest the main one. One
    choice serves all queries of a head, so that earlier queries depend on later keys, as in the prefilling that the
    rule is made for. Last queries are the last real ones of each sequence. Memory: the logits of 64 queries.

    Args:
        vertical: columns kept.
        slash: diagonals kept.

    Raises:
        ValueError: if either is not a positive whole number.
    """

    kind: ClassVar[Kind] = "input-dependent"
    summary: ClassVar[str] = (
        "vertical-slash:VERTICAL:SLASH: the columns and diagonals with most attention from the last 64 queries"
    )

    vertical: int
    slash: int

    def __post_init__(self) -> None:
        positive(self.vertical, "vertical")
        positive(self.slash, "slash")

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        keys = logits.shape[-1]
        if call is None:
            if int(rows[0]) != 0:
                raise ValueError(
                    f"Expected the attention call for a block of queries under {self.name}, but there is none; "
                    "give `call` or all queries at once."
                )
            lines = self._lines(logits, allowed, rows, Positions.of(allowed, rows, None), rows)
        else:
            lines = once(call, self, lambda: self._of_call(call))
        columns, diagonals = lines[..., :keys], lines[..., keys:]
        offset = query_index(rows, keys, call)[:, None] - torch.arange(keys, device=logits.device)
        return columns[:, :, None] | diagonals[:, :, offset + keys - 1]

    def _of_call(self, call: AttentionCall) -> Tensor:
        # (batch, head, columns and diagonals), sequence by sequence: each has its own last queries.
        batch, count, queries, keys = call.shape
        lines = []
        for element in range(batch):
            part = call.part(slice(element, element + 1), slice(0, count))
            real = torch.arange(queries, device=call.device)
            if part.queries is not None and bool(part.queries.any()):
                real = real[part.queries.expand(1, queries)[0]]
            last = real[-LAST_QUERIES:]
            allowed = part.allowed(last)
            index = query_index(last, keys, part)
            lines.append(self._lines(part.logits(last), allowed, last, Positions.of(allowed, last, part), index))
        return torch.cat(lines)

    def _lines(self, logits: Tensor, allowed: Tensor, rows: Tensor, at: Positions, index: Tensor) -> Tensor:
        keys = logits.shape[-1]
        if not bool(allowed.any()):
            return torch.zeros(*logits.shape[:2], 3 * keys - 1, dtype=torch.bool, device=logits.device)
        attended = compact(allowed).any(-1).any(0).any(0).nonzero().flatten()[-LAST_QUERIES:]
        logits, allowed, index = logits[:, :, attended], allowed[:, :, attended], index[attended]
        weights = logits.masked_fill(~allowed, -torch.inf).softmax(-1).nan_to_num(0.0)  # (batch, head, query, key)
        column = weights.sum(-2).masked_fill(at.key[:, :, 0] < FORCED, torch.inf)
        columns = largest(column, at.real[:, :, 0].expand(column.shape), max(self.vertical, FORCED))
        # Diagonals by query minus key: number `keys - 1` is the main one, and greater ones lie below it.
        offset = (index[:, None] - torch.arange(keys, device=logits.device) + keys - 1).flatten()
        sums = weights.new_zeros(*weights.shape[:2], 2 * keys - 1).index_add_(-1, offset, weights.flatten(-2))
        here = torch.zeros_like(sums).index_add_(-1, offset, allowed.flatten(-2).to(sums.dtype)) > 0
        sums[..., keys - 1 : keys - 1 + FORCED] = torch.inf
        here[..., keys - 1 : keys - 1 + FORCED] = True
        order = (torch.arange(2 * keys - 1, device=logits.device) - keys + 1).abs().argsort(stable=True)
        chosen = largest(sums[..., order], here[..., order], max(self.slash, FORCED))
        diagonals = torch.zeros_like(chosen).index_copy_(-1, order, chosen)
        return torch.cat([columns, diagonals], dim=-1)
