"""ListOps: nested lists of operations on digits.

[1] Nangia and Bowman, ListOps: A Diagnostic Dataset for Latent Tree Learning, NAACL 2018 (student workshop).
[2] Tay et al., Long Range Arena, ICLR 2021.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from stability.errors import UserError
from stability.files import atomic_write
from stability.tasks.base import Data, Examples, Task, task
from stability.tasks.lengths import Lengths, uniforms

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
WORDS = (*OPERATORS, "]", *map(str, range(10)))


@task("listops")
@dataclass(frozen=True)
class ListOps(Task):
    """Serialised trees of MIN, MAX, MED and SM (sum mod 10) over digits; the label is the value [1, 2].

    A node below `max_depth` is a digit with probability 3/4; other nodes are an operator, uniform over the four, with
    uniformly 2 to `max_args` children. Only trees with min_length < length < max_length are kept, none twice, none in
    both sets. Lengths are drawn from their exact distribution first and trees then conditionally on it, which gives the
    distribution of plain rejection without its cost.

    Attributes:
        min_length: lengths are above it.
        max_length: lengths are below it.
        max_depth: depth of the deepest digits.
        max_args: most children of an operator.
        file: a TSV file of the benchmark (columns Source, Target) for training instead of generated trees.
        held_out_file: one for the held-out set.
    """

    tokens: ClassVar[int] = len(WORDS)
    classes: ClassVar[int] = 10
    defaults: ClassVar[Mapping[str, Any]] = {"epochs": 200, "blocks": 10, "learning_rate": 1.0, "decay": 0.99}

    min_length: int = 500
    max_length: int = 600
    max_depth: int = 10
    max_args: int = 10
    file: str | None = None
    held_out_file: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.at_least("min_length", 0)
        self.at_least("max_depth", 1)
        self.at_least("max_args", 2)
        if self.max_length <= self.min_length + 1:
            raise UserError(
                f"Expected `max_length` to be at least 2 above `min_length` (both are excluded), but got "
                f"{self.max_length} and {self.min_length}."
            )
        if (self.file is None) != (self.held_out_file is None):
            raise UserError("Expected both `file` and `held_out_file` for listops, but got one of them.")

    def sample(self, count: int, rng: np.random.Generator) -> Examples:
        """Draw different trees.

        Args:
            count: how many.
            rng: source of randomness.

        Returns:
            The examples, padded at the end to the longest.

        Raises:
            UserError: if there are no trees, or not that many different ones, of the lengths asked for.
        """
        lengths = _lengths(self.max_depth, self.max_args, self.max_length - 1)
        found: dict[tuple[int, ...], int] = {}
        uniform = uniforms(rng)
        for size in lengths.root(20 * count + 1000, self.min_length + 1, rng):
            tokens: list[int] = []
            value = lengths.tree(size, uniform, tokens)
            found.setdefault(tuple(tokens), value)
            if len(found) == count:
                return pad(list(found), list(found.values()), self.padding)
        raise UserError(
            f"Expected {count} different trees with {self.min_length} < length < {self.max_length}, but found "
            f"{len(found)} only; ask for fewer or widen the lengths."
        )

    def data(self, seed: int) -> Data:
        """Draw both sets, or read them from files.

        Args:
            seed: of the draw.

        Returns:
            Training and held-out data without a tree in common.
        """
        if self.file is not None and self.held_out_file is not None:
            train, held_out = read_tsv(self.file), read_tsv(self.held_out_file)
            both = {tuple(row) for row in _unpadded(train)} & {tuple(row) for row in _unpadded(held_out)}
            return Data(train, held_out, not both)
        everything = self.sample(self.train + self.held_out, np.random.default_rng([seed, 0]))
        sequences, labels = everything.sequences, everything.labels
        parts = (slice(None, self.train), slice(self.train, None))
        train, held_out = (Examples(sequences[part], labels[part]) for part in parts)
        return Data(train, held_out, True)


@functools.lru_cache(maxsize=8)
def _lengths(max_depth: int, max_args: int, longest: int) -> Lengths:
    return Lengths(max_depth, max_args, longest)


def pad(rows: list[tuple[int, ...]], labels: list[int], padding: int) -> Examples:
    """Put rows of different lengths into one array.

    Args:
        rows: token indices.
        labels: a class for each row.
        padding: the token after the end.

    Returns:
        The examples.
    """
    sequences = np.full((len(rows), max(map(len, rows))), padding, dtype=np.int64)
    for target, row in zip(sequences, rows, strict=True):
        target[: len(row)] = row
    return Examples(sequences, np.array(labels, dtype=np.int64))


def _unpadded(examples: Examples) -> list[np.ndarray]:
    return [row[row < len(WORDS)] for row in examples.sequences]


def read_tsv(path: str | os.PathLike[str]) -> Examples:
    """Read the benchmark's file: a header `Source<TAB>Target`, then a tree and its value on each line.

    Round parentheses of the binary form are skipped, as the usual pipeline does.

    Args:
        path: the file.

    Returns:
        The examples.

    Raises:
        UserError: if the file is missing or a line is not of this form.
    """
    if not Path(path).is_file():
        raise UserError(f"Expected a ListOps file at {path}, but there is no such file.")
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"Expected {path} to be UTF-8 text, but byte {error.start} is not.") from error
    header = lines[0].split("\t") if lines else []
    if "Source" not in header or "Target" not in header:
        raise UserError(f"Expected the columns Source and Target in the first line of {path}, but it has other ones.")
    source, target = header.index("Source"), header.index("Target")
    known = {word: index for index, word in enumerate(WORDS)}
    rows: list[tuple[int, ...]] = []
    labels: list[int] = []
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip():
            continue
        try:
            cells = line.split("\t")
            words = [word for word in cells[source].split() if word not in ("(", ")")]
            rows.append(tuple(known[word] for word in words))
            labels.append(int(cells[target]))
        except (IndexError, KeyError, ValueError) as error:
            raise UserError(f"Expected a tree and its value in line {number} of {path}, but got {error}.") from error
    if not rows:
        raise UserError(f"Expected trees in {path}, but there are none.")
    return pad(rows, labels, len(WORDS))


def write_tsv(examples: Examples, path: str | os.PathLike[str]) -> None:
    """Write the benchmark's file.

    Args:
        examples: trees and their values.
        path: the file.
    """
    lines = ["Source\tTarget"]
    for row, label in zip(_unpadded(examples), examples.labels, strict=True):
        lines.append(f"{' '.join(WORDS[token] for token in row)}\t{label}")
    with atomic_write(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
