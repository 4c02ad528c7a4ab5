"""The function mode: sees every torch function that runs in this thread, and claims those that are attention."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode_temporarily

from probes.attend import attend
from probes.capture.audit import SOFTMAX_LIKE, without_modes
from probes.capture.trace import SOFTMAXES, Tracer, Track
from probes.selection import Full


class Claims(Protocol):
    """Where claimed calls go."""

    suspended: bool

    def fused(self, fields: dict[str, Any]) -> None:
        """Claim a call that torch or `attend` computes in one function.

        Args:
            fields: fields of an `AttentionCall`.
        """

    def written_out(self, track: Track) -> None:
        """Claim a call whose softmax was written out.

        Args:
            track: the weights.
        """

    def suspicious(self, reason: str, score: bool) -> None:
        """Note an operation that attention would consist of.

        Args:
            reason: what it was.
            score: whether it was applied to a product of activations.
        """

    def pending(self, score: bool) -> object:
        """Note a softmax whose weights have yet to meet values.

        Args:
            score: whether it was applied to a product of activations.

        Returns:
            Something to know it by.
        """

    def attention_named(self) -> bool:
        """Whether the running module is named after attention.

        Returns:
            True if so.
        """


# multi_head_attention_forward hides what it calls from function modes. This copy of its code, in a namespace where
# the check that hides it always says no, does not; nothing in torch is patched.
_open_multi_head = types.FunctionType(
    F.multi_head_attention_forward.__code__,
    {**F.__dict__, "has_torch_function": lambda _: False},
    F.multi_head_attention_forward.__name__,
    F.multi_head_attention_forward.__defaults__,
)


class Watching(TorchFunctionMode):
    """Watches torch functions on behalf of a capture.

    Args:
        claims: the capture.
    """

    def __init__(self, claims: Claims) -> None:
        super().__init__()
        self._claims = claims
        self.tracer = Tracer(claims.written_out)
        self.heads: int | None = None
        self.running = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        self.running += 1
        try:
            return self._watched(func, args, kwargs or {})
        finally:
            self.running -= 1

    def _watched(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            self._claims.fused(_describe_fused(*args, **kwargs))
            return func(*args, **kwargs)
        if self._claims.suspended:
            return func(*args, **kwargs)
        if func is attend:
            self._claims.fused(_describe_attend(*args, **kwargs))
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            return self._multi_head(args, kwargs)
        name = getattr(func, "__name__", "")
        self.tracer.before(name, args, kwargs)
        if name in SOFTMAX_LIKE and args:
            track = self.tracer.of(args[0])
            scored = track is not None and not track.gate and track.scores is None
            if name not in SOFTMAXES:
                self._claims.suspicious(f"{name} by hand", scored)
            else:
                return self._softmax(func, args, kwargs, scored)
        result = func(*args, **kwargs)
        self.tracer.after(name, args, kwargs, result)
        return result

    def _multi_head(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        outer, self.heads = self.heads, args[4] if len(args) > 4 else kwargs["num_heads"]
        try:
            with self:
                return _open_multi_head(*args, **kwargs)
        finally:
            self.heads = outer

    def _softmax(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], scored: bool) -> Any:
        scores = args[0]
        result = func(*args, **kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if not isinstance(result, Tensor) or result.ndim < 3 or dim not in (-1, result.ndim - 1):
            self._claims.suspicious(f"softmax over dimension {dim} of {tuple(scores.shape)}", scored)
            return result
        known = self.tracer.of(scores)
        # The weights of a router come from a linear map, not from queries and keys.
        if known is not None and known.gate and not self._claims.attention_named():
            return result
        track = self.tracer.softmax(scores, result)
        track.token = self._claims.pending(scored)
        track.heads = track.heads or self.heads
        return result


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Take every watching mode off for a while.

    Yields:
        Nothing.
    """
    with contextlib.ExitStack() as stack:
        while (modes := _get_current_function_mode_stack()) and isinstance(modes[-1], Watching):  # type: ignore[no-untyped-call]
            stack.enter_context(_pop_mode_temporarily())
        stack.enter_context(without_modes())
        yield


def _describe_fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    return {
        "query": query,
        "key": key,
        "value": value,
        "mask": attn_mask,
        "causal": is_causal,
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "implementation": "fused",
    }


def _describe_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selection: Any,
    *,
    allowed: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> dict[str, Any]:
    return {
        "query": query,
        "key": key,
        "value": value,
        "mask": allowed,
        "scale": query.shape[-1] ** -0.5 if scale is None else scale,
        "selection": None if isinstance(selection, Full) else selection,
        "implementation": "attend",
    }
