"""Multi-query associative recall.

[1] Arora et al., Zoology: Measuring and Improving Recall in Efficient Language Models, ICLR 2024.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from stability.errors import UserError
from stability.tasks.base import IGNORED, Examples, Task, task


@task("mqar")
@dataclass(frozen=True)
class Recall(Task):
    """Key-value pairs come first; later each key is asked again, and the model answers with its values [1].

    Keys are drawn from 1 to V / 2 - 1 and values from V / 2 to V - 1, both without replacement. Each query follows at a
    gap drawn from a power law; other positions are random filler tokens without label. The label at the last token of
    a query is its (first) value; with several values, each of them but the last is shown, with the next as its label.

    Attributes:
        length: number of tokens.
        pairs: number of key-value pairs.
        vocabulary_size: V, even.
        power: exponent a of the gaps' distribution, with probability proportional to a (gap + 1)^(a - 1).
        keys_per_query: tokens that make up one key.
        values_per_key: tokens that make up one value.
    """

    tokens: ClassVar[int] = 0
    classes: ClassVar[int] = 0
    readout: ClassVar[Literal["mean", "tokens"]] = "tokens"
    causal: ClassVar[bool] = True
    defaults: ClassVar[Mapping[str, Any]] = {"epochs": 64, "blocks": 2, "optimizer": "adam", "learning_rate": 1e-3}

    length: int = 64
    pairs: int = 8
    vocabulary_size: int = 128
    power: float = 0.01
    keys_per_query: int = 1
    values_per_key: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("length", "pairs", "keys_per_query", "values_per_key"):
            self.at_least(name, 1)
        self.at_least("vocabulary_size", 4)
        if self.vocabulary_size % 2:
            raise UserError(f"Expected an even `vocabulary_size` for mqar, but got {self.vocabulary_size}.")
        if not self.power > 0:
            raise UserError(f"Expected `power` of mqar to be above 0, but got {self.power!r}.")
        half = self.vocabulary_size // 2
        if self.pairs * self.keys_per_query > half - 1 or self.pairs * self.values_per_key > half:
            raise UserError(
                f"Expected enough keys and values without repetition, but a vocabulary of {self.vocabulary_size} has "
                f"too few for {self.pairs} pairs; enlarge `vocabulary_size` or lower `pairs`."
            )
        if 2 * self.pairs * self.item > self.length:
            raise UserError(
                f"Expected `length` to hold {self.pairs} pairs and their queries ({2 * self.pairs * self.item} "
                f"tokens), but got {self.length}."
            )

    @property
    def item(self) -> int:
        """Tokens of a key with its value."""
        return self.keys_per_query + self.values_per_key

    @property
    def vocabulary(self) -> int:
        """Number of tokens, padding included."""
        return self.vocabulary_size + 1

    @property
    def outputs(self) -> int:
        """Number of classes that a model of this task tells apart."""
        return self.vocabulary_size

    def sample(self, count: int, rng: np.random.Generator) -> Examples:
        """Draw pairs, queries and filler.

        Args:
            count: how many.
            rng: source of randomness.

        Returns:
            The examples; labels of each token, `IGNORED` outside the queries.
        """
        half = self.vocabulary_size // 2
        keys = 1 + _distinct(count, half - 1, self.pairs * self.keys_per_query, rng)
        values = half + _distinct(count, half, self.pairs * self.values_per_key, rng)
        items = np.concatenate(
            [keys.reshape(count, self.pairs, -1), values.reshape(count, self.pairs, -1)], axis=2
        )  # (sample, pair, token)
        tokens = rng.integers(0, self.vocabulary_size, (count, self.length))
        labels = np.full((count, self.length), IGNORED)
        tokens[:, : self.pairs * self.item] = items.reshape(count, -1)
        start = self._starts(count, rng)  # (sample, pair)
        every = np.arange(count)[:, None]
        for offset in range(self.item):
            if offset < self.item - 1:  # the last value is asked for, never shown
                tokens[every, start + offset] = items[:, :, offset]
            if offset >= self.keys_per_query:
                labels[every, start + offset - 1] = items[:, :, offset]
        return Examples(tokens, labels)

    def _starts(self, count: int, rng: np.random.Generator) -> np.ndarray:
        # Slots of one item each after the pairs; which slots hold queries follows the power law, without replacement
        # (Gumbel keys). Pair i is asked in the i-th drawn slot.
        slots = (self.length - self.pairs * self.item) // self.item
        weight = np.log(self.power * np.arange(1, slots + 1.0) ** (self.power - 1))
        drawn = np.argsort(-(weight + rng.gumbel(size=(count, slots))), axis=1)[:, : self.pairs]
        return self.pairs * self.item + drawn * self.item


def _distinct(count: int, size: int, number: int, rng: np.random.Generator) -> np.ndarray:
    # `number` different values below `size` in each row, in random order.
    return np.argsort(rng.random((count, size)), axis=1)[:, :number]
