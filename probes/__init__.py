"""What the attention of a trained model does: dispersion, separation, sinks, per head, on any torch module."""

from __future__ import annotations

from typing import Any

from probes import plots, selection, selection_plots, statistics, weights
from probes.apply import apply
from probes.attend import attend
from probes.attention import AttentionCall
from probes.capture import capture
from probes.effect import effect
from probes.errors import MissedAttention, ProbeError
from probes.measure import Watch, measure, watch
from probes.monitor import Monitor
from probes.selection import Full, Selection, TopK, parse
from probes.what_if import what_if

__all__ = [  # and every selection that `probes.selection` has, such as `probes.Banded`
    "AttentionCall",
    "Full",
    "MissedAttention",
    "Monitor",
    "ProbeError",
    "Selection",
    "TopK",
    "Watch",
    "apply",
    "attend",
    "capture",
    "effect",
    "measure",
    "parse",
    "plots",
    "selection",
    "selection_plots",
    "statistics",
    "watch",
    "weights",
    "what_if",
]


def __getattr__(name: str) -> Any:
    if name in selection.__all__:
        return getattr(selection, name)
    raise AttributeError(f"module 'probes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *selection.__all__})
