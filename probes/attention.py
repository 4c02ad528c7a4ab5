"""One attention call: what a layer is about to do in one forward pass, and its logits in blocks of queries.

Logits are the scores that enter the softmax: scaled, soft-capped, with position bias, in float32 whatever the model's
dtype (a product of bfloat16 tensors in bfloat16 ties many of them). Allowed keys are a boolean of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from probes.selection import Selection

MASK_LIMIT = -9000.0
"""An additive mask at or below this forbids a key: sentinels run from -1e4 to -inf, and no position bias comes near."""

Rows = slice | range | int | Sequence[int] | Tensor | None


@dataclass(frozen=True, eq=False)
class AttentionCall:
    r"""What one attention layer computes: :math:`\mathrm{softmax}(s\, q k^\top + \mathrm{bias})` over the allowed keys.

    Args:
        module_name: path of the module in the model; `#1`, `#2`, ... are appended where one module attends several
            times.
        layer: index of the layer where the model has one.
        kind: whether queries and keys come from the same sequence.
        scores: (batch, head, query, key), the logits themselves, where the model computes them in the open; else None.
        query: (batch, head, query, dim), after rotary embedding.
        key: (batch, key head, key, dim); a divisor of the query heads.
        value: (batch, key head, key, dim) where it is known.
        scale: factor on the inner products.
        mask: boolean (True = allowed) or additive, broadcastable to (batch, head, query, key).
        bias: additive position bias, broadcastable to the same.
        mask_function: allowed keys from index tensors (batch, head, query, key), as flex attention has them.
        causal: query i may attend to keys 0 to i only.
        softcap: logits are c tanh(logits / c) before mask and bias.
        sinks: (head,), logits that take part in the softmax and belong to no key.
        selection: the rule by which the layer itself keeps keys; None if it keeps all.
        queries: (batch, query), the queries that are not padding; None if all are real.
        implementation: how it reached us: `fused` (torch's attention), `attend`, `softmax` (written out), or the name
            of a library's implementation.
    """

    module_name: str
    layer: int | None
    kind: Literal["self", "cross"]
    scores: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    value: Tensor | None = None
    scale: float = 1.0
    mask: Tensor | None = None
    bias: Tensor | None = None
    mask_function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    causal: bool = False
    softcap: float | None = None
    sinks: Tensor | None = None
    selection: Selection | None = None
    queries: Tensor | None = None
    implementation: str = ""
    offsets: tuple[int, int] = (0, 0)
    """Position of this call's first batch element and head in the call that it is a part of."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Batch size, heads, queries, keys."""
        if self.scores is not None:
            return tuple(self.scores.shape)  # type: ignore[return-value]
        assert self.query is not None
        assert self.key is not None
        batch, heads, queries, _ = self.query.shape
        return batch, heads, queries, self.key.shape[-2]

    @property
    def device(self) -> torch.device:
        """Where the call's tensors are."""
        tensor = self.query if self.scores is None else self.scores
        assert tensor is not None
        return tensor.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the model's scores."""
        tensor = self.query if self.scores is None else self.scores
        assert tensor is not None
        return tensor.dtype

    @property
    def unmasked(self) -> bool:
        """Whether every query may attend to every key."""
        return self.mask is None and self.mask_function is None and not self.causal

    def logits(self, rows: Rows = None) -> Float[Tensor, "batch head query key"]:
        """The scores that enter the softmax, in nats; values at keys that are not allowed mean nothing.

        Args:
            rows: which queries: a slice, a range, one position or several; all where omitted.

        Returns:
            float32, or float64 for a model in float64.
        """
        index = _index(rows)
        if self.scores is not None:
            return _upcast(self.scores[:, :, index])
        assert self.query is not None
        assert self.key is not None
        query, key = _upcast(self.query[:, :, index]), _upcast(self.key)
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key = key.repeat_interleave(groups, dim=1)
        logits = (query * self.scale) @ key.mT  # (batch, head, query, key)
        if self.softcap is not None:
            logits = self.softcap * (logits / self.softcap).tanh()
        if self.bias is not None:
            logits = logits + _upcast(_pick(self.bias, index, logits.shape))
        if self.mask is not None and self.mask.dtype != torch.bool:
            additive = _upcast(_pick(self.mask, index, logits.shape))
            logits = logits + additive.masked_fill(additive <= MASK_LIMIT, 0.0)
        return logits

    def allowed(self, rows: Rows = None) -> Bool[Tensor, "batch head query key"]:
        """The keys that each query may attend to.

        Args:
            rows: which queries: a slice, a range, one position or several; all where omitted.

        Returns:
            True where the key is allowed; expanded, not copied, where batch elements or heads agree.
        """
        index = _index(rows)
        batch, heads, queries, keys = self.shape
        positions = torch.arange(queries, device=self.device)[index]
        shape = (batch, heads, len(positions), keys)
        allowed = torch.ones((), dtype=torch.bool, device=self.device).expand(1, 1, *shape[2:])
        if self.mask is not None:
            mask = _pick(self.mask, index, shape)
            allowed = allowed & (mask if mask.dtype == torch.bool else mask > MASK_LIMIT)
        if self.causal:
            allowed = allowed & (torch.arange(keys, device=self.device) <= positions[:, None])
        if self.mask_function is not None:
            indices = (
                torch.arange(batch, device=self.device)[:, None, None, None] + self.offsets[0],
                torch.arange(heads, device=self.device)[None, :, None, None] + self.offsets[1],
                positions[None, None, :, None],
                torch.arange(keys, device=self.device)[None, None, None, :],
            )
            allowed = allowed & self.mask_function(*indices)
        return allowed.expand(shape)

    def kept(self, rows: slice | None = None) -> Bool[Tensor, "batch head query key"]:
        """The keys that the layer itself keeps: the allowed ones, or what its own selection makes of them.

        Args:
            rows: which queries, as a slice; all where omitted.

        Returns:
            True where the key is kept.
        """
        if self.selection is None:
            return self.allowed(rows)
        start = (rows.start or 0) if rows is not None else 0
        return self.selection.keep(self.logits(rows), self.allowed(rows), start=start, call=self)

    def weights(self) -> Float[Tensor, "batch head query key"]:
        """The attention weights, for small inputs only: this is the one method that holds the whole matrix.

        Returns:
            Probabilities of the keys; zeros where none is allowed. With sink logits a row sums to less than one.
        """
        logits = self.logits().masked_fill(~self.kept(), -torch.inf)
        if self.sinks is not None:
            sinks = _upcast(self.sinks)[None, :, None, None].expand(*logits.shape[:3], 1)
            logits = torch.cat([logits, sinks], dim=-1)
        weights = torch.where((logits == -torch.inf).all(-1, keepdim=True), 0.0, logits.softmax(-1))
        return weights if self.sinks is None else weights[..., :-1]

    def until(self, end: int) -> AttentionCall:
        """The same call without its last keys.

        Args:
            end: how many keys stay.

        Returns:
            A view.
        """

        def cut(tensor: Tensor | None, dimension: int = -1) -> Tensor | None:
            return tensor if tensor is None or tensor.shape[dimension] <= end else tensor.narrow(dimension, 0, end)

        return dataclasses.replace(
            self,
            scores=cut(self.scores),
            key=cut(self.key, -2),
            value=cut(self.value, -2),
            mask=cut(self.mask),
            bias=cut(self.bias),
        )

    def part(self, batch: slice, heads: slice) -> AttentionCall:
        """The same call for some of its batch elements and heads.

        Args:
            batch: which batch elements.
            heads: which heads; with grouped keys, whole groups or parts of one group.

        Returns:
            A view; nothing is copied.
        """
        size, count, _, _ = self.shape
        first, last, _ = heads.indices(count)

        def cut(tensor: Tensor | None, total: int) -> Tensor | None:
            if tensor is None:
                return None
            while tensor.ndim < 4:
                tensor = tensor[None]
            if tensor.shape[0] > 1:
                tensor = tensor[batch]
            groups = total // tensor.shape[1]
            return tensor if tensor.shape[1] == 1 else tensor[:, first // groups : -(-last // groups)]

        return dataclasses.replace(
            self,
            scores=cut(self.scores, count),
            query=cut(self.query, count),
            key=cut(self.key, count),
            value=cut(self.value, count),
            mask=cut(self.mask, count),
            bias=cut(self.bias, count),
            sinks=None if self.sinks is None else self.sinks[heads],
            queries=None if self.queries is None else self.queries[batch],
            offsets=(self.offsets[0] + batch.indices(size)[0], self.offsets[1] + first),
        )


def _index(rows: Rows) -> slice | Tensor:
    if rows is None:
        return slice(None)
    if isinstance(rows, int):
        return torch.tensor([rows])
    return rows if isinstance(rows, slice | Tensor) else torch.tensor(list(rows), dtype=torch.long)


def _upcast(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _pick(tensor: Tensor, index: slice | Tensor, shape: tuple[int, ...] | torch.Size) -> Tensor:
    # Rows of something broadcastable to (batch, head, query, key); masks may be longer than the keys.
    tensor = tensor[..., : shape[-1]] if tensor.shape[-1] > shape[-1] else tensor
    return tensor if tensor.ndim < 2 or tensor.shape[-2] == 1 else tensor[..., index, :]
