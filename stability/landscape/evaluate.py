"""Evaluating an objective at displaced parameters, many points in one pass over the data.

The evaluator works on a private copy of the model, in evaluation mode, whose parameters are views of one vector: a
point is set by two vector operations, and the user's model is never touched. Where the model is small enough for the
overhead of single operations to matter, all points of a chunk go through `torch.func.functional_call` under `vmap`
instead; the number of operations of the first batch decides.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stability.errors import UserError
from stability.landscape.directions import Direction, Directions
from stability.landscape.objective import Objective, close_enough, hash_tensors

METHODS = ("in place", "vmap")
Point = tuple[float, float]
Values = dict[str, list[float]]

_ALIGNMENT = 64  # bytes; the matrix products are fastest, and repeatable, on aligned weights
_VMAP_BYTES = 2**30
_VMAP_OPERATIONS = 3e7  # a forward pass below this is mostly overhead; measured in benchmarks/results/landscape.md
_CHUNK_OPERATIONS = 1e11  # some seconds on two cores


@dataclass(frozen=True)
class Plan:
    """How points are evaluated; a resumed run keeps the plan it started with.

    Attributes:
        method: one of `METHODS`.
        chunk: points per pass over the data.
    """

    method: str
    chunk: int


class _Displaced:
    """The parameters of one type on one device, as views of a single vector theta + x dx + y dy."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], directions: Directions) -> None:
        first = next(iter(parameters.values()))
        step = max(1, _ALIGNMENT // first.element_size())
        starts, size = {}, 0
        for name, parameter in parameters.items():
            starts[name] = size
            size += -(-parameter.numel() // step) * step
        self.vector = torch.zeros(size, dtype=first.dtype, device=first.device)
        # Half-precision weights are displaced in single precision and rounded once.
        exact = torch.promote_types(first.dtype, torch.float32)
        self.directions = []
        for direction in directions.each():
            flat = torch.zeros(size, dtype=exact, device=first.device)
            for name in parameters:
                if name in direction:
                    part = direction[name].detach().reshape(-1)
                    flat[starts[name] : starts[name] + part.numel()] = part.to(flat)
            self.directions.append(flat)
        for name, parameter in parameters.items():
            view = self.vector[starts[name] : starts[name] + parameter.numel()].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
        self.origin = self.vector.to(exact, copy=True)
        self.views = {name: (starts[name], parameter.shape) for name, parameter in parameters.items()}

    def at(self, point: Point) -> Float[Tensor, " parameter"]:
        # At (0, 0) this is the original vector itself, bit for bit.
        moved = self.origin
        for coordinate, direction in zip(point, self.directions, strict=False):
            if coordinate:
                moved = torch.add(moved, direction, alpha=coordinate)
        return moved

    def set(self, point: Point) -> None:
        self.vector.copy_(self.at(point))

    def stacked(self, points: Sequence[Point]) -> dict[str, Float[Tensor, " point *shape"]]:
        whole = torch.stack([self.at(point) for point in points]).to(self.vector.dtype)
        return {
            name: whole[:, start : start + shape.numel()].view(-1, *shape)
            for name, (start, shape) in self.views.items()
        }


class Evaluator:
    r"""Values of an objective at :math:`\theta + x\,d_x + y\,d_y`.

    Args:
        model: any module; it is copied and stays as it is.
        objective: what to evaluate.
        directions: the slice; their names and shapes must be the model's.
        gradient_norm: also give the Euclidean norm of the loss's gradient with respect to all parameters.

    Raises:
        UserError: if the directions do not fit or the model cannot be copied.
    """

    def __init__(
        self, model: nn.Module, objective: Objective, directions: Directions, *, gradient_norm: bool = False
    ) -> None:
        directions.check(model)
        self.objective = objective
        self.gradient_norm = gradient_norm
        self.names = (*objective.names, "gradient_norm") if gradient_norm else objective.names
        self.model = private_copy(model)
        groups: dict[tuple[torch.dtype, torch.device], dict[str, nn.Parameter]] = {}
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(gradient_norm and parameter.is_floating_point())
            if parameter.is_floating_point():
                groups.setdefault((parameter.dtype, parameter.device), {})[name] = parameter
        if not groups:
            raise UserError("Expected a model with floating-point parameters, but it has none.")
        with torch.no_grad():
            self._groups = [_Displaced(group, directions) for group in groups.values()]
        self.device = next(iter(groups))[1]

    def plan(self, *, method: str = "auto", chunk: int | None = None, points: int = 1) -> Plan:
        """Choose how to evaluate, by the number of floating-point operations alone: every run chooses alike.

        Args:
            method: "auto", "in place" or "vmap".
            chunk: points per pass; by default some seconds' worth.
            points: how many there are to evaluate.

        Returns:
            The plan.

        Raises:
            UserError: if `method` or `chunk` is out of range, or "vmap" is asked for where it cannot work.
        """
        if method not in ("auto", *METHODS):
            raise UserError(f"Expected `method` to be auto, in place or vmap, but got {method!r}.")
        if chunk is not None and chunk < 1:
            raise UserError(f"Expected `chunk` to be at least 1 point, but got {chunk}.")
        can_stack = self.objective.batches is not None and not self.gradient_norm
        if method == "vmap" and not can_stack:
            raise UserError(
                "Expected a pair (loss_fn, batches) and no gradient norms for the vmap method, but got otherwise."
            )
        operations = self._operations()
        if method == "auto":
            small = can_stack and points > 1 and operations < _VMAP_OPERATIONS
            method = "vmap" if small and self._can_vmap() else "in place"
        batches = 1 if self.objective.batches is None else sum(1 for _ in self.objective.batches)
        ideal = int(_CHUNK_OPERATIONS / max(operations * batches, 1))
        return Plan(method, chunk or max(1, min(ideal, self._widest(), points)))

    def values(self, points: Sequence[Point], method: str = "in place") -> Values:
        """Evaluate every function at every point, in one pass over the data.

        Args:
            points: coordinates along the directions; y counts for nothing on a line.
            method: one of `METHODS`.

        Returns:
            By name, one number per point; NaN and infinities are kept.
        """
        if self.gradient_norm:
            return self._with_gradients(points)
        with torch.inference_mode():
            if self.objective.batches is None:
                return self._of_model(points)
            return self._over_batches(points, method)

    def check_deterministic(self) -> dict[str, float]:
        """Evaluate the centre twice.

        Returns:
            The values at the centre.

        Raises:
            UserError: if the two differ: something in the model is random, or the data change from pass to pass.
        """
        first, second = (self.values([(0.0, 0.0)]) for _ in range(2))
        tolerance = 1e-10 if self._groups[0].vector.dtype == torch.float64 else 1e-5
        for name in self.names:
            a, b = first[name][0], second[name][0]
            if not close_enough(a, b, tolerance):
                raise UserError(
                    f"Expected two evaluations of the centre to agree, but {name} was {a!r} and then {b!r}; "
                    "turn off what is random in the model (dropout without `training=`?) or the batches (shuffling?)."
                )
        return {name: first[name][0] for name in self.names}

    def pristine(self) -> nn.Module:
        """The private copy with the weights at the centre.

        Returns:
            The copy itself, not another one.
        """
        with torch.no_grad():
            self._set((0.0, 0.0))
        return self.model

    def differentiable(self) -> Iterator[tuple[Float[Tensor, " function"], float]]:
        """Evaluate at the weights as they stand, with a graph for derivatives; needs `gradient_norm`.

        Yields:
            The functions' values on one batch, and the batch's weight in the sum.
        """
        if self.objective.batches is None:
            yield self._stack(function(self.model) for function in self.objective.functions.values()), 1.0
            return
        for arguments, keywords, target, weight in self.objective.feeds(self.device):
            yield self._functions(self.model(*arguments, **keywords), target), weight

    def _set(self, point: Point) -> None:
        for group in self._groups:
            group.set(point)

    def _widest(self) -> int:
        size = sum(group.vector.numel() * group.vector.element_size() for group in self._groups)
        return max(1, min(64, _VMAP_BYTES // max(size, 1)))

    def _of_model(self, points: Sequence[Point]) -> Values:
        values: Values = {name: [] for name in self.objective.names}
        for point in points:
            self._set(point)
            for name, function in self.objective.functions.items():
                values[name].append(float(function(self.model)))
        return values

    def _over_batches(self, points: Sequence[Point], method: str, only_first: bool = False) -> Values:
        totals = torch.zeros(len(self.objective.names), len(points), dtype=torch.float64, device=self.device)
        weights = 0.0
        stacked = [group.stacked(points) for group in self._groups] if method == "vmap" else []
        parameters = {name: tensor for group in stacked for name, tensor in group.items()}
        for arguments, keywords, target, weight in self.objective.feeds(self.device):
            if method == "vmap":
                totals += weight * self._stacked_batch(parameters, arguments, keywords, target).T
            else:
                for column, point in enumerate(points):
                    self._set(point)
                    totals[:, column] += weight * self._functions(self.model(*arguments, **keywords), target)
            weights += weight
            if only_first:
                break
        if self.objective.reduction == "mean":
            totals /= weights
        return dict(zip(self.objective.names, totals.tolist(), strict=True))

    def _functions(self, output: Any, target: Any) -> Float[Tensor, " function"]:
        return self._stack(function(output, target) for function in self.objective.functions.values())

    def _stack(self, results: Iterable[Any]) -> Float[Tensor, " function"]:
        scalars = (torch.as_tensor(result, device=self.device) for result in results)
        return torch.stack([scalar.to(torch.float64).reshape(()) for scalar in scalars])

    def _stacked_batch(
        self, parameters: dict[str, Tensor], arguments: tuple[Any, ...], keywords: dict[str, Any], target: Any
    ) -> Float[Tensor, "point function"]:
        def at_one_point(weights: dict[str, Tensor]) -> Float[Tensor, " function"]:
            return self._functions(functional_call(self.model, weights, arguments, keywords), target)

        # The fused attention kernels know no batches of batches: vmap would call them point by point, with a warning.
        with sdpa_kernel(SDPBackend.MATH):
            result: Tensor = vmap(at_one_point)(parameters)
        return result

    # Multiplications and additions of one forward pass over the first batch, as far as torch counts them.
    def _operations(self) -> int:
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            if self.objective.batches is None:
                self._of_model([(0.0, 0.0)])
            else:
                self._over_batches([(0.0, 0.0)], "in place", only_first=True)
        return int(counter.get_total_flops())

    def _can_vmap(self) -> bool:
        try:
            with torch.inference_mode():
                self._over_batches([(0.0, 0.0)] * 2, "vmap", only_first=True)
        except (RuntimeError, ValueError, TypeError):
            return False  # control flow that depends on values, or an operation that vmap does not know
        return True

    def _with_gradients(self, points: Sequence[Point]) -> Values:
        values: Values = {name: [] for name in self.names}
        moving = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        for point in points:
            with torch.no_grad():
                self._set(point)
            totals, weights = torch.zeros(len(self.objective.names), dtype=torch.float64, device=self.device), 0.0
            gradients: list[Tensor] = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in moving]
            for results, weight in self.differentiable():
                for total, gradient in zip(
                    gradients, torch.autograd.grad(results[0], moving, allow_unused=True), strict=True
                ):
                    if gradient is not None:
                        total.add_(gradient, alpha=weight)
                totals += weight * results.detach()
                weights += weight
            scale = 1.0 / weights if self.objective.reduction == "mean" else 1.0
            norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients)) * scale
            for name, value in zip(self.names, [*(totals * scale).tolist(), norm], strict=True):
                values[name].append(value)
        return values


def private_copy(model: nn.Module) -> nn.Module:
    """Copy a model into evaluation mode, without gradients.

    Args:
        model: it stays as it is.

    Returns:
        An independent copy.

    Raises:
        UserError: if the model cannot be copied.
    """
    try:
        twin = copy.deepcopy(model)
    except Exception as error:
        raise UserError(
            f"Expected a model that copy.deepcopy can copy, but got {type(error).__name__}: {error}."
        ) from error
    for parameter in twin.parameters():
        parameter.grad = None
    return twin.eval()


def model_fingerprint(model: nn.Module) -> str:
    """Identify a model by the names, shapes and contents of its parameters and buffers.

    Args:
        model: it is only read.

    Returns:
        A SHA-256 in hex.
    """
    return hash_tensors([*model.named_parameters(), *model.named_buffers()])


def norm_of(tensors: Direction) -> float:
    """Euclidean norm over all parameters.

    Args:
        tensors: by name.

    Returns:
        The norm, from float64 sums.
    """
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors.values()))
