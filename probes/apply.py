"""Run a model with another selection in place of its own.

The same capture that measures attention finds each call and chooses the kept keys; the layer's own operation then runs
with the other keys masked, so that scale, position bias, soft-cap, sink logits and dropout stay the model's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from probes.attend import attend
from probes.attention import AttentionCall
from probes.capture import Capture, library
from probes.capture.fastpath import is_fused
from probes.capture.frames import Frame
from probes.capture.trace import SOFTMAXES, Track
from probes.errors import MissedAttention
from probes.selection import Full, Observed, Selection, parse

BLOCK = 2**20
"""Logits looked at together while keys are chosen. The mask of kept keys itself is held for a whole call."""

_FUSED = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@contextlib.contextmanager
def apply(model: nn.Module, selection: Selection | str) -> Iterator[nn.Module]:
    """Let every softmax attention of a model keep only the keys that a selection chooses, while the context is open.

    With `full`, and wherever a layer's own selection is the one asked for, the model's own code runs untouched and its
    outputs are bit-identical. The model's weights and settings are not touched in any case. Not for
    gradient checkpointing, which runs a layer again after the context has closed.

    A ValueError says so (`probes.errors.MissedAttention`) if the model attends in a way that a selection can't be put
    into, or ran without any attention that could be read, or if the selection needs queries and keys and the model
    gives scores only.

    Args:
        model: any torch module.
        selection: which keys each query keeps, a selection or its short name.

    Yields:
        The model.
    """
    chosen = parse(selection)
    applied = _Applied(model, chosen)
    if isinstance(chosen, Full) and any(is_fused(module) for module in model.modules()):
        # Watching alone would keep torch's fused layers from running; they have no selection to replace.
        yield model
        return
    with applied:
        yield model


class _Applied(Capture):
    """Claims attention calls as any capture does, and changes the operation that follows each claim."""

    def __init__(self, model: nn.Module, selection: Selection) -> None:
        super().__init__(model, self._note)
        self.selection = selection
        self.claimed: AttentionCall | None = None
        self._library: dict[str, Any] | None = None
        self._answered: list[weakref.ref[Tensor]] = []
        self._count = 0
        self._ran = False
        self._mode = _Replacing(self)

    def __enter__(self) -> _Applied:
        with contextlib.ExitStack() as stack:
            # The mode entered first is the inner one: it runs what the capture has just claimed.
            stack.enter_context(self._mode)
            super().__enter__()
            stack.push(super().__exit__)
            self._all = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._all.close()
        if error[0] is None and self._ran and not self._count:
            raise MissedAttention(
                f"Expected a model with softmax attention to apply {self.selection} to, "
                f"but {type(self.model).__name__} ran without any that could be read."
            )

    def _note(self, call: AttentionCall) -> None:
        self.claimed = call
        self._count += 1

    def _left(self, frame: Frame) -> None:
        self._ran = True
        self._answered = [scores for scores in self._answered if scores() is not None]
        super()._left(frame)

    def library_call(
        self, implementation: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        fields = library.describe(args, kwargs)
        if fields is None or self._look_away():
            return function(*args, **kwargs)
        before, outer = self._count, self._library
        self._library = fields
        try:
            result = function(*args, **kwargs)
        finally:
            self._library = outer
        if self._count == before:
            raise MissedAttention(
                f"Expected attention that a selection can be put into, but the implementation {implementation!r} runs "
                "in one piece; load the model with attn_implementation='sdpa' or 'eager'."
            )
        return result

    def fused(self, fields: dict[str, Any]) -> None:
        if not self._look_away():
            self._claim(fields, self._library["module"] if self._library else None)

    def written_out(self, track: Track) -> None:
        if not self._look_away() and not any(scores() is track.scores for scores in self._answered):
            place, _ = self.frames.place(None)
            raise MissedAttention(
                f"Expected attention that a selection can be put into, but the softmax of {place} could not be traced "
                "back to queries and keys."
            )

    def claim_scores(self, scores: Tensor) -> AttentionCall | None:
        """Claim the call whose scores are about to enter a softmax.

        Args:
            scores: what enters the softmax.

        Returns:
            The call; None if the scores are not attention's.
        """
        known = self._watching.tracer.of(scores)
        if known is None or known.scores is not None or self._look_away():
            return None
        heads = known.heads or self._watching.heads
        super().written_out(Track(weakref.ref(scores), known.forbidden, heads, known.sinks, scores))
        self._answered.append(weakref.ref(scores))
        call, self.claimed = self.claimed, None
        if call is not None and self._library is not None:
            given = {name: self._library[name] for name in ("query", "key", "value", "scale")}
            call = dataclasses.replace(call, **given)
        return call

    def dropped(self, call: AttentionCall) -> Bool[Tensor, "batch head query key"] | None:
        """The allowed keys that the selection leaves out.

        Args:
            call: the call.

        Returns:
            True where a key is left out; None where the layer is to run as it is.
        """
        if isinstance(self.selection, Observed) or self.selection == (call.selection or Full()):
            return None
        batch, heads, queries, keys = call.shape
        rows = max(1, BLOCK // max(1, batch * heads * keys))
        out = torch.zeros(batch, heads, queries, keys, dtype=torch.bool, device=call.device)
        for start in range(0, queries, rows):
            index = slice(start, min(start + rows, queries))
            allowed = call.allowed(index)
            kept = self.selection.keep(call.logits(index), allowed, start=start, call=call)
            out[:, :, index] = allowed & ~kept
        return out


class _Replacing(TorchFunctionMode):
    """Runs each claimed operation with the left-out keys masked."""

    def __init__(self, applied: _Applied) -> None:
        super().__init__()
        self._applied = applied

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        applied = self._applied
        if func in (F.scaled_dot_product_attention, attend):
            call, applied.claimed = applied.claimed, None
            with torch.no_grad():
                dropped = None if call is None else applied.dropped(call)
            if dropped is None:
                return func(*args, **kwargs)
            return _attend(dropped, args, kwargs) if func is attend else _fused(dropped, args, kwargs)
        if getattr(func, "__name__", "") in SOFTMAXES:
            scores = args[0] if args else kwargs.get("input")
            dim = args[1] if len(args) > 1 else kwargs.get("dim")
            if isinstance(scores, Tensor) and scores.ndim >= 3 and dim in (-1, scores.ndim - 1):
                return func(_masked(applied, scores), *args[1:], **{k: v for k, v in kwargs.items() if k != "input"})
        return func(*args, **kwargs)


def _masked(applied: _Applied, scores: Tensor) -> Tensor:
    call = applied.claim_scores(scores)
    with torch.no_grad():
        dropped = None if call is None else applied.dropped(call)
    if dropped is None:
        return scores
    sinks = scores.shape[-1] - dropped.shape[-1]
    return scores.masked_fill(F.pad(dropped, (0, sinks)).reshape(scores.shape), -torch.inf)


def _fused(dropped: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    given = dict(zip(_FUSED, args, strict=False)) | kwargs
    mask = given.get("attn_mask")
    if given["query"].ndim == 3:
        dropped = dropped[:, 0]
    if mask is not None and mask.dtype != torch.bool:
        # Rows without an allowed key keep the weights that the model's own mask gives them.
        given["attn_mask"] = torch.where(dropped, -torch.inf, mask.to(given["query"].dtype))
    else:
        allowed = torch.ones_like(dropped) if mask is None else mask
        if given.get("is_causal"):
            allowed = allowed.tril()
        given["attn_mask"] = allowed & ~dropped
    return F.scaled_dot_product_attention(**given | {"is_causal": False})


def _attend(dropped: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    query, key, value = args[:3]
    allowed = kwargs.get("allowed")
    given: dict[str, Any] = kwargs | {"allowed": ~dropped if allowed is None else allowed & ~dropped}
    return attend(query, key, value, Full(), **given)
