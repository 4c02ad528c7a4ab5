"""Measure a model written by hand, and look at its attention calls one by one.

python examples/measure_own_model.py
"""

from __future__ import annotations

import torch
from torch import nn

import probes


class Attention(nn.Module):
    """Causal attention as one would write it on a blackboard."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.maps = nn.Linear(width, 3 * width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attend."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.maps(x).chunk(3, dim=-1))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).flatten(2)


torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(100, 32), Attention(32, 4), Attention(32, 4))
tokens = torch.randint(100, (8, 20))

with probes.capture(model) as calls:
    model(tokens)
for call in calls:
    print(call.module_name, call.kind, call.shape, "largest logit", round(float(call.logits().max()), 3))

table = probes.measure(model, [tokens], selections=["full", "topk:3", "banded:3"])
whole = table[(table["scope"] == "model") & (table["metric"].isin(["dispersion", "separation", "tail_mass"]))]
print(whole[["selection", "kind", "metric", "count", "undefined", "p50", "p95"]].to_string(index=False))
