"""Key selections: which keys each query keeps.

One concept serves training (`probes.attend`), probing (`probes.measure`) and theory (the selection's `kind` says which
theorem speaks of it). A selection never sees a mask value: allowed keys are a boolean of their own, and it chooses
among them only (mask first, select after). Rules by the logits are in `largest`, rules by position, and what a position
is beside padding, in `positions`; rules that need queries and keys are in `blocks`, `patterns`, `hashing` and
`clustering`; names in `registry`.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025, Section 3.
"""

from probes.selection.base import THEOREM, Kind, Selection
from probes.selection.blocks import LearnedGate, MoBA, NSALike, Quest
from probes.selection.clustering import Cluster, Sinkhorn
from probes.selection.compose import Intersection, Union, parse
from probes.selection.hashing import LSH, Zeta
from probes.selection.largest import (
    BottomK,
    Entmax,
    Full,
    Hardmax,
    Observed,
    RandomK,
    Sparsemax,
    Threshold,
    TopK,
    TopP,
)
from probes.selection.patterns import VerticalSlash
from probes.selection.positions import AShape, Banded, Block, Global, Sink, Streaming, Strided, Window
from probes.selection.registry import known, register, whole_number

__all__ = [
    "LSH",
    "THEOREM",
    "AShape",
    "Banded",
    "Block",
    "BottomK",
    "Cluster",
    "Entmax",
    "Full",
    "Global",
    "Hardmax",
    "Intersection",
    "Kind",
    "LearnedGate",
    "MoBA",
    "NSALike",
    "Observed",
    "Quest",
    "RandomK",
    "Selection",
    "Sink",
    "Sinkhorn",
    "Sparsemax",
    "Streaming",
    "Strided",
    "Threshold",
    "TopK",
    "TopP",
    "Union",
    "VerticalSlash",
    "Window",
    "Zeta",
    "known",
    "parse",
    "register",
    "whole_number",
]
