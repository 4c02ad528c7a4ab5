"""Dropout that draws only what it drops.

At the paper's rate of 1 % a mask of one random number per entry costs more than the layers around it. The gaps between
dropped entries of independent Bernoulli trials are independent and geometric, so drawing the gaps gives the same
distribution for a hundredth of the random numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn


def dropped_positions(count: int, rate: float, generator: torch.Generator | None = None) -> Int[Tensor, " dropped"]:
    """Draw which of `count` entries are dropped, each independently with probability `rate`.

    Args:
        count: number of entries.
        rate: probability of dropping an entry, in (0, 1).
        generator: source of randomness; torch's default one where omitted.

    Returns:
        Rising positions of the dropped entries.
    """
    mean = count * rate
    drawn = int(mean + 6 * mean**0.5) + 8  # six standard deviations: nearly always enough at once
    end, parts = -1, []
    while end < count:
        gaps = torch.empty(drawn, dtype=torch.float64).geometric_(rate, generator=generator)
        parts.append(gaps.cumsum(0).long() + end)  # the first gap of 1 is position 0
        end = int(parts[-1][-1])
    positions = torch.cat(parts) if len(parts) > 1 else parts[0]
    return positions[: int(torch.searchsorted(positions, count))]


class _Drop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, positions: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(positions)
        ctx.factor = factor
        return _drop(x, positions, factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (positions,) = ctx.saved_tensors
        return _drop(gradient, positions, ctx.factor), None, None


def _drop(x: Tensor, positions: Tensor, factor: float) -> Tensor:
    result = (x * factor).contiguous()
    result.view(-1).index_fill_(0, positions, 0.0)
    return result


class Dropout(nn.Module):
    """Set each entry to zero with probability `rate` and scale the others by 1 / (1 - rate), in training only.

    Args:
        rate: probability of dropping an entry, in [0, 1).

    Raises:
        ValueError: if `rate` is outside [0, 1).

    Attributes:
        generator: source of randomness; torch's default one where None.
    """

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"Expected a dropout rate of at least 0 and below 1, but got {rate!r}.")
        self.rate = rate
        self.generator: torch.Generator | None = None

    @property
    def active(self) -> bool:
        """Whether anything is dropped now."""
        return self.training and self.rate > 0

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Drop entries.

        Args:
            x: any tensor.

        Returns:
            A tensor of the same shape; `x` itself in evaluation.
        """
        if not self.active:
            return x
        positions = dropped_positions(x.numel(), self.rate, self.generator)
        return _Drop.apply(x, positions.to(x.device), 1 / (1 - self.rate))  # type: ignore[no-any-return,no-untyped-call]

    def extra_repr(self) -> str:
        """The rate, for the module's printed form.

        Returns:
            The rate.
        """
        return f"rate={self.rate:g}"
