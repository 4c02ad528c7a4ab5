"""What can go wrong while probing, in one sentence each."""

from __future__ import annotations


class ProbeError(ValueError):
    """A probe can't do what was asked; its message is one sentence: what was expected, what came, what to do."""


class MissedAttention(ProbeError):
    """A layer that looks like softmax attention ran, and its logits could not be read."""
