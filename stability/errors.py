"""What a user can do wrong, in one sentence each."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake of the caller; its message is one sentence: what was expected, what came, what to do."""
