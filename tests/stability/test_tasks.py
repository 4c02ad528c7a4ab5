"""Tasks against slow evaluators of their own, and their distributions against the stated ones."""

from __future__ import annotations

import itertools
import time
from collections import Counter

import numpy as np
import pytest
from scipy.stats import chisquare

from stability import tasks
from stability.errors import UserError
from stability.tasks import Examples, Task

NNCH = (
    "parity", "even-pairs", "cycle-navigation", "missing-duplicates", "stack-manipulation", "modular-arithmetic",
    "solve-equation",
)  # fmt: skip


def _sample(name: str, count: int, seed: int = 0, **options: object) -> Examples:
    return tasks.make(name, options).sample(count, np.random.default_rng(seed))


def _cycle(row: list[int]) -> int:
    place = 0
    for token in row:
        place = (place + {0: -1, 1: 0, 2: 1}[token]) % 5
    return place


def _hidden_bit(row: list[int]) -> int:
    half, hole = len(row) // 2, row.index(2)
    if len(row) % 2:
        assert row[-1] == 3
    for i in range(half):
        assert row[i] == row[i + half] or 2 in (row[i], row[i + half])
    return row[hole - half if hole >= half else hole + half]


def _stack_top(row: list[int]) -> int:
    stack: list[int] = []
    acting = False
    for token in row:
        acting |= token >= 2
        if acting:
            assert token >= 2, "a bit among the actions"
        if token == 2:
            stack[-1:] = []
        else:
            stack.append(token if token < 2 else token - 3)
    return stack[-1] if stack else 2


def _python(row: list[int], symbols: str) -> int:
    return int(eval("".join(symbols[token] for token in row))) % 5


def _equation(row: list[int], label: int) -> int:
    symbols = "01234+-()x="
    text = "".join(symbols[token] for token in row)
    left, right = text.split("=")
    assert text.count("x") == 1
    assert eval(left.replace("x", str(label))) % 5 == int(right)
    return label


SLOW = {
    "parity": lambda row, _: sum(row) % 2,
    "even-pairs": lambda row, _: sum(a != b for a, b in itertools.pairwise(row)) % 2,
    "cycle-navigation": lambda row, _: _cycle(row),
    "missing-duplicates": lambda row, _: _hidden_bit(row),
    "stack-manipulation": lambda row, _: _stack_top(row),
    "modular-arithmetic": lambda row, _: _python(row, "01234+-*()"),
    "solve-equation": _equation,
}


@pytest.mark.parametrize("name", NNCH)
@pytest.mark.parametrize("length", [40, 3, 4, 7, 11])
def test_labels(name: str, length: int) -> None:
    examples = _sample(name, 2000, length=length)
    assert examples.sequences.shape == (2000, length)
    assert examples.sequences.max() < tasks.make(name).padding
    for row, label in zip(examples.sequences.tolist(), examples.labels.tolist(), strict=True):
        assert SLOW[name](row, label) == label


@pytest.mark.parametrize("name", NNCH)
def test_shortest_lengths(name: str) -> None:
    for length in (1, 2):
        examples = _sample(name, 50, length=length)
        assert examples.sequences.shape == (50, length)
        if name == "solve-equation":
            assert not examples.sequences.any()
            assert not examples.labels.any()
        elif (name, length) == ("missing-duplicates", 1):
            assert examples.sequences.tolist() == [[1]] * 50
            assert set(examples.labels) == {1}
        else:
            for row, label in zip(examples.sequences.tolist(), examples.labels.tolist(), strict=True):
                assert SLOW[name](row, label) == label


def _uniform(values: np.ndarray, choices: int) -> None:
    assert chisquare(np.bincount(values.ravel(), minlength=choices)).pvalue > 1e-4


def test_stated_distributions() -> None:
    _uniform(_sample("parity", 5000).sequences, 2)
    _uniform(_sample("cycle-navigation", 5000).sequences, 3)
    doubled = _sample("missing-duplicates", 8000).sequences
    _uniform((doubled == 2).argmax(1), 40)
    stacks = _sample("stack-manipulation", 8000).sequences
    acting = stacks >= 2
    _uniform(acting.argmax(1) - 1, 39)  # the number of bits, 1 to 39
    _uniform(stacks[acting] - 2, 3)


def test_arithmetic_splits_uniformly() -> None:
    rows = _sample("modular-arithmetic", 20000, length=9).sequences
    # (left op right) with 1 to 5 tokens to the left: the operator at bracket depth one.
    depth = (rows == 8).cumsum(1) - (rows == 9).cumsum(1)
    outer = (depth == 1) & (rows >= 5) & (rows <= 7)
    outer[:, 0] = outer[:, -1] = False
    # a minus in front of a digit is no operator: it follows a bracket or an operator
    before = np.roll(rows, 1, axis=1)
    outer &= (before < 5) | (before == 9)
    assert (outer.sum(1) == 1).all()
    place = outer.argmax(1) - 2
    _uniform(place, 5)
    _uniform(rows[np.arange(len(rows)), place + 2] - 5, 3)


def test_arithmetic_majority_is_near_thirty_percent() -> None:
    examples = _sample("modular-arithmetic", 20000)
    assert 0.27 < examples.majority < 0.33
    assert np.bincount(examples.labels).argmax() == 0


@pytest.mark.parametrize("name", [*NNCH, "mqar"])
def test_fast_and_seeded(name: str) -> None:
    task = tasks.make(name, {"train": 3000, "held_out": 2000})
    begun = time.process_time()
    data = task.data(7)
    assert time.process_time() - begun < 2
    again, other = task.data(7), task.data(8)
    assert np.array_equal(data.train.sequences, again.train.sequences)
    assert np.array_equal(data.held_out.labels, again.held_out.labels)
    assert not np.array_equal(data.train.sequences, other.train.sequences)
    assert data.disjoint
    assert not {row.tobytes() for row in data.train.sequences} & {row.tobytes() for row in data.held_out.sequences}
    assert len(data.held_out) == 2000


def test_small_spaces() -> None:
    some = tasks.make("parity", {"length": 8, "train": 100, "held_out": 60}).data(0)
    assert some.disjoint
    none = tasks.make("parity", {"length": 2, "train": 100, "held_out": 50}).data(0)
    assert not none.disjoint
    assert len(none.held_out) == 50


@pytest.mark.parametrize(("keys", "values"), [(1, 1), (2, 1), (1, 3), (2, 2)])
def test_recall(keys: int, values: int) -> None:
    task = tasks.make(
        "mqar",
        {"length": 80, "pairs": 6, "vocabulary_size": 64, "keys_per_query": keys, "values_per_key": values},
    )
    examples = task.sample(2000, np.random.default_rng(0))
    item = keys + values
    for row, labels in zip(examples.sequences.tolist(), examples.labels.tolist(), strict=True):
        pairs = [row[i * item : (i + 1) * item] for i in range(6)]
        memory = {tuple(pair[:keys]): pair[keys:] for pair in pairs}
        used = [token for pair in pairs for token in pair]
        assert len(set(used)) == len(used)
        assert all(1 <= t < 32 for pair in pairs for t in pair[:keys])
        assert all(32 <= t < 64 for pair in pairs for t in pair[keys:])
        asked = [i for i, label in enumerate(labels) if label != tasks.IGNORED]
        assert len(asked) == 6 * values
        assert min(asked) >= 6 * item
        for first in asked[::values]:
            answer = memory.pop(tuple(row[first - keys + 1 : first + 1]))
            assert labels[first : first + values] == answer
            assert row[first + 1 : first + values] == answer[:-1]
        assert not memory


def test_recall_gaps_follow_the_power_law() -> None:
    task = tasks.make("mqar", {"length": 12, "pairs": 1, "vocabulary_size": 32})
    examples = task.sample(20000, np.random.default_rng(1))
    slot = ((examples.labels != tasks.IGNORED).argmax(1) - 2) // 2
    weight = 0.01 * np.arange(1, 6.0) ** (0.01 - 1)
    assert chisquare(np.bincount(slot, minlength=5), 20000 * weight / weight.sum()).pvalue > 1e-4


def test_majority() -> None:
    assert Examples(np.zeros((4, 1), int), np.array([[1], [-100], [1], [0]])).majority == pytest.approx(2 / 3)
    assert Counter(type(task).__name__ for task in map(tasks.make, NNCH)).total() == 7


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("even-pair", {}, r"known: .*even-pairs.*Did you mean even-pairs\?"),
        ("parity", {"size": 3}, "it has train, held_out, length"),
        ("parity", {"length": "long"}, "Expected a int for the option length"),
        ("parity", {"length": 0}, "at least 1, but got 0"),
        ("mqar", {"pairs": 99}, "too few"),
        ("mqar", {"length": 8}, "hold 8 pairs"),
        ("listops", {"min_length": 9, "max_length": 10}, "at least 2 above"),
        ("language", {}, "file=PATH"),
    ],
)
def test_mistakes(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        tasks.make(name, options)


def test_text_options_are_converted() -> None:
    task: Task = tasks.make("parity", {"length": "12", "held-out": "7"})
    assert task == tasks.make("parity", {"length": 12, "held_out": 7})
