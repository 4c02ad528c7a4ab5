"""Stack manipulation of Neural Networks and the Chomsky Hierarchy.

[1] Delétang et al., Neural Networks and the Chomsky Hierarchy, ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from stability.tasks.base import Examples, task
from stability.tasks.bits import FixedLength, fair_bits

POP, PUSH_0 = 2, 3
EMPTY = 2
"""The label of an empty stack."""


@task("stack-manipulation")
@dataclass(frozen=True)
class StackManipulation(FixedLength):
    """A stack of bits from bottom to top, then actions; the label is the top of the final stack, 2 if it is empty [1].

    Tokens are 0 and 1 for bits, 2 for POP, 3 for PUSH 0, 4 for PUSH 1. The benchmark itself asks for the whole stack;
    the paper for its top. POP on an empty stack does nothing.
    """

    tokens: ClassVar[int] = 5
    classes: ClassVar[int] = 3
    defaults: ClassVar[Mapping[str, Any]] = {"epochs": 200}

    def sample(self, count: int, rng: np.random.Generator) -> Examples:
        """Draw stacks and actions.

        Args:
            count: how many.
            rng: source of randomness.

        Returns:
            The examples.
        """
        bits = fair_bits(count, self.length, rng)
        if self.length == 1:
            return Examples(bits, bits[:, 0].copy())
        sizes = rng.integers(1, self.length, count)
        actions = rng.integers(2, 5, (count, self.length))
        tokens = np.where(np.arange(self.length) < sizes[:, None], bits, actions)
        # All stacks take one token at a time; a bit acts like the PUSH of it.
        stack = np.empty((count, self.length), dtype=np.int64)
        height = np.zeros(count, dtype=np.int64)
        every = np.arange(count)
        for token in tokens.T:
            pop = token == POP
            stack[every, height] = np.where(
                token >= PUSH_0, token - PUSH_0, token
            )  # above the top, so harmless for POP
            height = np.where(pop, np.maximum(height - 1, 0), height + 1)
        top = stack[every, np.maximum(height - 1, 0)]
        return Examples(tokens, np.where(height > 0, top, EMPTY))
