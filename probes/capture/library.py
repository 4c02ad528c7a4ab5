"""The attention interface of transformers (5.0 and later): one place through which most of its models attend.

`AttentionInterface.get_interface` hands each layer its attention function; while anything is being captured, it hands
out a wrapped one that announces the call before running it. Nothing else changes: no registration, no configuration.
In earlier versions the attribute is absent, and what the functions call inside is captured instead.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn


class Listener(Protocol):
    """Something that wants to know of attention calls."""

    def library_call(
        self, implementation: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a library's attention function, and note what it was called with.

        Args:
            implementation: its name.
            function: the function.
            args: its arguments.
            kwargs: its named arguments.

        Returns:
            What the function returns.
        """


_listening = threading.local()
_lock = threading.Lock()
_users = 0
_original: Callable[..., Any] | None = None


def listeners() -> list[Any]:
    """The captures that are active in this thread, outermost first.

    Returns:
        The list itself; captures append and remove themselves.
    """
    if not hasattr(_listening, "active"):
        _listening.active = []
    return _listening.active  # type: ignore[no-any-return]


def _interface() -> type[Any] | None:
    module = sys.modules.get("transformers.modeling_utils")
    interface: type[Any] | None = getattr(module, "AttentionInterface", None)
    return interface if hasattr(interface, "get_interface") else None


def patch() -> None:
    """Begin to wrap the attention functions; counted, so that captures may nest and run in several threads."""
    global _users, _original
    with _lock:
        _users += 1
        interface = _interface()
        if _original is not None or interface is None:
            return
        original: Callable[..., Any] = interface.get_interface
        _original = original

        @functools.wraps(original)
        def get_interface(self: Any, attn_implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            function: Callable[..., Any] = original(self, attn_implementation, default)
            for listener in reversed(listeners()):
                function = functools.partial(_announce, listener, attn_implementation or "eager", function)
            return function

        interface.get_interface = get_interface


def unpatch() -> None:
    """Stop wrapping once nobody captures any more."""
    global _users, _original
    with _lock:
        _users -= 1
        interface = _interface()
        if _users == 0 and _original is not None and interface is not None:
            interface.get_interface = _original
            _original = None


def _announce(listener: Listener, implementation: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return listener.library_call(implementation, function, args, kwargs)


def describe(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """Read the arguments of an attention function of the library.

    Args:
        args: module, query, key, value, attention_mask, as far as given by position.
        kwargs: the rest.

    Returns:
        Fields of an `AttentionCall`, with `module` beside them; None if the arguments are not as expected.
    """
    given = dict(zip(("module", "query", "key", "value", "attention_mask"), args, strict=False)) | kwargs
    module, query, key = given.get("module"), given.get("query"), given.get("key")
    if not isinstance(module, nn.Module) or not isinstance(query, Tensor) or not isinstance(key, Tensor):
        return None
    if query.ndim != 4 or key.ndim != 4:
        return None
    scale = given.get("scaling")
    fields: dict[str, Any] = {
        "module": module,
        "query": query,
        "key": key,
        "value": given.get("value"),
        "scale": query.shape[-1] ** -0.5 if scale is None else float(scale),
        "softcap": given.get("softcap"),
        "bias": given.get("position_bias"),
        "sinks": given.get("s_aux"),
    }
    if fields["sinks"] is None and isinstance(getattr(module, "sinks", None), Tensor):
        fields["sinks"] = module.sinks
    mask = given.get("attention_mask")
    if mask is not None and hasattr(mask, "mask_mod"):
        fields["mask_function"] = mask.mask_mod
    elif isinstance(mask, Tensor):
        fields["mask"] = mask
    return fields
