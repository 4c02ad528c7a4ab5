"""What is evaluated at each point of a landscape: a loss of the model, or functions of its output over batches."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from stability.errors import UserError

ModelLoss = Callable[[nn.Module], Any]
OutputFunction = Callable[[Any, Any], Any]
Loss = ModelLoss | tuple[OutputFunction, Iterable[Any]]


def accuracy(output: Shaped[Tensor, "*sample classes"], target: Shaped[Tensor, "*sample"]) -> Tensor:
    """Share of the samples whose largest output is the target's class.

    Args:
        output: one value per class in the last dimension.
        target: class indices; negative ones (such as -100) are left out.

    Returns:
        A scalar between 0 and 1; NaN if no sample is left.
    """
    valid = target >= 0
    right = (output.argmax(-1) == target) & valid
    return right.to(torch.float64).sum() / valid.to(torch.float64).sum()


@dataclass(frozen=True)
class Objective:
    """Named functions to evaluate at a point, and the batches that they need.

    Attributes:
        functions: by column name; of the model if `batches` is None, else of (output, target).
        batches: what is fed to the model, in order; each pass reads all of it once.
        reduction: "mean" weighs each batch's value by its number of samples, "sum" adds the values.
    """

    functions: Mapping[str, Callable[..., Any]]
    batches: Sequence[Any] | Iterable[Any] | None = None
    reduction: str = "mean"
    names: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "names", tuple(self.functions))

    def feeds(self, device: torch.device) -> Iterator[tuple[tuple[Any, ...], dict[str, Any], Any, float]]:
        """Go once over the data.

        Args:
            device: where the model is.

        Yields:
            Positional arguments and keyword arguments of the model, the target, and the batch's weight.
        """
        for batch in self.batches or ():
            arguments, keywords, target = split_batch(to_device(batch, device))
            weight = float(samples(target)) if self.reduction == "mean" else 1.0
            yield arguments, keywords, target, weight

    def fingerprint(self) -> str:
        """Identify the functions' names and the data.

        Returns:
            A SHA-256 in hex. Data that a loss of the model holds inside itself are not seen here.
        """
        digest = hashlib.sha256(repr((self.names, self.reduction)).encode())
        for batch in self.batches or ():
            _update(digest, batch)
        return digest.hexdigest()


def make_objective(
    loss: Loss, functions: Mapping[str, Callable[..., Any]] | None = None, reduction: str = "mean"
) -> Objective:
    """Read what the user gave as a loss.

    Args:
        loss: `loss(model) -> scalar`, or a pair (loss_fn, batches) with `loss_fn(output, target) -> scalar`. A batch is
            (inputs, target) or a mapping whose "labels" are the target; inputs may be a tensor, a tuple or a mapping.
        functions: further functions by name, with the same arguments as the loss, evaluated in the same pass.
        reduction: "mean" (weighted by samples) or "sum" over batches.

    Returns:
        The objective; its first function is called "loss".

    Raises:
        UserError: if `loss` is neither form, there are no batches, a name is taken, or `reduction` is unknown.
    """
    if reduction not in ("mean", "sum"):
        raise UserError(f'Expected `reduction` to be "mean" or "sum", but got {reduction!r}.')
    reserved = {"loss", "x", "y", "distance", "relative_distance", "seconds", "gradient_norm"}
    if taken := reserved.intersection(functions or {}):
        raise UserError(
            f"Expected `functions` named unlike the surface's own columns, but got {', '.join(sorted(taken))}."
        )
    if callable(loss):
        return Objective({"loss": loss, **(functions or {})}, None, reduction)
    pair: Any = loss
    if not (isinstance(pair, tuple) and len(pair) == 2 and callable(pair[0]) and isinstance(pair[1], Iterable)):
        got = type(loss).__name__
        raise UserError(f"Expected `loss` to be a function of the model or a pair (loss_fn, batches), but got {got}.")
    batches = pair[1]
    # An iterator can be read once only, a landscape reads its data at every point.
    kept = list(batches) if isinstance(batches, Iterator) else batches
    if next(iter(kept), None) is None:
        raise UserError("Expected at least one batch beside the loss function, but got none.")
    return Objective({"loss": pair[0], **(functions or {})}, kept, reduction)


def split_batch(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Tell a batch's inputs from its target.

    Args:
        batch: (inputs, target), or a mapping of the model's keyword arguments with the target under "labels".

    Returns:
        Positional arguments, keyword arguments, target.

    Raises:
        UserError: if the batch has another form.
    """
    if isinstance(batch, Mapping) and "labels" in batch:
        return (), {name: value for name, value in batch.items() if name != "labels"}, batch["labels"]
    if isinstance(batch, tuple | list) and len(batch) == 2:
        inputs, target = batch
        if isinstance(inputs, Mapping):
            return (), dict(inputs), target
        return (tuple(inputs) if isinstance(inputs, tuple | list) else (inputs,)), {}, target
    raise UserError(
        f'Expected each batch to be (inputs, target) or a mapping with "labels", but got {type(batch).__name__}.'
    )


def samples(target: Any) -> int:
    """Count the samples of a batch by its target.

    Args:
        target: a tensor or sequence with one entry per sample, or a scalar.

    Returns:
        The size of the first dimension, 1 for a scalar.
    """
    if isinstance(target, Tensor):
        return int(target.shape[0]) if target.ndim else 1
    return len(target) if hasattr(target, "__len__") else 1


def to_device(value: Any, device: torch.device) -> Any:
    """Move every tensor in nested tuples, lists and mappings.

    Args:
        value: what to move.
        device: where to.

    Returns:
        The same structure with its tensors on `device`.
    """
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return {name: to_device(item, device) for name, item in value.items()}
    if isinstance(value, tuple | list):
        return tuple(to_device(item, device) for item in value)
    return value


def close_enough(first: float, second: float, tolerance: float = 1e-5) -> bool:
    """Whether two evaluations of one point agree up to rounding.

    Args:
        first: one value.
        second: the other.
        tolerance: relative.

    Returns:
        True also for two NaN or equal infinities.
    """
    both_nan = math.isnan(first) and math.isnan(second)
    return first == second or both_nan or abs(first - second) <= tolerance * max(abs(first), abs(second))


def hash_tensors(named: Iterable[tuple[str, Tensor]]) -> str:
    """Identify tensors by names, types, shapes and contents.

    Args:
        named: pairs of name and tensor.

    Returns:
        A SHA-256 in hex.
    """
    digest = hashlib.sha256()
    for name, tensor in named:
        digest.update(name.encode())
        _update(digest, tensor)
    return digest.hexdigest()


def _update(digest: Any, value: Any) -> None:
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        digest.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        digest.update(plain.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for name, item in value.items():
            digest.update(repr(name).encode())
            _update(digest, item)
    elif isinstance(value, tuple | list):
        for item in value:
            _update(digest, item)
    else:
        digest.update(repr(value).encode())
