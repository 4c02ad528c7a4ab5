"""torch.nn's inference fast path: layers that compute everything in one kernel and show nothing of their attention.

A hook or a function mode would switch it off, and with it change the outputs in the last bits (and at padded positions
entirely). So such a module first runs as it would unwatched, for its output; then once more, without gradients and in
the open, for its attention. In training, or where gradients are wanted, there is no fast path and it runs only once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack

from probes.capture.audit import without_modes
from probes.capture.library import listeners

FUSED = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)

_lock = threading.Lock()
_wrapped: dict[int, tuple[nn.Module, Any, int]] = {}
_ABSENT = object()


def is_fused(module: nn.Module) -> bool:
    """Whether a module may take the fast path.

    Args:
        module: any module.

    Returns:
        True for torch's own encoder, encoder layer and attention, and what derives from them.
    """
    return isinstance(module, FUSED)


def wrap(module: nn.Module) -> None:
    """Make a module run in the open whenever this thread captures it; counted.

    Args:
        module: one for which `is_fused` holds.
    """
    with _lock:
        _, before, users = _wrapped.get(id(module), (module, module.__dict__.get("forward", _ABSENT), 0))
        if users == 0:
            original = module.forward
            module.forward = lambda *args, **kwargs: _forward(module, original, args, kwargs)
        _wrapped[id(module)] = (module, before, users + 1)


def unwrap(module: nn.Module) -> None:
    """Undo one `wrap`.

    Args:
        module: the module.
    """
    with _lock:
        _, before, users = _wrapped[id(module)]
        if users > 1:
            _wrapped[id(module)] = (module, before, users - 1)
            return
        del _wrapped[id(module)]
        if before is _ABSENT:
            del module.forward
        else:
            module.forward = before


def _forward(module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    captures = [capture for capture in listeners() if capture.frames.owns(module)]
    # Inside another module of this kind that is being captured, hooks are on and nothing is fused any more.
    if not captures or any(frame.module is module for frame in captures[-1].frames.stack):
        return original(*args, **kwargs)
    fast = _may_be_fast(module, captures)
    if fast:
        with torch._C.DisableTorchFunction(), without_modes():
            result = original(*args, **kwargs)
    with ExitStack() as stack:
        if fast:
            stack.enter_context(torch.no_grad())
        for capture in captures:
            stack.enter_context(capture.frames.inside(module, args, kwargs))
        shown = original(*args, **kwargs)
    return result if fast else shown


def _may_be_fast(module: nn.Module, captures: list[Any]) -> bool:
    if module.training or not torch.backends.mha.get_fastpath_enabled():
        return False
    if torch.is_grad_enabled() and any(parameter.requires_grad for parameter in module.parameters()):
        return False
    ours = {id(capture._watching) for capture in captures}
    # A mode of somebody else's would have switched the fast path off without us.
    return all(id(mode) in ours for mode in _get_current_function_mode_stack())  # type: ignore[no-untyped-call]
