"""The function mode: sees every torch function that runs in this thread, and claims those that are attention."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from probes.attend import attend
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

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
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
        if name in SOFTMAXES:
            return self._softmax(func, args, kwargs)
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

    def _softmax(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        scores = args[0] if args else kwargs["input"]
        result = func(*args, **kwargs)
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        if isinstance(result, Tensor) and result.ndim >= 3 and dim in (-1, result.ndim - 1):
            track = self.tracer.softmax(scores, result)
            track.heads = track.heads or self.heads
        return result


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
        "implementation": "sdpa",
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
