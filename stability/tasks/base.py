"""What a task is: a named, seeded source of labelled sequences with held-out data."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from jaxtyping import Int
from numpy import ndarray

from stability.errors import UserError

Tokens = Int[ndarray, "sample token"]
Labels = Int[ndarray, "sample"] | Int[ndarray, "sample token"]

IGNORED = -100
"""A label that takes no part in loss and accuracy."""


@dataclass(frozen=True, eq=False)
class Examples:
    """Sequences with their labels.

    Attributes:
        sequences: token indices, int64.
        labels: one class a sequence, or one a token with `IGNORED` where there is none.
    """

    sequences: Tokens
    labels: Labels

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def majority(self) -> float:
        """Share of the commonest label: the accuracy of always giving that answer."""
        counted = self.labels[self.labels != IGNORED]
        return float(np.unique(counted, return_counts=True)[1].max() / counted.size) if counted.size else float("nan")


@dataclass(frozen=True, eq=False)
class Data:
    """What a model is trained on and judged by.

    Attributes:
        train: the training set.
        held_out: sequences that are not in the training set, where the space of sequences allows that.
        disjoint: whether no sequence is in both.
    """

    train: Examples
    held_out: Examples
    disjoint: bool


@dataclass(frozen=True)
class Task(ABC):
    """A source of labelled sequences.

    Attributes:
        train: number of training sequences.
        held_out: number of held-out sequences.
        name: how the task is called on the command line.
        tokens: size of the vocabulary without padding.
        classes: number of labels.
        readout: whether a label belongs to a sequence (`mean`) or to each token (`tokens`).
        causal: whether models of this task see earlier tokens only, unless told otherwise.
        defaults: the paper's training settings for this task.
    """

    name: ClassVar[str]
    tokens: ClassVar[int]
    classes: ClassVar[int]
    readout: ClassVar[Literal["mean", "tokens"]] = "mean"
    causal: ClassVar[bool] = False
    defaults: ClassVar[Mapping[str, Any]] = {}

    train: int = 5000
    held_out: int = 2000

    def __post_init__(self) -> None:
        self.at_least("train", 1)
        self.at_least("held_out", 1)

    def at_least(self, field: str, least: int) -> None:
        """Check a count that a user gave.

        Args:
            field: name of the field.
            least: the smallest value that makes sense.

        Raises:
            UserError: if it is not a whole number of at least `least`.
        """
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            what = f"`{field}` of the task {self.name}"
            raise UserError(f"Expected {what} to be a whole number of at least {least}, but got {value!r}.")

    @property
    def padding(self) -> int:
        """The token that stands for padding, one past the task's own."""
        return self.vocabulary - 1

    @property
    def vocabulary(self) -> int:
        """Number of tokens, padding included."""
        return self.tokens + 1

    @property
    def outputs(self) -> int:
        """Number of classes that a model of this task tells apart."""
        return self.classes

    @abstractmethod
    def sample(self, count: int, rng: np.random.Generator) -> Examples:
        """Draw labelled sequences independently from the task's distribution.

        Args:
            count: how many.
            rng: source of randomness.

        Returns:
            The examples.
        """

    def data(self, seed: int) -> Data:
        """Draw training and held-out data, a function of the task's fields and the seed alone.

        Args:
            seed: of the draw.

        Returns:
            Both sets. A held-out sequence that is also a training sequence is drawn anew; where the space is so small
            that none is left, the held-out set is an independent draw.
        """
        train = self.sample(self.train, np.random.default_rng([seed, 0]))
        held_out, disjoint = self._disjoint(train, np.random.default_rng([seed, 1]))
        return Data(train, held_out, disjoint)

    def _disjoint(self, train: Examples, rng: np.random.Generator) -> tuple[Examples, bool]:
        known = _rows(train.sequences)
        parts: list[Examples] = []
        found = drawn = 0
        while found < self.held_out:
            if drawn > 20 * (self.held_out + found):
                return self.sample(self.held_out, rng), False
            fresh = self.sample(self.held_out, rng)
            new = ~np.isin(_rows(fresh.sequences), known)
            parts.append(Examples(fresh.sequences[new], fresh.labels[new]))
            drawn += self.held_out
            found += int(new.sum())
        sequences = np.concatenate([_padded(part.sequences, parts, self.padding) for part in parts])
        labels = np.concatenate([part.labels for part in parts])
        return Examples(sequences[: self.held_out], labels[: self.held_out]), True


def _rows(sequences: Tokens) -> ndarray:
    contiguous = np.ascontiguousarray(sequences)
    return contiguous.view(np.dtype((np.void, contiguous.dtype.itemsize * contiguous.shape[1]))).ravel()


def _padded(sequences: Tokens, parts: list[Examples], padding: int) -> Tokens:
    length = max(part.sequences.shape[1] for part in parts)
    return np.pad(sequences, ((0, 0), (0, length - sequences.shape[1])), constant_values=padding)


_TASKS: dict[str, type[Task]] = {}
_Class = TypeVar("_Class", bound=type[Task])


def task(name: str) -> Callable[[_Class], _Class]:
    """Register a task's dataclass under its name.

    Args:
        name: as on the command line.

    Returns:
        A class decorator.
    """

    def decorate(cls: _Class) -> _Class:
        cls.name = name
        _TASKS[name] = cls
        return cls

    return decorate


def known() -> dict[str, type[Task]]:
    """The registered tasks.

    Returns:
        Each name with its class.
    """
    return dict(_TASKS)


def make(name: str, options: Mapping[str, Any] | None = None) -> Task:
    """Build a task from its name and options.

    Args:
        name: a registered name.
        options: values for fields of the task's dataclass; text is converted to the field's type.

    Returns:
        The task.

    Raises:
        UserError: if the name or an option is unknown, or a value is wrong; the message lists what there is.
    """
    if name not in _TASKS:
        near = difflib.get_close_matches(name, _TASKS, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise UserError(f"Expected a task, but got {name!r}; known: {', '.join(sorted(_TASKS))}.{hint}")
    cls = _TASKS[name]
    types = typing.get_type_hints(cls)
    fields = [field.name for field in dataclasses.fields(cls)]
    given = {}
    for key, value in (options or {}).items():
        field = key.replace("-", "_")
        if field not in fields:
            raise UserError(f"Expected an option of the task {name}, but got {key!r}; it has {', '.join(fields)}.")
        given[field] = _converted(value, types[field], f"option {key} of the task {name}")
    try:
        return cls(**given)
    except TypeError:
        needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING and f.name not in given]
        raise UserError(f"Expected the task {name} to be given {', '.join(needed)}, but it was not.") from None


def _converted(value: Any, kind: Any, what: str) -> Any:
    textual = kind is str or str in typing.get_args(kind) or typing.get_origin(kind) is Literal
    if not isinstance(value, str) or textual:
        return value
    if kind is bool:
        if value.lower() in ("true", "false"):
            return value.lower() == "true"
        raise UserError(f"Expected true or false for the {what}, but got {value!r}.")
    try:
        return kind(value)
    except (TypeError, ValueError):
        raise UserError(f"Expected a {getattr(kind, '__name__', kind)} for the {what}, but got {value!r}.") from None
