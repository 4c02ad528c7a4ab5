"""Catch every attention call of a model while it runs, and change nothing.

How a call reaches us, in this order: the attention interface of transformers (`library`); torch's own fused attention
and this project's `attend` (`mode`); scores, softmax and values written out by hand (`trace`). Names come from a
stack of the running modules (`frames`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from probes.attention import AttentionCall
from probes.capture import library
from probes.capture.audit import Audit, Dispatched, Findings, looks_like_attention, without_modes
from probes.capture.fastpath import is_fused, unwrap, wrap
from probes.capture.frames import Frame, Frames
from probes.capture.mode import Watching, unwatched
from probes.capture.trace import Track
from probes.errors import MissedAttention


class Capture:
    """Hands each attention call of a model to a function while it is open as a context.

    Args:
        model: any torch module.
        receive: called with each attention call, in order.
        findings: where to note what could not be read; without it, what can't be read is an error at once.

    Raises:
        ValueError: if `model` is not a torch module.
    """

    def __init__(
        self, model: nn.Module, receive: Callable[[AttentionCall], None], findings: Findings | None = None
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"Expected `model` to be a torch.nn.Module, but got {type(model).__name__}.")
        self.model = model
        self.suspended = False
        self._receive = receive
        self._thread = 0
        self._inner: list[dict[str, Any]] | None = None
        self._exit = contextlib.ExitStack()
        self._audit = None if findings is None else Audit(findings)
        self._pending: dict[object, tuple[Frame | None, bool]] = {}
        self._attended: set[Frame | None] = set()

    def __enter__(self) -> Capture:
        self._thread = threading.get_ident()
        self.frames = Frames(self.model, self._look_away, self._left, self._entered)
        with contextlib.ExitStack() as stack:
            stack.callback(self.frames.close)
            self.frames.attach(self.model, skip=is_fused)
            for module in _outermost_fused(self.model):
                wrap(module)
                stack.callback(unwrap, module)
            self._watching = Watching(self)
            stack.enter_context(self._watching)
            if self._audit is not None:
                stack.enter_context(Dispatched(self._announced, lambda reason: self._missed(self._top(), reason)))
            library.patch()
            stack.callback(library.unpatch)
            library.listeners().append(self)
            stack.callback(library.listeners().remove, self)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()

    def _look_away(self) -> bool:
        # A backward pass runs modules again under gradient checkpointing; their attention was seen in the forward pass.
        return threading.get_ident() != self._thread or torch._C._current_graph_task_id() != -1

    def _entered(self) -> None:
        if self._audit is not None:
            self._audit.entered()

    def _left(self, frame: Frame) -> None:
        if self._audit is not None:
            self._audit.left(frame)
        if not self.frames.stack:
            self._watching.tracer.clear()
            for place, score in self._pending.values():
                # Beside a captured call it is the layer's own copy of the weights, made to be looked at.
                if score and place not in self._attended:
                    self._missed(place, "the weights of its softmax met no values in a way that can be followed")
            self._pending.clear()
            self._attended.clear()

    def _top(self) -> Frame | None:
        return self.frames.stack[-1] if self.frames.stack else None

    def _announced(self) -> bool:
        return self._watching.running > 0 or self.suspended or self._look_away()

    def _missed(self, frame: Frame | None, reason: str) -> None:
        if self._audit is not None:
            self._audit.missed(frame, reason)
            return
        name = frame.name if frame is not None else type(self.model).__name__
        raise MissedAttention(f"Expected attention whose logits can be read, but not those of {name}: {reason}.")

    def suspicious(self, reason: str, score: bool) -> None:
        """Note an operation that attention would consist of; see `mode.Claims`.

        Args:
            reason: what it was.
            score: whether it was applied to a product of activations.
        """
        if self._audit is None or self._look_away():
            return
        self._audit.suspect(reason)
        if score:
            self._audit.missed(self._top(), reason)

    def pending(self, score: bool) -> object:
        """Note a softmax whose weights have yet to meet values; see `mode.Claims`.

        Args:
            score: whether it was applied to a product of activations.

        Returns:
            Something to know it by.
        """
        token = object()
        if self._audit is not None and not self._look_away():
            self._audit.suspect("the weights of its softmax met no values in a way that can be followed")
            self._pending[token] = (self._top(), score)
        return token

    def attention_named(self) -> bool:
        """Whether a running module is named after attention; see `mode.Claims`.

        Returns:
            True if so.
        """
        return any(looks_like_attention(frame.module) for frame in self.frames.stack)

    def library_call(
        self, implementation: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a library's attention function and claim what it computes; see `library.Listener`.

        Args:
            implementation: its name.
            function: the function.
            args: its arguments.
            kwargs: its named arguments.

        Returns:
            What the function returns.
        """
        fields = library.describe(args, kwargs)
        if fields is None or self._look_away():
            return function(*args, **kwargs)
        outer, self.suspended, self._inner = self.suspended, True, []
        try:
            # Compiled kernels run as they do unwatched; inside the others, torch's attention tells what it was given.
            with contextlib.nullcontext() if implementation in ("eager", "sdpa") else unwatched():
                result = function(*args, **kwargs)
            inner = self._inner
        finally:
            self.suspended, self._inner = outer, None
        module = fields.pop("module")
        if len(inner) == 1:
            # What torch's attention was really given decides; the interface knows the shapes before heads are packed.
            fields |= {"causal": inner[0]["causal"], "scale": inner[0]["scale"], "softcap": None, "sinks": None}
            if inner[0]["query"].shape == fields["query"].shape:
                fields |= {"mask": inner[0]["mask"], "bias": None}
        self._claim(fields | {"implementation": implementation}, module)
        return result

    def fused(self, fields: dict[str, Any]) -> None:
        """Claim a call of torch's attention or of `attend`; see `mode.Claims`.

        Args:
            fields: fields of an `AttentionCall`.
        """
        if self._look_away():
            return
        if self._inner is not None:
            self._inner.append(fields)
        elif not self.suspended:
            self._claim(fields, None)

    def written_out(self, track: Track) -> None:
        """Claim a call whose softmax was written out; see `mode.Claims`.

        Args:
            track: the weights.
        """
        if self._look_away():
            return
        self._pending.pop(track.token, None)
        scores, forbidden = track.scores, track.forbidden
        assert scores is not None
        fields: dict[str, Any] = {"implementation": "softmax"}
        if track.sinks is not None:
            # The model may have shifted whole rows, which its softmax doesn't see; the sinks say by how much.
            columns = track.sinks.shape[-1]
            scores = scores[..., :-columns] + (track.sinks - scores[..., -columns:])[..., :1]
            fields["sinks"] = track.sinks[0, :, 0].logsumexp(-1)
            forbidden = None if forbidden is None else forbidden[..., : scores.shape[-1]]
        allowed = scores != -torch.inf
        if forbidden is not None:
            allowed = allowed & ~forbidden
        if scores.ndim == 3:
            heads = track.heads or self.frames.heads(scores.shape[0])
            folded = (-1, heads, *scores.shape[1:])
            scores, allowed = scores.reshape(folded), allowed.reshape(folded)
        if scores.ndim == 5:  # heads in groups that share a key
            scores, allowed = scores.flatten(1, 2), allowed.flatten(1, 2)
        reason = self.frames.unreadable(scores)
        if reason is not None:
            self._missed(self._top(), reason)
            return
        self._claim(fields | {"scores": scores, "mask": allowed}, None)

    def _claim(self, fields: dict[str, Any], module: nn.Module | None) -> None:
        fields = {name: value.detach() if isinstance(value, Tensor) else value for name, value in fields.items()}
        for name in ("query", "key", "value"):
            tensor = fields.get(name)
            if isinstance(tensor, Tensor) and tensor.ndim == 3:
                fields[name] = tensor[:, None]
        path, layer = self.frames.place(module)
        call = AttentionCall(path, layer, "self", **fields)
        batch, _, queries, keys = call.shape
        windows = self.frames.window_mask(batch)
        if windows is not None and windows.shape[-2:] == (queries, keys):
            additive = call.mask if call.mask is not None and call.mask.dtype != torch.bool else call.bias
            call = dataclasses.replace(call, mask=windows, bias=additive)
        cross = self.frames.kind(module, queries)
        real = self.frames.real_queries(batch, queries, keys, cross)
        call = dataclasses.replace(call, kind="cross" if cross else "self", queries=real)
        if self._audit is not None:
            self._audit.claimed()
            self._attended.add(self._top())
        # The statistics of a call use torch functions themselves: keep the modes out of them.
        with torch._C.DisableTorchFunction(), without_modes(), torch.no_grad():
            self._receive(call)


def _outermost_fused(module: nn.Module) -> Iterator[nn.Module]:
    # Modules that may take torch's inference fast path, and are not inside of another such.
    if is_fused(module):
        yield module
        return
    for child in module.children():
        yield from _outermost_fused(child)


@contextlib.contextmanager
def capture(model: nn.Module, *, on_missing: Literal["raise", "warn"] = "raise") -> Iterator[list[AttentionCall]]:
    """Collect the attention calls of a model, for small inputs: queries and keys of all layers are kept.

    Args:
        model: any torch module.
        on_missing: what to do at the end if a layer that looks like attention ran and could not be read.

    At the end a `MissedAttention`, a ValueError, is raised if something was missed and `on_missing` is `raise`.

    Yields:
        The calls, in the order in which they run; the list fills while the model does.
    """
    calls: list[AttentionCall] = []
    findings = Findings()
    check_on_missing(on_missing)

    def keep(call: AttentionCall) -> None:
        # A copy, because caches and in-place operations may overwrite what the call was given.
        fields: dict[str, Any] = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
        copies: dict[str, Any] = {n: v.clone() if isinstance(v, Tensor) else v for n, v in fields.items()}
        calls.append(AttentionCall(**copies))

    with Capture(model, keep, findings):
        yield calls
    findings.report(on_missing)


def check_on_missing(on_missing: str) -> None:
    """Check what a user gave for `on_missing`.

    Args:
        on_missing: what was given.

    Raises:
        ValueError: if it is neither `raise` nor `warn`.
    """
    if on_missing not in ("raise", "warn"):
        raise ValueError(f"Expected `on_missing` to be 'raise' or 'warn', but got {on_missing!r}.")
