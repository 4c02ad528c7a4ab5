"""Small models whose landscapes are known in closed form, and a small encoder."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Quadratic(nn.Module):
    """Loss = theta . A theta / 2 + b . theta + c, with no inputs."""

    def __init__(self, size: int = 6, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        root = torch.randn(size, size, generator=generator, dtype=torch.float64)
        self.register_buffer("matrix", (root @ root.T).to(dtype))
        self.register_buffer("linear", torch.randn(size, generator=generator, dtype=torch.float64).to(dtype))
        self.theta = nn.Parameter(torch.randn(size, generator=generator, dtype=torch.float64).to(dtype))

    def forward(self) -> Tensor:
        return self.theta @ self.matrix @ self.theta / 2 + self.linear @ self.theta + 3.0


def own_loss(model: nn.Module) -> Tensor:
    return model()


class Encoder(nn.Module):
    """A small attention encoder with dropout and a buffer: tokens -> class logits."""

    def __init__(self, width: int = 8, blocks: int = 2, length: int = 6, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(3, width)
            self.register_buffer("position", torch.randn(length, width, generator=torch.Generator().manual_seed(99)))
            self.blocks = nn.ModuleList(
                nn.ModuleDict(
                    {name: nn.Linear(width, width) for name in ("query", "key", "value", "out", "first", "second")}
                )
                for _ in range(blocks)
            )
            self.norm = nn.LayerNorm(width)
            self.drop = nn.Dropout(0.3)
            self.head = nn.Linear(width, 2)
        self.width = width

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embedding(tokens) + self.position[: tokens.shape[1]])
        for block in self.blocks:
            parts: Any = block
            h = self.norm(x)
            weights = (parts["query"](h) @ parts["key"](h).transpose(-1, -2) / self.width**0.5).softmax(-1)
            x = x + parts["out"](weights @ parts["value"](h))
            x = x + parts["second"](self.drop(F.relu(parts["first"](self.norm(x)))))
        return self.head(x.mean(1))


def pairs(samples: int = 20, length: int = 6, batch: int = 8, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    """Even pairs: the last batch is smaller than the others."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 2, (samples, length), generator=generator)
    labels = (tokens[:, 0] != tokens[:, -1]).long()
    return list(zip(tokens.split(batch), labels.split(batch), strict=True))


class Suicidal:
    """A loss whose first worker kills itself with SIGKILL, once, at its twelfth call."""

    def __init__(self, flag: Path) -> None:
        self.flag, self.home, self.calls = flag, os.getpid(), 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if os.getpid() != self.home and self.calls == 12:
            try:
                self.flag.touch(exist_ok=False)
            except FileExistsError:
                pass
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        return F.cross_entropy(output, target)
