"""The exact distribution of the lengths of ListOps trees, and trees of a given length.

With a node's length distribution known at every depth, a tree of length n is drawn top down: first the operator and how
many children it has, then the children's lengths one by one, each weighted by how likely the rest is to fill what is
left. This is the distribution of plain rejection sampling, without rejection.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np
from jaxtyping import Float
from numpy import ndarray

from stability.errors import UserError

DIGIT = 0.75
"""A node above the largest depth is a digit with this probability."""
CLOSE, ZERO = 4, 5


class Lengths:
    """Length distributions of nodes and of rows of children; the root has depth 1.

    Args:
        max_depth: nodes of this depth are digits.
        max_args: most children of an operator; at least 2.
        longest: longest length of interest.
    """

    def __init__(self, max_depth: int, max_args: int, longest: int) -> None:
        self.max_args = max_args
        digit = np.zeros(longest + 1)
        digit[1:2] = 1.0
        self.nodes = {max_depth: digit}  # by depth, probability of each length
        self.rows: dict[int, list[Float[ndarray, " length"]]] = {}  # by the children's depth and number
        for depth in range(max_depth - 1, 0, -1):
            child = self.nodes[depth + 1]
            empty = np.zeros(longest + 1)
            empty[0] = 1.0
            rows = [empty]
            for _ in range(max_args):
                rows.append(np.convolve(rows[-1], child)[: longest + 1])
            self.rows[depth + 1] = rows
            operator = np.zeros(longest + 1)
            operator[2:] = np.mean(rows[2:], axis=0)[: longest - 1] if longest > 1 else 0.0
            self.nodes[depth] = DIGIT * digit + (1 - DIGIT) * operator
        self._numbers: dict[tuple[int, int], list[float]] = {}
        self._firsts: dict[tuple[int, int, int], list[float]] = {}

    def root(self, count: int, shortest: int, rng: np.random.Generator) -> list[int]:
        """Draw lengths of whole trees.

        Args:
            count: how many.
            shortest: the least length to draw.
            rng: source of randomness.

        Returns:
            Lengths from `shortest` to the longest of interest.

        Raises:
            UserError: if no tree has such a length.
        """
        weights = self.nodes[1][shortest:]
        if not weights.sum() > 0:
            raise UserError(
                f"Expected lengths that ListOps trees can have, but no tree of this depth has {shortest} to "
                f"{len(self.nodes[1]) - 1} tokens; change the lengths or the depth."
            )
        drawn: list[int] = rng.choice(
            np.arange(shortest, shortest + len(weights)), count, p=weights / weights.sum()
        ).tolist()
        return drawn

    def tree(self, length: int, uniform: Iterator[float], tokens: list[int], depth: int = 1) -> int:
        """Draw a tree of a given length.

        Args:
            length: number of tokens, one that a node at this depth can have.
            uniform: numbers drawn from [0, 1).
            tokens: the tree's tokens are appended here.
            depth: of its root.

        Returns:
            Its value.
        """
        if length == 1:
            digit = int(10 * next(uniform))
            tokens.append(ZERO + digit)
            return digit
        operator = int(4 * next(uniform))
        tokens.append(operator)
        rest = length - 2
        number = 2 + _pick(self._number(depth + 1, rest), next(uniform))
        values = []
        for left in range(number, 0, -1):
            size = rest if left == 1 else _pick(self._first(depth + 1, left, rest), next(uniform))
            values.append(self.tree(size, uniform, tokens, depth + 1))
            rest -= size
        tokens.append(CLOSE)
        return evaluate(operator, values)

    def _number(self, depth: int, rest: int) -> list[float]:
        # Cumulative weights of 2, 3, ... children that fill `rest` tokens together.
        key = depth, rest
        if key not in self._numbers:
            self._numbers[key] = np.cumsum([row[rest] for row in self.rows[depth][2:]]).tolist()
        return self._numbers[key]

    def _first(self, depth: int, left: int, rest: int) -> list[float]:
        # Cumulative weights of the first of `left` children having 0, 1, ... tokens when all fill `rest`.
        key = depth, left, rest
        if key not in self._firsts:
            weights = self.nodes[depth][: rest + 1] * self.rows[depth][left - 1][rest::-1]
            self._firsts[key] = np.cumsum(weights).tolist()
        return self._firsts[key]


def _pick(cumulative: list[float], u: float) -> int:
    # The first index whose cumulative weight is above u; flat stretches, of weight zero, are never chosen.
    return bisect_right(cumulative, u * cumulative[-1])


def evaluate(operator: int, values: list[int]) -> int:
    """Apply an operator.

    Args:
        operator: 0 MIN, 1 MAX, 2 MED (median, rounded down), 3 SM (sum mod 10).
        values: of its children.

    Returns:
        A digit.
    """
    if operator == 0:
        return min(values)
    if operator == 1:
        return max(values)
    if operator == 3:
        return sum(values) % 10
    ordered, middle = sorted(values), len(values) // 2
    return ordered[middle] if len(values) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def uniforms(rng: np.random.Generator) -> Iterator[float]:
    """Numbers in [0, 1) one at a time, drawn in blocks.

    Args:
        rng: source of randomness.

    Yields:
        Numbers.
    """
    while True:
        yield from rng.random(1 << 16).tolist()
