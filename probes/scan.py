"""All statistics of one attention call, in blocks of queries: no matrix of the size of the attention is ever held.

Several selections share one pass over the logits. Full attention and top-k, the usual pair, are read off the largest
logits and the exponentials of a block (`Shared`); any other selection says which keys it keeps and goes through
`statistics.per_query`, as do the rare blocks with infinite or NaN logits. Both ways give equal numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from probes.attention import AttentionCall
from probes.leading import extremes_and_leading
from probes.selection import Full, Hardmax, Selection, TopK
from probes.statistics import PER_QUERY, SUBSET_KEYS, per_query, subset_variance, tail_mass_bound

BLOCK = 2**19
"""Logits looked at together: few enough to stay near the processor's caches, so memory doesn't grow with length."""

ROWS = 128
"""Queries in a block, where there are as many: enough for an efficient product."""

DOUBLE = ("dispersion", "separation")
NEGLIGIBLE = -200.0  # nats below the largest logit, where even float64's exponential vanishes in float32 sums


@dataclass(frozen=True)
class Outcome:
    """What one selection makes of one attention call.

    Args:
        queried: for each metric of `PER_QUERY`, (batch, head, query).
        counts: (batch, head, key), the queries that keep the key.
        mass: (batch, head, key), the attention that the key receives.
    """

    queried: dict[str, Tensor]
    counts: Float[Tensor, "batch head key"]
    mass: Float[Tensor, "batch head key"]


@dataclass(frozen=True)
class Result:
    """What all selections make of one attention call.

    Args:
        outcomes: one for each selection, in their order.
        seen: (batch, head, key), the keys that some counted query may attend to.
        invalid: number of counted queries with a NaN among the logits of their allowed keys.
    """

    outcomes: list[Outcome]
    seen: Bool[Tensor, "batch head key"]
    invalid: int


def scan(
    call: AttentionCall,
    selections: Sequence[Selection],
    real: Bool[Tensor, "batch query"],
    rows: Int[Tensor, " row"] | None = None,
) -> Result:
    """Take the statistics of an attention call.

    Args:
        call: the call.
        selections: the rules to apply to its logits.
        real: which queries count; the others take no part in what is summed over queries.
        rows: positions of the queries to look at, in rising order; all where omitted.

    Returns:
        The statistics.
    """
    batch, heads, queries, keys = call.shape
    count = queries if rows is None else len(rows)
    dtype = torch.float64 if call.dtype == torch.float64 else torch.float32
    outcomes = []
    for _ in selections:
        queried = {
            name: torch.empty(batch, heads, count, dtype=torch.float64 if name in DOUBLE else dtype, device=call.device)
            for name in PER_QUERY
        }
        zeros = torch.zeros(2, batch, heads, keys, dtype=torch.float64, device=call.device)
        outcomes.append(Outcome(queried, zeros[0], zeros[1]))
    result = Result(outcomes, torch.zeros(batch, heads, keys, dtype=torch.bool, device=call.device), 0)
    invalid = 0
    for batch_slice, head_slice in _parts(call, count):
        part = call.part(batch_slice, head_slice)
        size = part.shape[0] * part.shape[1] * keys
        step = max(1, min(count, _block(call) // max(1, size)))
        for first in range(0, count, step):
            last = min(first + step, count)
            index = slice(first, last) if rows is None else rows[first:last]
            at = torch.arange(first, last, device=call.device) if rows is None else rows[first:last]
            counted = real[batch_slice][:, None, index]  # (batch, 1, query)
            views = [
                Outcome(
                    {name: tensor[batch_slice, head_slice, first:last] for name, tensor in o.queried.items()},
                    o.counts[batch_slice, head_slice],
                    o.mass[batch_slice, head_slice],
                )
                for o in outcomes
            ]
            invalid += _scan_block(part, selections, index, at, counted, views, result.seen[batch_slice, head_slice])
    return Result(outcomes, result.seen, invalid)


def _block(call: AttentionCall) -> int:
    # A graphics card wants work in large pieces; a processor wants them to stay in its cache.
    return BLOCK if call.device.type == "cpu" else 128 * BLOCK


def _parts(call: AttentionCall, count: int) -> Iterator[tuple[slice, slice]]:
    # Batch elements and heads that are looked at together.
    batch, heads, _, keys = call.shape
    together = max(1, _block(call) // max(1, min(count, ROWS) * keys))
    groups = 1 if call.key is None else heads // call.key.shape[1]
    if together >= heads:
        step = together // heads
        for first in range(0, batch, step):
            yield slice(first, min(first + step, batch)), slice(0, heads)
        return
    # A part of the heads must be whole groups of those that share a key, or lie inside of one.
    if together >= groups:
        step = together - together % groups
    else:
        step = max(size for size in range(1, together + 1) if groups % size == 0)
    for element in range(batch):
        for first in range(0, heads, step):
            yield slice(element, element + 1), slice(first, min(first + step, heads))


def _scan_block(
    part: AttentionCall,
    selections: Sequence[Selection],
    index: slice | Tensor,
    at: Tensor,
    counted: Tensor,
    views: Sequence[Outcome],
    seen: Tensor,
) -> int:
    end = int(at[-1]) + 1 if part.causal else part.shape[-1]
    part = part.until(end) if end < part.shape[-1] else part
    end = part.shape[-1]
    logits = part.logits(index)
    allowed = None if part.unmasked else part.allowed(index)
    if allowed is not None and not part.causal and bool(allowed.all()):
        allowed = None
    # How many counted queries may attend to each key; what they all keep under full attention.
    if allowed is None:
        reach = counted.sum(-1, keepdim=True)
    else:
        reach = (allowed if bool(counted.all()) else allowed & counted[..., None]).sum(-2)
    seen[..., :end] |= reach > 0
    numbers = [_leading_count(selection) for selection in selections]
    shared = Shared.of(logits, allowed, part.sinks, max((n for n in numbers if n is not None), default=None))
    general: Tensor | None = None
    invalid = 0
    if shared is None or None in numbers:
        general = torch.ones_like(logits, dtype=torch.bool) if allowed is None else allowed
        if shared is None:
            invalid = int(((logits.isnan() & general).any(-1) & counted).sum())
    for selection, number, view in zip(selections, numbers, views, strict=True):
        if shared is not None and number is not None:
            values = shared.full(view, counted, reach) if number == 0 else shared.topk(number, selection, view, counted)
        else:
            assert general is not None
            kept = selection.keep(logits, general, start=at, call=part)
            values = per_query(logits, kept, general, part.sinks)
            weights = values.pop("weights")
            view.counts[..., :end] += (kept & counted[..., None]).sum(-2)
            view.mass[..., :end] += weights.masked_fill(~counted[..., None], 0.0).sum(-2)
        for name, value in values.items():
            view.queried[name].copy_(value)
    return invalid


def _leading_count(selection: Selection) -> int | None:
    # The number of largest logits that a selection is made of; 0 for all of them, None if it is not of that kind.
    if isinstance(selection, Full):
        return 0
    if isinstance(selection, Hardmax):
        return 1
    return selection.k if isinstance(selection, TopK) and selection.ties == "exact" else None


@dataclass
class Shared:
    """What full attention and top-k share of one block: the largest logits and all exponentials.

    Args:
        logits: (batch, head, query, key).
        allowed: the same, or None if all are.
        number: (batch, head, query) or less, the number of allowed keys.
        low: (batch, head, query), the smallest allowed logit.
        values: (batch, head, query, some), the largest allowed logits, falling.
        indices: their keys.
        shift: (batch, head, query, 1), the largest allowed logit, or the sink's where that is larger.
        powers: (batch, head, query, key), exp(logit - shift), 0 where not allowed.
        total: sum of the powers over keys and sinks.
        sinks: (batch, head, query), logit of the sinks minus the shift, or None.
        distance: the sum of powers times (shift - logit).
    """

    logits: Tensor
    allowed: Tensor | None
    number: Tensor
    low: Tensor
    values: Tensor
    indices: Tensor
    shift: Tensor
    powers: Tensor
    total: Tensor
    sinks: Tensor | None
    distance: Tensor

    @classmethod
    def of(cls, logits: Tensor, allowed: Tensor | None, sinks: Tensor | None, most: int | None) -> Shared | None:
        """Look through a block once.

        Args:
            logits: (batch, head, query, key).
            allowed: the same, or None if all are.
            sinks: (head,), or None.
            most: how many of the largest logits are wanted; None if there is no selection that needs this.

        Returns:
            None where it isn't wanted, or where a logit is infinite or NaN.
        """
        keys = logits.shape[-1]
        if most is None or logits.numel() == 0:
            return None
        few = min(max(most + 1, SUBSET_KEYS), keys)
        low, values, indices = extremes_and_leading(logits, allowed, few)
        high = values[..., :1]
        number = torch.full_like(low, keys) if allowed is None else allowed.sum(-1).to(low.dtype)
        some = number > 0
        if not bool((torch.isfinite(low) & torch.isfinite(high[..., 0]) | ~some).all()):
            return None
        shift = high if sinks is None else torch.maximum(high, sinks.to(logits.dtype)[None, :, None, None])
        below = logits - shift if allowed is None else (logits - shift).masked_fill_(~allowed, NEGLIGIBLE)
        below.clamp_(min=NEGLIGIBLE)  # (batch, head, query, key)
        powers = below.exp()
        total = powers.sum(-1)
        if not bool((torch.isfinite(total) | ~some).all()):
            return None  # a NaN, which the search for extremes may have passed over
        distance = -torch.linalg.vecdot(powers, below)
        behind = None
        if sinks is not None:
            behind = sinks.to(logits.dtype)[None, :, None] - shift[..., 0]
            total = total + behind.exp()
            distance = distance - behind.exp() * behind
        return cls(logits, allowed, number, low, values, indices, shift, powers, total, behind, distance)

    def full(self, view: Outcome, counted: Tensor, reach: Tensor) -> dict[str, Tensor]:
        """Statistics of full attention.

        Args:
            view: where the sums over queries go.
            counted: (batch, 1, query), which queries take part in them.
            reach: (batch, head, key) or what broadcasts to it, how many of these may attend to each key.

        Returns:
            A tensor for each name in `PER_QUERY`.
        """
        end = self.logits.shape[-1]
        view.counts[..., :end] += reach
        some = self.number > 0
        factor = torch.where(counted & some, 1 / self.total, 0.0)
        view.mass[..., :end] += (factor[..., None, :] @ self.powers)[..., 0, :]
        zero = torch.zeros_like(self.total)
        first = (self.values[..., :SUBSET_KEYS] - self.shift).exp_() / self.total[..., None]
        high = self.values[..., 0]
        return self._named(
            some,
            spread=high.double() - self.low.double(),
            gap=torch.full_like(zero, torch.nan),
            kept=self.number,
            probabilities=first,
            entropy=self.total.log() + self.distance / self.total,
            low=self.low,
            tail=zero,
        )

    def topk(self, k: int, selection: Selection, view: Outcome, counted: Tensor) -> dict[str, Tensor]:
        """Statistics of the k largest logits.

        Args:
            k: how many.
            selection: the rule, for rows in which ties must be told apart.
            view: where the sums over queries go.
            counted: (batch, 1, query), which queries take part in them.

        Returns:
            A tensor for each name in `PER_QUERY`.
        """
        some = self.number > 0
        number = self.number.clamp(max=k)  # (batch, head, query), keys kept
        places = min(k, self.values.shape[-1])
        values, indices = self.values[..., :places], self.indices[..., :places]
        last = (number.long() - 1).clamp(min=0)[..., None]
        low = values.gather(-1, last)[..., 0]
        gap = torch.full_like(low, torch.nan, dtype=torch.float64)
        if places < self.values.shape[-1]:
            after = self.values[..., places]
            more = self.number > k
            gap = torch.where(more, low.double() - after.double(), torch.nan)
            tied = more & (low == after)
            if bool(tied.any()):
                indices = self._untied(selection, indices, tied)
        kept = torch.arange(places, device=values.device) < number[..., None]
        below = (values - self.shift).masked_fill_(~kept, NEGLIGIBLE).clamp_(min=NEGLIGIBLE)
        powers = below.exp()
        total, distance = powers.sum(-1), -torch.linalg.vecdot(powers, below)
        if self.sinks is not None:
            total = total + self.sinks.exp()
            distance = distance - self.sinks.exp() * self.sinks
        probabilities = powers / total[..., None]
        taking = kept & counted[..., None]
        flat = indices.flatten(2)
        view.counts.scatter_add_(-1, flat, taking.double().flatten(2))
        view.mass.scatter_add_(-1, flat, (probabilities * taking).double().flatten(2))
        tail = torch.zeros_like(low)
        left = number < self.number
        if bool(left.any()):
            outside = self.powers.scatter(-1, indices, torch.zeros_like(powers))
            tail = torch.where(left, outside.sum(-1), 0.0)
        return self._named(
            some,
            spread=values[..., 0].double() - low.double(),
            gap=gap,
            kept=number,
            probabilities=probabilities,
            entropy=total.log() + distance / total,
            low=low,
            tail=tail / self.total,
        )

    def _untied(self, selection: Selection, indices: Tensor, tied: Tensor) -> Tensor:
        # Which keys are kept where the last kept logit equals the first one left out: the selection decides.
        logits = self.logits[tied][None, None]
        allowed = torch.ones_like(logits, dtype=torch.bool) if self.allowed is None else self.allowed[tied][None, None]
        chosen = selection.keep(logits, allowed)[0, 0].nonzero()[:, 1].reshape(-1, indices.shape[-1])
        indices = indices.clone()
        # The order of the probabilities: by falling logit, so that each goes with its own key.
        order = logits[0, 0].gather(-1, chosen).argsort(dim=-1, descending=True, stable=True)
        indices[tied] = chosen.gather(-1, order)
        return indices

    def _named(
        self,
        some: Tensor,
        *,
        spread: Tensor,
        gap: Tensor,
        kept: Tensor,
        probabilities: Tensor,
        entropy: Tensor,
        low: Tensor,
        tail: Tensor,
    ) -> dict[str, Tensor]:
        high, top = self.values[..., 0], probabilities[..., 0]
        values = {
            "dispersion": spread,
            "separation": gap,
            "kept": kept,
            "largest_probability": top,
            "entropy": entropy.clamp_min(0.0),
            "max_logit": high,
            "max_abs_logit": torch.maximum(high.abs(), low.abs()),
            "tail_mass": tail,
            "tail_mass_bound": tail_mass_bound(gap, kept, self.number),
            "jacobian_1_norm": 2 * top * (1 - top),
            "jacobian_inf_1_norm": 4 * subset_variance(probabilities[..., :SUBSET_KEYS]),
        }
        if self.allowed is None:
            return values
        return {name: torch.where(some, value, torch.nan) for name, value in values.items()}
