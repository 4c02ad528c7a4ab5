"""One head of one attention layer at one input, as the theorems see it: tokens, matrices, kept sets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from stability.errors import UserError

if TYPE_CHECKING:
    from probes.attention import AttentionCall


@dataclass(frozen=True, eq=False)
class Layer:
    """One head of one attention layer at one input, in float64.

    Args:
        tokens: X, one row a token (with a constant last coordinate where queries, keys and values have biases).
        score: W, such that the logit of key j for query i is x_j^T W x_i.
        value: V, from tokens to outputs.
        kept: the keys that each query keeps; every query keeps one at least.
        kind: the kind of selection that chose them, as `probes.Selection.kind` has it, or "masked" for a fixed mask.
        module: name of the module.
        layer: index of the layer.
        head: index of the head.
        free: how many leading coordinates of a token can move; all where None.

    Raises:
        ValueError: if the shapes don't fit or a query keeps no key.
    """

    tokens: Float[Tensor, "token dim"]
    score: Float[Tensor, "dim dim"]
    value: Float[Tensor, "out dim"]
    kept: Bool[Tensor, "token token"]
    kind: str = "full"
    module: str = ""
    layer: int | None = None
    head: int | None = None
    free: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "score", "value"):
            object.__setattr__(self, name, getattr(self, name).detach().to(torch.float64))
        length, dim = self.tokens.shape
        shapes = tuple(self.score.shape), self.value.shape[-1], tuple(self.kept.shape)
        if shapes != ((dim, dim), dim, (length, length)):
            raise UserError(
                f"Expected `score`, `value` and `kept` to fit {length} tokens of {dim} numbers, but got "
                f"{tuple(self.score.shape)}, {tuple(self.value.shape)} and {tuple(self.kept.shape)}."
            )
        if not bool(self.kept.any(1).all()):
            raise UserError("Expected every query to keep a key, but one keeps none; leave padded tokens out.")

    @classmethod
    def from_call(cls, call: AttentionCall, *, batch: int = 0, head: int = 0) -> Layer:
        """Read one head of a captured attention call.

        Without the projections in front of it, a call is attention on tokens that hold query, key and value side by
        side: W is the scale times the map from a token's query to a token's key, and V picks out the value. The norms
        are then those of queries, keys and values, not of the residual stream.

        Args:
            call: a self-attention call with queries, keys and values, without position bias, soft-cap and sinks.
            batch: which batch element; it must have no padding.
            head: which head.

        Returns:
            The layer.

        Raises:
            UserError: if the call holds no queries, keys and values, isn't self-attention, or if its logits hold more.
        """
        if call.query is None or call.key is None or call.value is None:
            raise UserError(
                f"Expected an attention call with queries, keys and values, but {call.module_name} shows no such."
            )
        if call.kind != "self" or call.query.shape[-2] != call.key.shape[-2]:
            raise UserError(
                f"Expected self-attention over one sequence, but {call.module_name} has other keys than queries."
            )
        group = head // (call.query.shape[1] // call.key.shape[1])
        query, key, value = call.query[batch, head], call.key[batch, group], call.value[batch, group]
        dims = query.shape[-1], key.shape[-1], value.shape[-1]
        total = sum(dims)
        score = torch.zeros(total, total, dtype=torch.float64)
        score[dims[0] : dims[0] + dims[1], : dims[0]] = call.scale * torch.eye(dims[0], dtype=torch.float64)
        pick = torch.eye(total, dtype=torch.float64)[dims[0] + dims[1] :]
        kind: str = "full" if call.selection is None else call.selection.kind
        if call.selection is None and not bool(call.allowed()[batch, head].all()):
            kind = "masked"  # such as causal: the sets are fixed, but keys aren't kept equally often
        layer = cls(
            torch.cat([query, key, value], dim=-1).double().cpu(),
            score,
            pick,
            call.kept()[batch, head].cpu(),
            kind,
            call.module_name,
            call.layer,
            head,
        )
        exact = call.logits()[batch, head].double().cpu()
        if call.sinks is not None or not torch.allclose(layer.logits()[layer.kept], exact[layer.kept], 1e-3, 1e-3):
            raise UserError(
                f"Expected logits that are inner products of queries and keys, but {call.module_name} has a position "
                "bias, a soft-cap or sink logits; give tokens and matrices instead."
            )
        return layer

    def logits(self, tokens: Float[Tensor, "*batch token dim"] | None = None) -> Float[Tensor, "*batch token token"]:
        """Scores of each query (row) for each key.

        Args:
            tokens: other tokens than the layer's own.

        Returns:
            In nats.
        """
        x = self.tokens if tokens is None else tokens
        return x @ self.score.T @ x.mT

    def weights(self, tokens: Float[Tensor, "*batch token dim"] | None = None) -> Float[Tensor, "*batch token token"]:
        """Attention weights of each query (row) over each key, the kept sets held.

        Args:
            tokens: other tokens than the layer's own.

        Returns:
            Rows that sum to 1.
        """
        return self.logits(tokens).masked_fill(~self.kept, -torch.inf).softmax(-1)

    def output(self, tokens: Float[Tensor, "*batch token dim"]) -> Float[Tensor, "*batch token out"]:
        """The layer's output, the kept sets held.

        Args:
            tokens: the input.

        Returns:
            One vector a query.
        """
        return self.weights(tokens) @ tokens @ self.value.T

    def quantities(self) -> dict[str, Any]:
        """What the bounds depend on, by the names of `theory.symbols`.

        Returns:
            Norms, counts, and dispersion and separation, the last two worst over the queries; `dispersions` and `kept`
            have one value a query.
        """
        logits = self.logits()
        high = logits.masked_fill(~self.kept, -torch.inf).amax(1)
        low = logits.masked_fill(~self.kept, torch.inf).amin(1)
        gap = (low - logits.masked_fill(self.kept, -torch.inf).amax(1)).amin()
        kept = self.kept.sum(1).double().numpy()
        received = float(self.kept.sum(0).max())
        return {
            "dispersions": (high - low).numpy(),
            "kept": kept,
            "dispersion": float((high - low).max()),
            "separation": max(float(gap), 0.0),
            "keys": float(kept.mean()),
            "queries_per_key": received,
            "sink_ratio": received / float(kept.mean()),
            "length": float(len(self.tokens)),
            "token_norm": float(self.tokens.norm(dim=1).max()),
            "score_norm": float(torch.linalg.matrix_norm(self.score, 2)),
            "value_norm": float(torch.linalg.matrix_norm(self.value, 2)),
        }
