r"""Directions in parameter space, and what they are scaled by.

A direction is one tensor per parameter. With scaling "tensor" (the paper [1]) each tensor of a Gaussian direction
gets the norm of the parameter it belongs to; with "filter" each row does (every slice along the first dimension, as
in [2]); with "layer" all parameters of one module together; with "unscaled" nothing is scaled. Two directions are made
orthogonal *after* scaling, inside each scaled piece, so that the pieces keep their norms.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025.
[2] Li et al., Visualizing the Loss Landscape of Neural Nets, NeurIPS 2018.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor, nn

from stability.errors import UserError
from stability.files import atomic_write
from stability.landscape.objective import hash_tensors

SCALINGS = ("tensor", "filter", "layer", "unscaled")
Direction = Mapping[str, Tensor]


@dataclass(frozen=True)
class Directions:
    """One or two directions, with how they came about.

    Attributes:
        x: tensor per parameter name; a parameter without entry does not move.
        y: the second direction, or None for a line.
        kind: "gaussian", "hessian", "pca", "checkpoints" or "given".
        scaling: one of `SCALINGS`.
        seed: of the random generator, if one was used.
        details: anything else worth keeping (eigenvalues, explained variance, options).
    """

    x: Direction
    y: Direction | None = None
    kind: str = "given"
    scaling: str = "unscaled"
    seed: int | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def norms(self) -> tuple[float, ...]:
        """Euclidean norm of each direction over all parameters."""
        return tuple(math.sqrt(inner(one, one)) for one in self.each())

    @property
    def inner_product(self) -> float:
        """Inner product of the two directions, 0 if there is one only."""
        return 0.0 if self.y is None else inner(self.x, self.y)

    def each(self) -> Iterator[Direction]:
        """Go over the directions.

        Yields:
            x, then y if there is one.
        """
        yield self.x
        if self.y is not None:
            yield self.y

    def first(self) -> Directions:
        """Keep the first direction only.

        Returns:
            The same, without y.
        """
        return replace(self, y=None)

    def fingerprint(self) -> str:
        """Identify the directions by their contents.

        Returns:
            A SHA-256 in hex.
        """
        return hash_tensors(sorted(self._flat().items()))

    def check(self, model: nn.Module) -> None:
        """See whether these directions fit a model.

        Args:
            model: the model to move.

        Raises:
            UserError: if a name or a shape differs.
        """
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        for direction in self.each():
            for name, tensor in direction.items():
                if shapes.get(name) != tuple(tensor.shape):
                    found = f"has shape {shapes[name]}" if name in shapes else "is not in the model"
                    raise UserError(
                        f"Expected directions of the model's own shapes, but {name} of shape "
                        f"{tuple(tensor.shape)} {found}; draw new directions for this model."
                    )

    def write(self, path: str | os.PathLike[str]) -> Path:
        """Save as safetensors, atomically.

        Args:
            path: the file to write.

        Returns:
            The path.
        """
        from safetensors.torch import save_file

        record = {"kind": self.kind, "scaling": self.scaling, "seed": self.seed, "details": dict(self.details)}
        with atomic_write(path) as temporary:
            save_file(self._flat(), temporary, {"directions": json.dumps(record, default=str)})
        return Path(path)

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Directions:
        """Load what `write` saved.

        Args:
            path: the file.

        Returns:
            The directions, equal bit for bit.

        Raises:
            UserError: if the file is missing or holds something else.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, "pt") as file:
                record = json.loads(file.metadata()["directions"])
                names = file.keys()
                tensors = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise UserError(f"Expected saved directions at {path}, but they can't be read ({error}).") from error
        x, y = ({name[2:]: tensor for name, tensor in tensors.items() if name.startswith(f"{axis}.")} for axis in "xy")
        return cls(x, y or None, **record)

    def _flat(self) -> dict[str, Tensor]:
        return {
            f"{axis}.{name}": tensor.detach().cpu().contiguous()
            for axis, direction in zip("xy", self.each(), strict=False)
            for name, tensor in direction.items()
        }


def gaussian(
    model: nn.Module,
    *,
    seed: int = 0,
    scaling: str = "tensor",
    orthogonal: bool = True,
    keep_biases: bool = True,
    keep_norms: bool = True,
    count: int = 2,
) -> Directions:
    """Draw Gaussian directions and scale them.

    Args:
        model: whose parameters move; it is only read.
        seed: of a generator on the CPU, so that every machine draws the same.
        scaling: "tensor", "filter", "layer" or "unscaled"; see the module's docstring. A piece whose parameters are
            all 0 does not move.
        orthogonal: make the second direction orthogonal to the first, after scaling (a single parameter has no such
            one).
        keep_biases: move biases too.
        keep_norms: move the parameters of normalisation layers too.
        count: 1 or 2 directions.

    Returns:
        The directions.

    Raises:
        UserError: if `scaling` or `count` is unknown, or no parameter is left to move.
    """
    if scaling not in SCALINGS:
        raise UserError(f"Expected `scaling` to be one of {', '.join(SCALINGS)}, but got {scaling!r}.")
    if count not in (1, 2):
        raise UserError(f"Expected `count` to be 1 or 2 directions, but got {count}.")
    moving = moving_parameters(model, keep_biases=keep_biases, keep_norms=keep_norms)
    generator = torch.Generator().manual_seed(seed)
    drawn: list[dict[str, Tensor]] = []
    one: dict[str, Tensor] = {}
    for _ in range(count):
        one = {name: _normal_like(parameter, generator) for name, parameter in moving.items()}
        drawn.append(_scaled(one, moving, scaling))
    if count == 2 and orthogonal:
        drawn[1] = _orthogonalised(drawn[0], drawn[1], one, scaling)
    details = {"orthogonal": orthogonal, "keep_biases": keep_biases, "keep_norms": keep_norms}
    return Directions(drawn[0], drawn[1] if count == 2 else None, "gaussian", scaling, seed, details)


def towards(model: nn.Module, first: Mapping[str, Tensor], second: Mapping[str, Tensor] | None = None) -> Directions:
    """Directions from a model to one or two checkpoints, unscaled: coordinate 1 is the checkpoint itself.

    Args:
        model: the origin.
        first: state dict reached at x = 1.
        second: state dict reached at y = 1.

    Returns:
        The directions; they are not orthogonal in general, and distances take that into account.
    """
    origin = moving_parameters(model)
    x = _difference(first, origin)
    y = None if second is None else _difference(second, origin)
    return Directions(x, y, "checkpoints")


def principal(model: nn.Module, checkpoints: Sequence[Mapping[str, Tensor]]) -> Directions:
    """The two directions along which the checkpoints of a run spread most about the model [2, section 7].

    Args:
        model: the origin, usually the last checkpoint.
        checkpoints: state dicts of the run, at least two of them different from the model.

    Returns:
        Two orthogonal unit directions; `details` holds the share of the variance along each and the checkpoints'
        coordinates.

    Raises:
        UserError: if the checkpoints span less than two directions.
    """
    origin = moving_parameters(model)
    rows = [flatten(_difference(checkpoint, origin)) for checkpoint in checkpoints]
    matrix = torch.stack(rows) if rows else torch.empty(0, 0)  # (checkpoint, parameter)
    _, singular, basis = torch.linalg.svd(matrix, full_matrices=False) if rows else (None, torch.empty(0), matrix)
    if (singular > 1e-12 * max(float(matrix.norm()), 1e-300)).sum() < 2:
        raise UserError(
            f"Expected checkpoints that differ from the model in at least two directions, but got {len(rows)} that do "
            "not; give more of the run."
        )
    share = (singular**2 / (singular**2).sum()).tolist()
    coordinates = (matrix @ basis[:2].T).tolist()
    x, y = (unflatten(row, origin) for row in basis[:2])
    return Directions(x, y, "pca", details={"explained": share[:2], "coordinates": coordinates})


def moving_parameters(model: nn.Module, *, keep_biases: bool = True, keep_norms: bool = True) -> dict[str, Tensor]:
    """The floating-point parameters that a direction moves.

    Args:
        model: whose parameters.
        keep_biases: include biases.
        keep_norms: include the parameters of normalisation layers.

    Returns:
        Detached tensors by name; shared parameters once.

    Raises:
        UserError: if none is left.
    """
    norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        for name, _ in module.named_parameters(recurse=False)
    }
    moving = {
        name: parameter.detach()
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point()
        and (keep_norms or name not in norms)
        and (keep_biases or name in norms or "bias" not in name.rpartition(".")[2])
    }
    if not moving:
        raise UserError(
            "Expected a model with floating-point parameters to move, but none is left; keep biases or norms."
        )
    return moving


def inner(first: Direction, second: Direction) -> float:
    """Inner product of two directions, in float64.

    Args:
        first: one direction.
        second: the other; parameters that are in one only count as 0.

    Returns:
        The sum over all parameters of the products.
    """
    # An exact sum: the same whatever the order of the names, which saving changes.
    return math.fsum(float((first[name].double() * second[name].double()).sum()) for name in first if name in second)


def flatten(direction: Direction) -> Tensor:
    """Join a direction's tensors into one float64 vector.

    Args:
        direction: tensors by name.

    Returns:
        A vector on the CPU, in the direction's order.
    """
    return torch.cat([tensor.detach().double().cpu().reshape(-1) for tensor in direction.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut a vector into tensors.

    Args:
        vector: as `flatten` makes it.
        like: tensors whose names, shapes and types to take.

    Returns:
        Tensors by name.
    """
    pieces = torch.split(vector, [tensor.numel() for tensor in like.values()])
    return {
        name: piece.reshape(tensor.shape).to(tensor.dtype).clone()
        for (name, tensor), piece in zip(like.items(), pieces, strict=True)
    }


def _normal_like(parameter: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(parameter.shape, generator=generator, dtype=torch.float64)


def _difference(state: Mapping[str, Tensor], origin: Mapping[str, Tensor]) -> dict[str, Tensor]:
    for name, tensor in origin.items():
        if name not in state or state[name].shape != tensor.shape:
            found = f"has {tuple(state[name].shape)}" if name in state else "lacks it"
            raise UserError(
                f"Expected a checkpoint with {name} of shape {tuple(tensor.shape)}, but it {found}; "
                "give checkpoints of one model."
            )
    return {
        name: (state[name].detach().to(tensor.device, torch.float64) - tensor.double()).to(tensor.dtype)
        for name, tensor in origin.items()
    }


def _groups(names: Iterable[str], scaling: str) -> list[list[str]]:
    if scaling == "unscaled":
        return [list(names)]
    if scaling != "layer":
        return [[name] for name in names]
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0], []).append(name)
    return list(layers.values())


# Pieces that are scaled together become the rows of float64 matrices, so that all is done row by row.
def _pack(direction: Direction, scaling: str) -> list[Float64[Tensor, "piece entry"]]:
    def rows(tensor: Tensor) -> int:
        return tensor.shape[0] if scaling == "filter" and tensor.ndim > 1 else 1

    return [
        torch.cat([direction[name].double().reshape(rows(direction[name]), -1) for name in group], dim=1)
        for group in _groups(direction, scaling)
    ]


def _unpack(matrices: Sequence[Tensor], like: Direction, scaling: str) -> dict[str, Tensor]:
    result = {}
    for matrix, group in zip(matrices, _groups(like, scaling), strict=True):
        start = 0
        for name in group:
            width = like[name].numel() // max(matrix.shape[0], 1)
            part = matrix[:, start : start + width]
            result[name] = part.reshape(like[name].shape).to(like[name].device, like[name].dtype)
            start += width
    return result


def _scaled(direction: Direction, parameters: Direction, scaling: str) -> dict[str, Tensor]:
    matrices = _pack(direction, scaling)
    if scaling != "unscaled":
        targets = _pack(parameters, scaling)
        matrices = [
            matrix * (target.norm(dim=1) / matrix.norm(dim=1).clamp_min(1e-300))[:, None].to(matrix.device)
            for matrix, target in zip(matrices, targets, strict=True)
        ]
    return _unpack(matrices, parameters, scaling)


# Inside each piece first, which keeps the pieces' norms; a piece of one entry has no orthogonal complement and stays,
# so a last step over all parameters together takes away what such pieces left.
def _orthogonalised(x: Direction, y: Direction, plain: Direction, scaling: str) -> dict[str, Tensor]:
    pieces = [_orthogonal_rows(a, b) for a, b in zip(_pack(x, scaling), _pack(y, scaling), strict=True)]
    ((first,), (second,)) = _pack(x, "unscaled"), _pack(_unpack(pieces, y, scaling), "unscaled")
    whole = _orthogonal_rows(first, second)
    if abs(float((first * whole).sum())) > 1e-6 * float(first.norm() * whole.norm()):
        # Nothing but pieces of one entry, and parallel: the plain Gaussian is not.
        (loose,) = _pack(plain, "unscaled")
        whole = _orthogonal_rows(first, loose.to(first.device) * (second.norm() / loose.norm()))
    return _unpack([whole], y, "unscaled")


def _orthogonal_rows(
    x: Float64[Tensor, "piece entry"], y: Float64[Tensor, "piece entry"]
) -> Float64[Tensor, "piece entry"]:
    norm = y.norm(dim=1, keepdim=True)
    rest = y
    for _ in range(2):  # twice, for the accuracy that rounding takes from the first time
        square = x.square().sum(1, keepdim=True).clamp_min(1e-300)
        rest = rest - x * ((x * rest).sum(1, keepdim=True) / square)
    left = rest.norm(dim=1, keepdim=True)
    return torch.where(left > 1e-6 * norm, rest * (norm / left.clamp_min(1e-300)), y)
