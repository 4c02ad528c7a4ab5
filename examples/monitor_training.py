"""Watch dispersion and separation while a model trains: a small classifier that learns to spot a repeated token.

python examples/monitor_training.py
"""

from __future__ import annotations

import torch
from torch import nn

import probes


class Classifier(nn.Module):
    """One encoder layer, averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 32)
        self.layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(32, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Two logits a sequence."""
        return self.out(self.layer(self.embedding(tokens)).mean(1))


torch.manual_seed(0)
model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
monitor = probes.Monitor(every=50, selections=["full", "topk:3"])

for step in range(201):
    tokens = torch.randint(16, (64, 8))
    labels = (tokens.sort(dim=1).values.diff(dim=1) == 0).sum(1).gt(1).long()
    with monitor.step(model, step):
        loss = nn.functional.cross_entropy(model(tokens), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()

for step, scalars in monitor.history.items():
    spread = scalars["attention/full/dispersion/p95"]
    gap = scalars["attention/topk:3/separation/p50"]
    print(f"step {step:3d}: dispersion p95 {spread:.3f} nats, separation p50 {gap:.4f} nats")
monitor.finish()
