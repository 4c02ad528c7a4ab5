r"""Directions of largest curvature: top eigenvectors of the loss's Hessian, by Lanczos on Hessian-vector products.

With g the gradient of the loss with respect to all parameters, :math:`H v = \nabla (g \cdot v)`; the Hessian itself,
one row and one column per parameter, is never formed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Float64
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from stability.errors import UserError
from stability.landscape.directions import Directions, moving_parameters, unflatten
from stability.landscape.evaluate import Evaluator
from stability.landscape.objective import Loss, make_objective

Product = Callable[[Float64[np.ndarray, " parameter"]], Float64[np.ndarray, " parameter"]]


def hessian(
    model: nn.Module,
    loss: Loss,
    *,
    count: int = 2,
    seed: int = 0,
    tolerance: float = 1e-4,
    iterations: int | None = None,
    keep_biases: bool = True,
    keep_norms: bool = True,
) -> Directions:
    """Unit eigenvectors of the Hessian's largest eigenvalues, largest first.

    Args:
        model: any twice differentiable module; it stays as it is.
        loss: `loss(model) -> scalar`, or a pair (loss_fn, batches), as in `landscape.slice`.
        count: 1 or 2 directions.
        seed: of Lanczos's first vector.
        tolerance: relative accuracy of the eigenvalues.
        iterations: restarts at most; scipy's default where omitted.
        keep_biases: let biases move.
        keep_norms: let the parameters of normalisation layers move.

    Returns:
        The directions; `details` holds the eigenvalues and the residuals ||H v - lambda v||.

    Raises:
        UserError: if `count` is neither 1 nor 2, there are fewer parameters, or Lanczos does not converge (or
            finds no curvature at all).
    """
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

    moving = moving_parameters(model, keep_biases=keep_biases, keep_norms=keep_norms)
    size = sum(parameter.numel() for parameter in moving.values())
    if count not in (1, 2) or size < count:
        raise UserError(f"Expected `count` to be 1 or 2 and at most the {size} parameters, but got {count}.")
    product = hessian_product(model, loss, moving)
    if size <= 2 * count:  # too small for Lanczos
        values, vectors = np.linalg.eigh(np.stack([product(row) for row in np.eye(size)]))
    else:
        start = np.random.default_rng(seed).standard_normal(size)
        operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
        try:
            values, vectors = eigsh(operator, k=count, which="LA", v0=start, tol=tolerance, maxiter=iterations)
        except ArpackError as error:
            raise UserError(
                f"Expected Lanczos to find curvature to within {tolerance:g}, but got: {str(error).rstrip('.')}."
            ) from error
    order = np.argsort(values)[::-1][:count]
    values, vectors = values[order], vectors[:, order]
    residuals = [
        float(np.linalg.norm(product(vector) - value * vector)) for value, vector in zip(values, vectors.T, strict=True)
    ]
    x, *rest = (unflatten(torch.from_numpy(vector.copy()), moving) for vector in vectors.T)
    details: dict[str, Any] = {"eigenvalues": values.tolist(), "residuals": residuals}
    return Directions(x, rest[0] if rest else None, "hessian", "unscaled", seed, details)


def hessian_product(model: nn.Module, loss: Loss, moving: Mapping[str, Tensor]) -> Product:
    """Make the function that multiplies the Hessian at a model with a vector.

    Args:
        model: it stays as it is.
        loss: as in `hessian`.
        moving: parameters to differentiate by, in the vector's order.

    Returns:
        A function from and to float64 vectors; the derivatives themselves are in the model's own type.
    """
    still = Directions({name: torch.zeros_like(tensor) for name, tensor in moving.items()})
    evaluator = Evaluator(model, make_objective(loss), still, gradient_norm=True)
    named = dict(evaluator.model.named_parameters())
    parameters = [named[name] for name in moving]

    def product(vector: Float64[np.ndarray, " parameter"]) -> Float64[np.ndarray, " parameter"]:
        along = list(unflatten(torch.from_numpy(np.ascontiguousarray(vector).reshape(-1)), moving).values())
        total = np.zeros(vector.size)
        weights = 0.0
        # The fused attention kernels have no second derivative.
        with sdpa_kernel(SDPBackend.MATH):
            for results, weight in evaluator.differentiable():
                total += weight * _twice(results[0], parameters, along).numpy()
                weights += weight
        return total / weights if evaluator.objective.reduction == "mean" else total

    return product


def _twice(value: Tensor, parameters: list[nn.Parameter], along: list[Tensor]) -> Float[Tensor, " parameter"]:
    gradients = torch.autograd.grad(value, parameters, create_graph=True, materialize_grads=True)
    slope = torch.stack([(gradient * part).sum() for gradient, part in zip(gradients, along, strict=True)]).sum()
    if not slope.requires_grad:  # the loss is linear in the parameters
        return torch.zeros(sum(parameter.numel() for parameter in parameters), dtype=torch.float64)
    products = torch.autograd.grad(slope, parameters, materialize_grads=True)
    return torch.cat([product.detach().double().cpu().reshape(-1) for product in products])
