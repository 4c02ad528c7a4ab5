"""Arithmetic with brackets of Neural Networks and the Chomsky Hierarchy, drawn for all samples at once.

[1] Delétang et al., Neural Networks and the Chomsky Hierarchy, ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from stability.tasks.base import Examples, Tokens, task
from stability.tasks.bits import FixedLength

MODULUS = 5
PLUS, MINUS, TIMES, OPEN, CLOSE = 5, 6, 7, 8, 9


def expressions(
    count: int, length: int, rng: np.random.Generator, *, times: bool = True
) -> tuple[Tokens, Int[ndarray, " sample"]]:
    """Draw expressions of one length and their values modulo 5.

    G(1) = digit, G(2) = -digit, G(3) = (digit), G(4) = (-digit); longer ones are (G(l) op G(length - 3 - l)) with l
    uniform. All open parts of all samples are expanded level by level, then evaluated from the deepest level up.

    Args:
        count: how many.
        length: tokens in each.
        rng: source of randomness.
        times: whether products occur.

    Returns:
        Tokens (0-4 digits, + 5, - 6, * 7, ( 8, ) 9) and values.
    """
    tokens = np.zeros((count, length), dtype=np.int64)
    sample, start, size = np.arange(count), np.zeros(count, dtype=np.int64), np.full(count, length)
    levels: list[tuple[ndarray, ndarray, ndarray]] = []  # leaf values, which are branches, their operators
    while len(sample):
        branch = size >= 5
        leaf = ~branch
        values = _leaves(tokens, sample[leaf], start[leaf], size[leaf], rng)
        row, first, span = sample[branch], start[branch], size[branch]
        left = rng.integers(1, span - 3)  # from 1 to span - 4
        operator = rng.integers(PLUS, TIMES + times, len(row))
        tokens[row, first], tokens[row, first + span - 1] = OPEN, CLOSE
        tokens[row, first + 1 + left] = operator
        levels.append((values, branch, operator))
        sample = np.concatenate([row, row])
        start = np.concatenate([first + 1, first + 2 + left])
        size = np.concatenate([left, span - 3 - left])
    below = np.zeros(0, dtype=np.int64)
    for values, branch, operator in reversed(levels):
        result = np.empty(len(branch), dtype=np.int64)
        a, b = below[: len(operator)], below[len(operator) :]
        result[branch] = np.select([operator == PLUS, operator == MINUS], [a + b, a - b], a * b) % MODULUS
        result[~branch] = values
        below = result
    return tokens, below


def _leaves(tokens: Tokens, row: ndarray, start: ndarray, size: ndarray, rng: np.random.Generator) -> ndarray:
    digit = rng.integers(0, MODULUS, len(row))
    bracketed, negative = size >= 3, size % 2 == 0
    tokens[row[bracketed], start[bracketed]] = OPEN
    tokens[row[bracketed], (start + size - 1)[bracketed]] = CLOSE
    tokens[row[negative], (start + bracketed)[negative]] = MINUS
    tokens[row, start + bracketed + negative] = digit
    return np.where(negative, -digit, digit) % MODULUS


@task("modular-arithmetic")
@dataclass(frozen=True)
class ModularArithmetic(FixedLength):
    """Expressions with brackets; the label is the value mod 5 [1]. Label 0 is about 30 %.

    Tokens are digits 0 to 4, + 5, - 6, * 7, ( 8 and ) 9.
    """

    tokens: ClassVar[int] = 10
    classes: ClassVar[int] = 5
    defaults: ClassVar[Mapping[str, Any]] = {"epochs": 600}

    def sample(self, count: int, rng: np.random.Generator) -> Examples:
        """Draw expressions.

        Args:
            count: how many.
            rng: source of randomness.

        Returns:
            The examples.
        """
        return Examples(*expressions(count, self.length, rng))


@task("solve-equation")
@dataclass(frozen=True)
class SolveEquation(FixedLength):
    """An equation in which one digit is replaced by x; the label is that digit [1].

    Tokens are digits 0 to 4, + 5, - 6, ( 7, ) 8, x 9 and = 10. Below length 3 there are only zeros.
    """

    tokens: ClassVar[int] = 11
    classes: ClassVar[int] = 5
    defaults: ClassVar[Mapping[str, Any]] = {"epochs": 600}

    def sample(self, count: int, rng: np.random.Generator) -> Examples:
        """Draw equations.

        Args:
            count: how many.
            rng: source of randomness.

        Returns:
            The examples.
        """
        if self.length < 3:
            return Examples(np.zeros((count, self.length), dtype=np.int64), np.zeros(count, dtype=np.int64))
        size = self.length - 2
        tokens, values = expressions(count, size, rng, times=False)
        tokens = np.where(tokens > TIMES, tokens - 1, tokens)  # there is no * here
        first = rng.integers(0, size, (count, 1))
        # The digit that a cyclic scan to the right of the start meets first.
        shifted = np.take_along_axis(tokens, (first + np.arange(size)) % size, 1)
        place = (first + (shifted < MODULUS).argmax(1)[:, None]) % size
        labels = np.take_along_axis(tokens, place, 1)[:, 0]
        np.put_along_axis(tokens, place, 9, 1)
        end = np.stack([np.full(count, 10), values], axis=1)
        return Examples(np.concatenate([tokens, end], axis=1), labels)
