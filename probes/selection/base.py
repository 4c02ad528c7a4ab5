"""What a key selection is.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025, Section 3.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Literal

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
    """A rule that maps attention logits and the allowed keys of each query to the keys that the query keeps.

    Rules that hold for every selection:

    - Mask first, select after: kept keys are allowed keys, and disallowed keys take no part in the choice.
    - A query with an allowed key keeps at least one. Where the rule itself would leave none (an empty bucket, an empty
      intersection), the allowed key nearest to the query's own index stays, the earlier one of two.
    - Any float is a real logit, below -1e5 and infinite too; a NaN counts as minus infinity.
    - The outcome is a function of the arguments alone: ties go to the lowest index, random choices come from a seed.

    Attributes:
        kind: which theorem speaks of the rule, by `THEOREM`.
        word: the short name before its first colon.
        summary: how to write the short name, a colon, and what the rule keeps.
    """

    kind: ClassVar[Kind]
    word: ClassVar[str]
    summary: ClassVar[str]

    @property
    def per_query(self) -> int | None:
        """How many keys a query keeps where enough are allowed; None if that varies from query to query."""
        return None

    @property
    def name(self) -> str:
        """The short name that `parse` reads back, such as `topk:5`; trailing defaults are left out."""
        fields = [field for field in dataclasses.fields(self) if field.init]  # type: ignore[arg-type]
        values = [getattr(self, field.name) for field in fields]
        while fields and fields[-1].default is not dataclasses.MISSING and values[-1] == fields[-1].default:
            fields.pop()
            values.pop()
        return ":".join([self.word, *(_written(value) for value in values)])

    @property
    def theorem(self) -> str:
        """The theorem of [1] that speaks of this selection, or `no theorem`."""
        return THEOREM[self.kind]

    def keep(
        self,
        logits: Float[Tensor, "batch head query key"],
        allowed: Bool[Tensor, "batch head query key"],
        *,
        start: int | Tensor = 0,
        call: AttentionCall | None = None,
    ) -> Bool[Tensor, "batch head query key"]:
        """Choose the kept keys for a block of queries.

        Args:
            logits: scaled scores after bias and soft-cap, in nats; values at keys that are not allowed are ignored.
            allowed: the keys that each query may attend to.
            start: position of the block's first query among all queries of the call, or a tensor of all positions.
            call: the attention call, for rules that need more than one block's logits.

        Returns:
            The kept keys, a subset of `allowed`; at least one in each row that has an allowed key.

        Raises:
            ValueError: if the two shapes differ, or the rule needs the call and there is none.
        """
        if logits.shape != allowed.shape:
            shapes = f"{tuple(logits.shape)}, but got {tuple(allowed.shape)}"
            raise ValueError(f"Expected `allowed` to have the shape of `logits`, {shapes}.")
        if logits.numel() == 0:
            return allowed.clone()
        if logits.dtype not in (torch.float32, torch.float64):
            logits = logits.float()
        first = start if isinstance(start, Tensor) else torch.arange(logits.shape[-2], device=logits.device) + start
        kept = self._choose(logits, allowed, first, call)
        return kept if kept is allowed else at_least_one(kept & allowed, allowed, first)

    @abstractmethod
    def _choose(
        self,
        logits: Float[Tensor, "batch head query key"],
        allowed: Bool[Tensor, "batch head query key"],
        rows: Tensor,
        call: AttentionCall | None,
    ) -> Bool[Tensor, "#batch #head query key"]:
        """The rule itself, for the queries at `rows`; `keep` drops what is not allowed and fills empty rows."""

    def __str__(self) -> str:
        return self.name


def at_least_one(
    kept: Bool[Tensor, "batch head query key"], allowed: Bool[Tensor, "batch head query key"], rows: Tensor
) -> Bool[Tensor, "batch head query key"]:
    """Where nothing is kept though a key is allowed, keep the allowed key nearest to the query's index.

    Args:
        kept: what a rule keeps.
        allowed: the keys that each query may attend to.
        rows: index of each query.

    Returns:
        `kept`, with one key in each row that had none; of two equally near keys the earlier one.
    """
    bare = ~kept.any(-1)
    if not bool(bare.any()):
        return kept
    keys = kept.shape[-1]
    distance = (torch.arange(keys, device=kept.device) - rows[:, None]).abs()  # (query, key)
    distance = distance.expand_as(kept)[bare].masked_fill(~allowed[bare], torch.iinfo(torch.long).max)
    nearest = torch.zeros_like(distance, dtype=torch.bool).scatter_(-1, distance.argmin(-1, keepdim=True), True)
    kept = kept.clone()
    kept[bare] = nearest & allowed[bare]
    return kept


def positive(number: Any, name: str, least: int = 1) -> None:
    """Check a count that a user gave.

    Args:
        number: what was given.
        name: of the argument, for the message.
        least: the smallest value that makes sense.

    Raises:
        ValueError: if it is not a whole number of at least `least`.
    """
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"Expected `{name}` to be a whole number of at least {least}, but got {number!r}.")


def _written(value: object) -> str:
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value)
