"""Hand-written attention: follow scores from the product of queries and keys to the softmax, and on to the values.

The watched operations are few. A product of two activations starts a track; scaling, masks, biases and changes of
shape carry it on; a softmax over the last dimension turns it into weights; a product that sums the weights over the
keys completes the call. Masks are taken from the masking operation itself, so that a very negative logit is never
mistaken for a mask.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from probes.attention import MASK_LIMIT

PRODUCTS = {"matmul", "bmm", "__matmul__", "__rmatmul__", "baddbmm", "einsum"}
SHAPES = {
    "view", "reshape", "transpose", "permute", "swapaxes", "squeeze", "unsqueeze", "flatten", "unflatten",
    "movedim", "expand", "__getitem__",
}  # fmt: skip
POINTWISE = {
    "mul", "mul_", "__mul__", "__rmul__", "__imul__", "div", "div_", "__truediv__", "__itruediv__", "true_divide",
    "tanh", "tanh_", "float", "to", "type", "type_as", "half", "bfloat16", "double", "contiguous", "clone", "detach",
    "dropout", "dropout_", "alpha_dropout", "nan_to_num", "clamp", "clip", "max", "maximum", "gather",
}  # fmt: skip
SUMS = {"add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__isub__"}
FILLS = {"masked_fill", "masked_fill_"}
SOFTMAXES = {"softmax", "_softmax", "softmax_"}


@dataclass
class Track:
    """What is known about a tensor of scores or weights.

    Args:
        tensor: the tensor, weakly.
        forbidden: masked positions, broadcastable to the tensor; None if none are masked.
        heads: the number of heads where batch and heads share one dimension and it is known.
        sinks: (batch, head, query, number), trailing logits that belong to no key; None if there are none.
        scores: the logits, once the softmax has made weights of them; None before.
        gate: the product was one with parameters, as a router's is.
        token: what the softmax is remembered by until its weights meet values.
    """

    tensor: weakref.ref[Tensor]
    forbidden: Tensor | None = None
    heads: int | None = None
    sinks: Tensor | None = None
    scores: Tensor | None = None
    gate: bool = False
    token: object = None


class Tracer:
    """Follows scores and weights through the operations of a forward pass.

    Args:
        complete: called with the finished track of weights and the number of heads once weights meet values.
    """

    def __init__(self, complete: Callable[[Track], None]) -> None:
        self._tracks: dict[int, Track] = {}
        self._folded: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._complete = complete

    def clear(self) -> None:
        """Forget everything, between forward passes."""
        self._tracks.clear()
        self._folded.clear()

    def of(self, tensor: Any) -> Track | None:
        """The track of a tensor.

        Args:
            tensor: anything.

        Returns:
            What is known, or None.
        """
        track = self._tracks.get(id(tensor))
        return track if track is not None and track.tensor() is tensor else None

    def _keep(self, result: Tensor, track: Track) -> None:
        key = id(result)
        track.tensor = weakref.ref(result, lambda _: self._tracks.pop(key, None))
        self._tracks[key] = track

    def before(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Look at an operation before it runs: weights that meet values complete a call.

        Args:
            name: the operation.
            args: its arguments.
            kwargs: its named arguments.
        """
        if name not in PRODUCTS:
            return
        operands = args[1] if name == "einsum" and isinstance(args[1], (list, tuple)) else args
        for operand in operands:
            track = self.of(operand)
            if track is not None and track.scores is not None:
                self._tracks.pop(id(operand), None)
                self._complete(track)

    def after(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> None:
        """Look at an operation after it ran, and carry the tracks of its inputs over to its result.

        Args:
            name: the operation.
            args: its arguments.
            kwargs: its named arguments.
            result: what it returned.
        """
        if not isinstance(result, Tensor):
            return
        if name in PRODUCTS or name == "linear":
            if result.ndim >= 3:
                gate = name == "linear" or not _is_score(name, (*args, *kwargs.values()))
                self._keep(result, Track(weakref.ref(result), heads=self._heads_of(args), gate=gate))
            return
        self._follow_fold(name, args, result)
        given = args[0] if name in ("cat", "concat") and args and isinstance(args[0], (list, tuple)) else args
        tracked = [a for a in (*given, *kwargs.values()) if self.of(a) is not None]
        # Scores come before what a linear map made: a bias may be either's sum.
        source: Any = next((a for a in tracked if not self._tracks[id(a)].gate), tracked[0] if tracked else None)
        track = self.of(source)
        carried = None if track is None else self._carry(name, args, kwargs, result, source, track)
        if carried is not None:
            self._keep(result, carried)

    def _carry(
        self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Tensor, source: Tensor, track: Track
    ) -> Track | None:
        new = dataclasses.replace(track, tensor=weakref.ref(result))
        if name in SOFTMAXES:
            return None  # the caller deals with it: it needs the scores
        if name in POINTWISE:
            return new if result.shape == source.shape else None
        if name in SUMS:
            other = args[1] if args[0] is source else args[0]
            sign = -1.0 if "sub" in name else 1.0
            foreign = isinstance(other, Tensor) and self.of(other) is None
            if foreign and not track.gate and other.shape[-1:] == result.shape[-1:]:
                self._forbid(new, sign * other <= MASK_LIMIT, result)
            return new
        if name in FILLS:
            mask: Tensor = args[1] if len(args) > 1 else kwargs["mask"]
            value: Any = args[2] if len(args) > 2 else kwargs["value"]
            if float(value) <= MASK_LIMIT:
                self._forbid(new, mask.bool(), result)
            return new
        if name == "where":
            condition = args[0]
            yes = args[1] if len(args) > 1 else kwargs.get("input")
            no = args[2] if len(args) > 2 else kwargs.get("other")
            fill: Any = no if yes is source else yes
            low = fill <= MASK_LIMIT if isinstance(fill, Tensor) else torch.tensor(float(fill) <= MASK_LIMIT)
            self._forbid(new, (~condition if yes is source else condition) & low.to(result.device), result)
            return new
        if name in ("cat", "concat"):
            if result.ndim != 4 or result.shape[:-1] != source.shape[:-1] or args[0][0] is not source:
                return None
            new.sinks = result[..., source.shape[-1] :].detach()
            return new
        if name in SHAPES:
            if new.forbidden is not None and new.scores is None:
                function = getattr(Tensor, name)
                rest = args[1:]
                new.forbidden = function(new.forbidden.expand(source.shape), *rest, **kwargs)
            if name in ("view", "reshape") and source.ndim == 4 and result.ndim == 3:
                new.heads = source.shape[1]
            return new
        return None

    @staticmethod
    def _forbid(track: Track, mask: Tensor, result: Tensor) -> None:
        del result
        track.forbidden = mask if track.forbidden is None else track.forbidden | mask

    def softmax(self, scores: Tensor, result: Tensor) -> Track:
        """Turn scores into weights.

        Args:
            scores: what entered the softmax.
            result: what left it.

        Returns:
            The track of the weights.
        """
        known = self.of(scores)
        if known is None or known.gate:
            lowest = torch.finfo(scores.dtype).min / 2
            track = Track(weakref.ref(result), scores.detach() <= lowest)
        else:
            track = Track(weakref.ref(result), known.forbidden, known.heads, known.sinks)
        track.scores = scores
        self._keep(result, track)
        return track

    def _follow_fold(self, name: str, args: tuple[Any, ...], result: Tensor) -> None:
        # (batch, head, length, dim) becomes (batch * head, length, dim): remember the heads.
        source = args[0] if args else None
        if not isinstance(source, Tensor):
            return
        if name in ("view", "reshape", "flatten") and source.ndim == 4 and result.ndim == 3:
            if source.shape[0] * source.shape[1] == result.shape[0]:
                self._folded[id(result)] = (weakref.ref(result), source.shape[1])
            return
        known = self._folded.get(id(source))
        if known is not None and known[0]() is source and result.ndim == 3 and result.shape[0] == source.shape[0]:
            self._folded[id(result)] = (weakref.ref(result), known[1])

    def _heads_of(self, args: tuple[Any, ...]) -> int | None:
        for operand in args:
            known = self._folded.get(id(operand))
            if known is not None and known[0]() is operand:
                return known[1]
        return None


def _is_score(name: str, args: tuple[Any, ...]) -> bool:
    # Queries times keys: both sides carry the batch, and neither is a parameter.
    if name == "einsum":
        equation = args[0]
        operands = args[1] if len(args) > 1 and isinstance(args[1], (list, tuple)) else args[1:]
        if not isinstance(equation, str) or len(operands) != 2:
            return False
        inputs, _, output = equation.replace(" ", "").partition("->")
        left, _, right = inputs.partition(",")
        shared = set(left) & set(right) & set(output)
        return bool(shared) and not any(isinstance(o, torch.nn.Parameter) for o in operands)
    operands = [a for a in args if isinstance(a, Tensor)][-2:]
    return len(operands) == 2 and all(o.ndim >= 3 and not isinstance(o, torch.nn.Parameter) for o in operands)
