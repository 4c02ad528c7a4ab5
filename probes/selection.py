"""Key selections: which keys each query keeps.

One concept serves training (`probes.attend`), probing (`probes.measure`) and theory (the selection's `kind` says which theorem
speaks of it). A selection never sees a mask value: allowed keys are a boolean of their own, and it chooses among them only
(mask first, select after).

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025, Section 3.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

if TYPE_CHECKING:
    from probes.attention import AttentionCall

Kind = Literal["full", "regular", "heavy-hitter", "input-dependent", "control", "observed"]

THEOREM: dict[Kind, str] = {
    "full": "Theorem 3",
    "regular": "Theorem 4",
    "heavy-hitter": "Theorem 5",
    "input-dependent": "no theorem",
    "control": "no theorem",
    "observed": "as the model's own selection",
}


class Selection(ABC):
    """A rule that maps attention logits and the allowed keys of each query to the keys that the query keeps."""

    kind: ClassVar[Kind]
    summary: ClassVar[str]

    @property
    @abstractmethod
    def name(self) -> str:
        """The short name that `parse` reads back, such as `topk:5`."""

    @abstractmethod
    def keep(
        self,
        logits: Float[Tensor, "batch head query key"],
        allowed: Bool[Tensor, "batch head query key"],
        *,
        start: int = 0,
        call: AttentionCall | None = None,
    ) -> Bool[Tensor, "batch head query key"]:
        """Choose the kept keys for a block of consecutive queries.

        Args:
            logits: scaled scores after bias and soft-cap, in nats; values at keys that are not allowed are ignored.
            allowed: the keys that each query may attend to.
            start: position of the block's first query among all queries of the call.
            call: the attention call, for rules that need more than one block's logits.

        Returns:
            The kept keys, a subset of `allowed`.
        """

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Full(Selection):
    """Keep every allowed key (Theorem 3 of [1])."""

    kind: ClassVar[Kind] = "full"
    summary: ClassVar[str] = "full: every allowed key"

    @property
    def name(self) -> str:
        """The short name, `full`."""
        return "full"

    def keep(
        self,
        logits: Float[Tensor, "batch head query key"],
        allowed: Bool[Tensor, "batch head query key"],
        *,
        start: int = 0,
        call: AttentionCall | None = None,
    ) -> Bool[Tensor, "batch head query key"]:
        """Keep all of `allowed`; see `Selection.keep`.

        Args:
            logits: not used.
            allowed: the keys that each query may attend to.
            start: not used.
            call: not used.

        Returns:
            `allowed`.
        """
        return allowed


@dataclass(frozen=True)
class TopK(Selection):
    """Keep the k allowed keys with the largest logits (Theorem 5 of [1]); all of them where fewer are allowed.

    Args:
        k: how many keys to keep.
        ties: `exact` keeps exactly k, the lowest index first among equals; `threshold` keeps all that equal the k-th.

    Raises:
        ValueError: if `k` is not a positive whole number or `ties` is not one of the two.
    """

    kind: ClassVar[Kind] = "heavy-hitter"
    summary: ClassVar[str] = (
        "topk:K[:threshold]: the K largest logits; ties keep the lowest index, or with :threshold all equals"
    )

    k: int
    ties: Literal["exact", "threshold"] = "exact"

    def __post_init__(self) -> None:
        if isinstance(self.k, bool) or not isinstance(self.k, int) or self.k < 1:
            raise ValueError(
                f"Expected `k` of a top-k selection to be a whole number of at least 1, but got {self.k!r}."
            )
        if self.ties not in ("exact", "threshold"):
            raise ValueError(f"Expected `ties` to be 'exact' or 'threshold', but got {self.ties!r}.")

    @property
    def name(self) -> str:
        """The short name, such as `topk:5` or `topk:5:threshold`."""
        return f"topk:{self.k}" if self.ties == "exact" else f"topk:{self.k}:threshold"

    def keep(
        self,
        logits: Float[Tensor, "batch head query key"],
        allowed: Bool[Tensor, "batch head query key"],
        *,
        start: int = 0,
        call: AttentionCall | None = None,
    ) -> Bool[Tensor, "batch head query key"]:
        """Keep the k largest allowed logits; see `Selection.keep`.

        Args:
            logits: scores in nats.
            allowed: the keys that each query may attend to.
            start: not used.
            call: not used.

        Returns:
            The kept keys.
        """
        if self.k >= logits.shape[-1]:
            return allowed
        masked = logits.masked_fill(~allowed, -torch.inf)
        threshold = masked.topk(self.k, dim=-1).values[..., -1:]
        kept = (masked >= threshold) & allowed
        if self.ties == "threshold" or not bool((kept.sum(-1) > self.k).any()):
            return kept
        above = masked > threshold
        tied = kept & ~above
        return above | (tied & (tied.cumsum(-1) <= self.k - above.sum(-1, keepdim=True)))


_PARSERS: dict[str, Callable[..., Selection]] = {}
_SUMMARIES: dict[str, type[Selection]] = {}


def register(name: str, build: Callable[..., Selection], selection: type[Selection]) -> None:
    """Teach `parse` a short name.

    Args:
        name: the word before the first colon.
        build: called with the words after it.
        selection: the class, for its summary and kind.
    """
    _PARSERS[name] = build
    _SUMMARIES[name] = selection


def whole_number(word: str) -> int:
    """Read one parameter of a short name.

    Args:
        word: the text between two colons.

    Returns:
        The number.

    Raises:
        ValueError: if the text is not a whole number.
    """
    try:
        return int(word)
    except ValueError:
        raise ValueError(f"expected a whole number, but got {word!r}") from None


def _build_topk(k: str, ties: str = "exact") -> Selection:
    return TopK(whole_number(k), ties)  # type: ignore[arg-type]


register("full", Full, Full)
register("topk", _build_topk, TopK)


def known() -> dict[str, type[Selection]]:
    """The words that `parse` knows.

    Returns:
        Each word with its selection class.
    """
    return dict(_SUMMARIES)


def parse(text: str | Selection) -> Selection:
    """Turn a short name such as `topk:5` into a selection.

    Args:
        text: the short name; a selection is returned as it is.

    Returns:
        The selection.

    Raises:
        ValueError: if the name or its parameters are wrong; the message lists the names there are.
    """
    if isinstance(text, Selection):
        return text
    word, *parameters = text.strip().split(":")
    build = _PARSERS.get(word)
    if build is None:
        near = difflib.get_close_matches(word, _PARSERS, n=3)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise ValueError(f"Expected a selection, but got {text!r}; known: {', '.join(sorted(_PARSERS))}.{hint}")
    usage = _SUMMARIES[word].summary.split(": ")[0]
    try:
        return build(*parameters)
    except TypeError:
        raise ValueError(f"Expected a selection of the form {usage}, but got {text!r}.") from None
    except ValueError as error:
        raise ValueError(f"Expected a selection of the form {usage}, but got {text!r}: {error}") from None
