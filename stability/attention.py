"""Self-attention under a selection, as the paper's encoder has it."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from probes.attend import attend
from probes.selection import Selection
from stability.dropout import Dropout


class SelfAttention(nn.Module):
    r"""Multi-head self-attention over the keys that a selection keeps.

    .. math:: W_o \sum_{j \in K_i} \mathrm{softmax}_{K_i}(\tau\, q_i \cdot k_j / \sqrt{d})\, v_j

    The selection draws no random numbers at initialisation, so that models that differ in it alone start out equal.

    Args:
        width: size of a token's vector.
        heads: number of heads.
        head_width: size of a head's queries, keys and values.
        selection: which keys a query keeps.
        inverse_temperature: factor on the logits beside 1 / sqrt(head_width).
        scalable: multiply the logits of a query by log n, n being the number of its allowed keys (scalable softmax,
            Nakanishi 2025, with its scale fixed to one).
        dropout: probability of dropping an attention weight in training.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        head_width: int,
        selection: Selection,
        *,
        inverse_temperature: float = 1.0,
        scalable: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.heads, self.head_width, self.selection = heads, head_width, selection
        self.scale = inverse_temperature / math.sqrt(head_width)
        self.scalable = scalable
        self.query = nn.Linear(width, heads * head_width)
        self.key = nn.Linear(width, heads * head_width)
        self.value = nn.Linear(width, heads * head_width)
        self.out = nn.Linear(heads * head_width, width)
        self.dropout = Dropout(dropout)

    def forward(
        self,
        x: Float[Tensor, "batch token width"],
        allowed: Bool[Tensor, "#batch #head #token token"] | None = None,
    ) -> Float[Tensor, "batch token width"]:
        """Let every token attend to the tokens it keeps.

        Args:
            x: one vector a token.
            allowed: the keys that each query may attend to; all where omitted.

        Returns:
            One vector a token.
        """
        q, k, v = (self._split(layer(x)) for layer in (self.query, self.key, self.value))  # (batch, head, token, dim)
        if self.scalable:
            q = q * self._log_count(q, allowed)
        dropout = self.dropout if self.dropout.active else 0.0
        mixed = attend(q, k, v, self.selection, allowed=allowed, scale=self.scale, dropout=dropout)
        return self.out(mixed.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _split(self, x: Tensor) -> Float[Tensor, "batch head token dim"]:
        return x.view(*x.shape[:2], self.heads, self.head_width).transpose(1, 2)

    @staticmethod
    def _log_count(q: Tensor, allowed: Tensor | None) -> Float[Tensor, "#batch #head #token 1"]:
        if allowed is None:
            return q.new_tensor(q.shape[-2]).log()
        return allowed.sum(-1, keepdim=True).clamp(min=1).to(q.dtype).log()


def causal_mask(length: int, device: torch.device) -> Bool[Tensor, "1 1 token token"]:
    """Allow each query the keys up to itself.

    Args:
        length: number of tokens.
        device: where the mask is to live.

    Returns:
        A lower triangle of True.
    """
    return torch.ones(1, 1, length, length, dtype=torch.bool, device=device).tril()
