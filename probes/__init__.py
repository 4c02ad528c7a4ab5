"""What the attention of a trained model does: dispersion, separation, sinks, per head, on any torch module."""

from __future__ import annotations

from typing import Any

from probes import plots, selection, statistics, weights
from probes.attend import attend
from probes.attention import AttentionCall
from probes.capture import capture
from probes.errors import MissedAttention, ProbeError
from probes.measure import Watch, measure, watch
from probes.monitor import Monitor
from probes.selection import Full, Selection, TopK, parse

__all__ = [  # and every selection that `probes.selection` has, such as `probes.Banded`
    "AttentionCall",
    "Full",
    "MissedAttention",
    "Monitor",
    "ProbeError",
    "Selection",
    "TopK",
    "Watch",
    "attend",
    "capture",
    "measure",
    "parse",
    "plots",
    "selection",
    "statistics",
    "watch",
    "weights",
]


def __getattr__(name: str) -> Any:
    if name in selection.__all__:
        return getattr(selection, name)
    raise AttributeError(f"module 'probes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *selection.__all__})
