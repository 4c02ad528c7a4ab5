"""Selections made of selections: what either keeps (`+`), what all keep (`&`)."""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from jaxtyping import Bool
from torch import Tensor

from probes.selection.base import Kind, Selection
from probes.selection.registry import parse_one

if TYPE_CHECKING:
    from probes.attention import AttentionCall


@dataclass(frozen=True)
class Union(Selection):
    """Keep what any of the parts keeps, such as `nsa-like:32:4+window:64`.

    A union of regular selections is regular. A union of heavy-hitters is one: each part keeps a set of largest logits,
    cut the same way among equals, so one of them holds the others. With a full selection it is full; any other mixture
    has no theorem.

    Args:
        parts: at least two selections.

    Raises:
        ValueError: if there are fewer than two parts.
    """

    summary: ClassVar[str] = "A+B: the keys that A or B keeps"

    parts: tuple[Selection, ...]

    def __post_init__(self) -> None:
        _check(self.parts)

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """Which theorem speaks of the union."""
        return _kind(self.parts, neutral=None, absorbing="full")

    @property
    def name(self) -> str:
        """The parts' names with `+` between them."""
        return "+".join(part.name for part in self.parts)

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        return functools.reduce(operator.or_, _each(self.parts, logits, allowed, rows, call))


@dataclass(frozen=True)
class Intersection(Selection):
    """Keep what all of the parts keep, such as `topk:8&banded:64`; `Selection` says what stays where that is nothing.

    Kinds follow the rules of `Union`, with full as the part that changes nothing.

    Args:
        parts: at least two selections.

    Raises:
        ValueError: if there are fewer than two parts.
    """

    summary: ClassVar[str] = "A&B: the keys that both A and B keep"

    parts: tuple[Selection, ...]

    def __post_init__(self) -> None:
        _check(self.parts)

    @property
    def kind(self) -> Kind:  # type: ignore[override]
        """Which theorem speaks of the intersection."""
        return _kind(self.parts, neutral="full", absorbing=None)

    @property
    def name(self) -> str:
        """The parts' names with `&` between them."""
        return "&".join(part.name for part in self.parts)

    def _choose(self, logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None) -> Tensor:
        return functools.reduce(operator.and_, _each(self.parts, logits, allowed, rows, call))


def parse(text: str | Selection) -> Selection:
    """Turn a short name such as `topk:5` or `nsa-like:32:4+window:64` into a selection.

    Args:
        text: the short name; a selection is returned as it is.

    Returns:
        The selection.

    Raises:
        ValueError: if the name or its parameters are wrong; the message lists the names there are, and the near ones.
    """
    if isinstance(text, Selection):
        return text
    if not isinstance(text, str):
        raise ValueError(f"Expected the short name of a selection, such as 'topk:5', but got {text!r}.")
    terms = []
    for term in text.split("+"):
        factors = tuple(parse_one(factor) for factor in term.split("&"))
        terms.append(factors[0] if len(factors) == 1 else Intersection(factors))
    return terms[0] if len(terms) == 1 else Union(tuple(terms))


def _each(
    parts: tuple[Selection, ...], logits: Tensor, allowed: Tensor, rows: Tensor, call: AttentionCall | None
) -> list[Bool[Tensor, "batch head query key"]]:
    return [part.keep(logits, allowed, start=rows, call=call) for part in parts]


def _kind(parts: tuple[Selection, ...], neutral: Kind | None, absorbing: Kind | None) -> Kind:
    kinds: set[Kind] = {part.kind for part in parts}
    if absorbing in kinds and absorbing is not None:
        return absorbing
    if len(kinds) > 1 and neutral is not None:
        kinds.discard(neutral)
    return kinds.pop() if len(kinds) == 1 and not kinds & {"control", "observed"} else "input-dependent"


def _check(parts: tuple[Selection, ...]) -> None:
    if len(parts) < 2:
        raise ValueError(f"Expected at least two selections to combine, but got {len(parts)}.")
