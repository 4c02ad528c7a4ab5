"""Regular and counter tasks of Neural Networks and the Chomsky Hierarchy.

[1] Delétang et al., Neural Networks and the Chomsky Hierarchy, ICLR 2023.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from stability.tasks.base import Examples, Task, Tokens, task


@dataclass(frozen=True)
class FixedLength(Task):
    """A task whose sequences all have one length.

    Attributes:
        length: number of tokens.
    """

    length: int = 40

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("length", 1)


@task("parity")
@dataclass(frozen=True)
class Parity(FixedLength):
    """Fair bits; the label is their sum mod 2 [1]."""

    tokens: ClassVar[int] = 2
    classes: ClassVar[int] = 2
    defaults: ClassVar[Mapping[str, Any]] = {"epochs": 1000}

    def sample(self, count: int, rng: np.random.Generator) -> Examples:
        """Draw bit strings.

        Args:
            count: how many.
            rng: source of randomness.

        Returns:
            The examples.
        """
        bits = fair_bits(count, self.length, rng)
        return Examples(bits, bits.sum(1) % 2)


@task("even-pairs")
@dataclass(frozen=True)
class EvenPairs(FixedLength):
    """Fair bits; the label is the number of unequal neighbours mod 2: 1 where the first and the last bit differ [1]."""

    tokens: ClassVar[int] = 2
    classes: ClassVar[int] = 2
    defaults: ClassVar[Mapping[str, Any]] = {"epochs": 100}

    def sample(self, count: int, rng: np.random.Generator) -> Examples:
        """Draw bit strings.

        Args:
            count: how many.
            rng: source of randomness.

        Returns:
            The examples.
        """
        bits = fair_bits(count, self.length, rng)
        return Examples(bits, bits[:, 0] ^ bits[:, -1])


@task("cycle-navigation")
@dataclass(frozen=True)
class CycleNavigation(FixedLength):
    """Tokens 0, 1, 2 are steps -1, 0, +1 on a cycle of five places; the label is the last place, from 0 on [1]."""

    tokens: ClassVar[int] = 3
    classes: ClassVar[int] = 5
    defaults: ClassVar[Mapping[str, Any]] = {"epochs": 750}

    def sample(self, count: int, rng: np.random.Generator) -> Examples:
        """Draw walks.

        Args:
            count: how many.
            rng: source of randomness.

        Returns:
            The examples.
        """
        steps = rng.integers(0, 3, (count, self.length))
        return Examples(steps, (steps - 1).sum(1) % 5)


@task("missing-duplicates")
@dataclass(frozen=True)
class MissingDuplicates(FixedLength):
    """A bit string written twice with one hole (token 2); the label is the hidden bit [1].

    An odd length ends in one token 3. At length 1 there is only the token 1 with label 1.
    """

    tokens: ClassVar[int] = 4
    classes: ClassVar[int] = 2
    defaults: ClassVar[Mapping[str, Any]] = {"epochs": 250}

    def sample(self, count: int, rng: np.random.Generator) -> Examples:
        """Draw doubled strings with a hole.

        Args:
            count: how many.
            rng: source of randomness.

        Returns:
            The examples.
        """
        if self.length == 1:
            return Examples(np.ones((count, 1), dtype=np.int64), np.ones(count, dtype=np.int64))
        half = fair_bits(count, self.length // 2, rng)
        tokens = np.concatenate([half, half, np.full((count, self.length % 2), 3)], axis=1)
        hole = rng.integers(0, 2 * half.shape[1], (count, 1))
        labels = np.take_along_axis(tokens, hole, 1)[:, 0]
        np.put_along_axis(tokens, hole, 2, 1)
        return Examples(tokens, labels)


def fair_bits(count: int, length: int, rng: np.random.Generator) -> Tokens:
    """Draw independent fair bits.

    Args:
        count: number of rows.
        length: bits in a row.
        rng: source of randomness.

    Returns:
        Zeros and ones, int64.
    """
    return rng.integers(0, 2, (count, length))
