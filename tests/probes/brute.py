"""The quantities by a plain loop over queries and keys, in Python floats."""

from __future__ import annotations

import itertools
import math

NAN = math.nan


def spread_and_gap(logits, kept, allowed):
    """Dispersion and separation alone."""
    inside = [z for z, k in zip(logits, kept, strict=True) if k]
    left = [z for z, k, a in zip(logits, kept, allowed, strict=True) if a and not k]
    return {"dispersion": max(inside) - min(inside), "separation": min(inside) - max(left) if left else NAN}


def of_query(logits, kept, allowed, sink=None):
    """All per-query statistics of one row: lists of numbers and of booleans."""
    inside = [z for z, k in zip(logits, kept, strict=True) if k]
    left = [z for z, k, a in zip(logits, kept, allowed, strict=True) if a and not k]
    everything = inside + left
    if not inside:
        return None
    if any(math.isnan(z) for z in everything):
        return "nan"
    extra = [] if sink is None else [sink]
    top = max(everything + extra)
    powers = [math.exp(z - top) for z in inside]
    sink_power = math.exp(sink - top) if extra else 0.0
    total = math.fsum(powers) + sink_power
    p = [x / total for x in powers]
    everywhere = total + math.fsum(math.exp(z - top) for z in left)
    gap = min(inside) - max(left) if left else NAN
    entropy = -math.fsum(x * math.log(x) for x in p + ([sink_power / total] if extra else []) if x > 0)
    subsets = (sum(s) for n in range(len(p) + 1) for s in itertools.combinations(p, n))
    n, k = len(everything), len(inside)
    return {
        "dispersion": max(inside) - min(inside) if k > 1 else 0.0,
        "separation": gap,
        "kept": k,
        "largest_probability": max(p),
        "entropy": entropy,
        "max_logit": max(inside),
        "max_abs_logit": max(abs(z) for z in inside),
        "tail_mass": math.fsum(math.exp(z - top) for z in left) / everywhere,
        "tail_mass_bound": 1 / (1 + k / (n - k) * math.exp(min(gap, 700))) if left else 0.0,
        "jacobian_1_norm": max(2 * x * (1 - x) for x in p),
        "jacobian_inf_1_norm": max(4 * s * (1 - s) for s in subsets),
    }


def largest(logits, allowed, k):
    """Top-k by sorting: the lowest index first among equals."""
    order = sorted((j for j, a in enumerate(allowed) if a), key=lambda j: (-logits[j], j))
    return [j in order[:k] for j in range(len(logits))]


def sink_ratios(kept, counted):
    """Queries that keep each key, over the mean number kept."""
    rows = [row for row, c in zip(kept, counted, strict=True) if c and any(row)]
    mean = sum(map(sum, rows)) / len(rows)
    return [sum(row[j] for row in rows) / mean for j in range(len(kept[0]))]
