"""Which module is running: a stack of the modules that the forward pass is inside of, and their arguments."""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

PADDED_IF_TRUE = ("key_padding_mask", "src_key_padding_mask", "tgt_key_padding_mask", "memory_key_padding_mask")
REAL_IF_TRUE = ("attention_mask", "decoder_attention_mask")
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
WINDOW_LIMIT = -50.0
FROM_ELSEWHERE = ("key_value_states", "encoder_hidden_states", "context", "memory")


@dataclass(frozen=True, eq=False)
class Frame:
    """One running module.

    Args:
        name: its path in the model.
        module: the module.
        arguments: what its forward method was called with, by parameter name.
    """

    name: str
    module: nn.Module
    arguments: dict[str, Any]


@functools.cache
def _parameters(kind: Any) -> tuple[str, ...]:
    try:
        parameters = list(inspect.signature(kind.forward).parameters.values())[1:]
    except (AttributeError, ValueError):  # a traced or scripted module has no signature in Python
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


class Frames:
    """The stack of running modules of one model, kept by forward hooks that `close` removes.

    Args:
        model: the model.
        ignore: says when to look away (another thread, a backward pass).
        left: called with each frame that a module leaves.
        entered: called when a module begins.
    """

    def __init__(
        self,
        model: nn.Module,
        ignore: Callable[[], bool],
        left: Callable[[Frame], None],
        entered: Callable[[], None] = lambda: None,
    ) -> None:
        self.names = {id(module): name for name, module in model.named_modules()}
        self.stack: list[Frame] = []
        self._calls: Counter[str] = Counter()
        self._ignore = ignore
        self._left = left
        self._entered = entered
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def attach(self, root: nn.Module, skip: Callable[[nn.Module], bool] = lambda _: False) -> None:
        """Put hooks on a module and all below it.

        Args:
            root: where to begin.
            skip: modules to leave alone, with all below them.
        """
        if skip(root):
            return
        self._handles.append(root.register_forward_pre_hook(self._enter, with_kwargs=True, prepend=True))
        self._handles.append(root.register_forward_hook(self._leave, always_call=True))
        for child in root.children():
            self.attach(child, skip)

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._ignore():
            return
        if not self.stack:
            self._calls.clear()
        names = _parameters(type(module))  # type: ignore[arg-type]
        arguments = dict(zip(names, args, strict=False)) | kwargs
        self.stack.append(Frame(self.names.get(id(module), type(module).__name__), module, arguments))
        self._entered()

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._ignore():
            return
        # An exception may have left frames of inner modules behind; leave them all.
        while self.stack and any(frame.module is module for frame in self.stack):
            frame = self.stack.pop()
            self._left(frame)
            if frame.module is module:
                return

    def owns(self, module: nn.Module) -> bool:
        """Whether a module belongs to the model.

        Args:
            module: any module.

        Returns:
            True for the model and everything below it.
        """
        return id(module) in self.names

    @contextlib.contextmanager
    def inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
        """Treat a module that has no hooks as running, with hooks on everything below it.

        Args:
            module: the module.
            args: what it was called with.
            kwargs: the named arguments.

        Yields:
            Nothing.
        """
        before = len(self._handles)
        self._enter(module, args, kwargs)
        for child in module.children():
            self.attach(child)
        try:
            yield
        finally:
            for handle in self._handles[before:]:
                handle.remove()
            del self._handles[before:]
            self._leave(module, args, None)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def place(self, module: nn.Module | None) -> tuple[str, int | None]:
        """Name an attention call.

        Args:
            module: the module that attends; the innermost running one where None.

        Returns:
            The module's path, with `#n` for its n-th further call in this forward pass, and its layer index if it has
            one.
        """
        if module is None and self.stack:
            module = self.stack[-1].module
        name = "" if module is None else self.names.get(id(module), type(module).__name__)
        again = self._calls[name]
        self._calls[name] += 1
        index = getattr(module, "layer_idx", None)
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        if isinstance(index, int):
            layer: int | None = index
        else:
            layer = int(number[1]) if number else None
        if again:
            return f"{name}#{again}", again if layer is None or layer == 0 else layer
        return name, layer

    def heads(self, folded: int) -> int:
        """The number of heads where batch and heads share one dimension, from the attributes of the running modules.

        Args:
            folded: size of the shared dimension.

        Returns:
            The number that a module states, if it and the module's inputs fit together; else 1.
        """
        for frame in reversed(self.stack):
            sizes = {
                size for value in frame.arguments.values() if isinstance(value, Tensor) for size in value.shape[:2]
            }
            for name in HEADS:
                number = getattr(frame.module, name, None)
                if isinstance(number, int) and number > 1 and folded % number == 0 and folded // number in sizes:
                    return number
        return 1

    def unreadable(self, scores: Tensor) -> str | None:
        """Check that written-out scores are laid out as (batch, head, query, key).

        Args:
            scores: what entered a softmax over the last dimension.

        Returns:
            Why they can't be read; None if they can.
        """
        if scores.ndim != 4:
            return f"its scores have {scores.ndim} dimensions, {tuple(scores.shape)}"
        for frame in reversed(self.stack):
            heads = next((n for name in HEADS if isinstance(n := getattr(frame.module, name, None), int)), None)
            hidden = next((v for v in frame.arguments.values() if isinstance(v, Tensor) and v.ndim == 3), None)
            if heads is None or hidden is None:
                continue
            if scores.shape[1] != heads:
                shape = tuple(scores.shape)
                return f"its scores {shape} do not have its {heads} heads in the second dimension"
            _, length, width = hidden.shape
            _, _, queries, keys = scores.shape
            if queries == keys and queries * heads == width and queries != length:
                return "its softmax goes over channels, not over keys"
            break
        return None

    def kind(self, module: nn.Module | None, length: int) -> bool:
        """Whether the running attention looks at another sequence.

        Args:
            module: the module that attends, if known.
            length: number of queries.

        Returns:
            True for cross-attention.
        """
        for frame in reversed(self.stack):
            if module is not None and frame.module is not module:
                continue
            given = frame.arguments
            if isinstance(frame.module, nn.MultiheadAttention):
                return given.get("key") is not given.get("query")
            return any(isinstance(given.get(name), Tensor) for name in FROM_ELSEWHERE)
        return False

    def window_mask(self, batch: int) -> Tensor | None:
        """Find the mask of shifted windows (Swin), which such models fold into their position bias as -100.

        Args:
            batch: batch size of the attention call, images times windows.

        Returns:
            (batch, 1, query, key), True where allowed; None if the running attention was given no such mask.
        """
        mask = self.stack[-1].arguments.get("attention_mask") if self.stack else None
        if not isinstance(mask, Tensor) or mask.ndim != 3 or not mask.is_floating_point() or batch % len(mask):
            return None
        return (mask > WINDOW_LIMIT).repeat(batch // len(mask), 1, 1)[:, None]

    def real_queries(self, batch: int, queries: int, keys: int, cross: bool) -> Tensor | None:
        """Find the padding mask that the model was given for the sequence of the queries.

        Args:
            batch: batch size of the attention call.
            queries: number of queries.
            keys: number of keys.
            cross: whether the keys are another sequence's.

        Returns:
            (batch, query), True where the query is real; None if no such mask was given.
        """
        inside_decoder = False
        for frame in reversed(self.stack):
            given = frame.arguments
            decoder = any(isinstance(given.get(name), Tensor) for name in ("encoder_hidden_states", "memory"))
            if inside_decoder and not decoder:
                return None  # the masks further out belong to the encoder's sequence
            inside_decoder |= decoder
            for name in (*PADDED_IF_TRUE, *REAL_IF_TRUE):
                mask = given.get(name)
                if not isinstance(mask, Tensor) or mask.ndim != 2 or mask.shape[0] != batch:
                    continue
                if name == "memory_key_padding_mask" or (name == "key_padding_mask" and cross):
                    continue
                if decoder and name == "src_key_padding_mask":
                    continue
                fits = mask.shape[1] == queries or (not cross and mask.shape[1] == keys and keys > queries)
                if not fits:
                    continue
                if name in PADDED_IF_TRUE:
                    return ~mask[:, -queries:] if mask.dtype == torch.bool else mask[:, -queries:] == 0
                return mask[:, -queries:] != 0
            # The masks further out belong to the text beside an image or a sound.
            if any(isinstance(given.get(name), Tensor) for name in ("pixel_values", "input_features")):
                return None
        return None
