r"""Local Lipschitz constant of a model's output with respect to its input embedding, by power iteration.

At one sequence the constant is the largest singular value of the Jacobian J from embedded tokens to output. Power
iteration repeats :math:`v \leftarrow J^T J v / \|J^T J v\|`, with :math:`J v` from forward and :math:`J^T u` from
reverse differentiation, so that J is never formed. Every iterate's :math:`\|J v\|` is a lower bound of the constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.func import jvp, vjp
from torch.nn.attention import SDPBackend, sdpa_kernel

from stability.errors import UserError
from stability.landscape.evaluate import private_copy

if TYPE_CHECKING:
    from stability.model import Encoder

NORMS = ("euclidean", "token")
Function = Callable[[Tensor], Tensor]


def local_input(
    model: nn.Module,
    inputs: Tensor | Mapping[str, Any],
    *,
    embedding: str = "embedding",
    norm: str = "euclidean",
    iterations: int = 200,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> pd.DataFrame:
    r"""Estimate, for each sequence of a batch, how fast the output can change with the embedded input.

    Args:
        model: any module that treats the sequences of a batch independently; it stays as it is, and is evaluated in
            evaluation mode.
        inputs: a batch for `model(inputs)`, or a mapping for `model(**inputs)`. An output with `logits` stands for
            them.
        embedding: name of the submodule whose output, (sequence, token, width), is moved.
        norm: of the move: "euclidean" over all tokens, or "token", the sum of the tokens' Euclidean norms, as in
            theory; its unit ball's extreme points move a single token, so the maximum over tokens is taken.
        iterations: at most.
        tolerance: a sequence has converged when an iteration changes its value by less than this share, twice in a row.
        seed: of the first vectors.

    Returns:
        One row per sequence: `value` in output units per unit of embedding, `iterations`, `converged`, `residual`
        (:math:`\|J^T J v - \sigma^2 v\| / \sigma^2`), `token` (which one moves, for "token"), `bound`.

    Raises:
        UserError: if there is no such submodule, its output has another shape, or a number is out of range.
    """
    if norm not in NORMS:
        raise UserError(f"Expected `norm` to be euclidean or token, but got {norm!r}.")
    if iterations < 2 or not tolerance > 0:
        raise UserError(
            f"Expected at least 2 `iterations` and a positive `tolerance`, but got {iterations}, {tolerance}."
        )
    rows = []
    twin = private_copy(model).requires_grad_(False)
    with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels lack forward differentiation
        for number, sequence in enumerate(_sequences(inputs)):
            with _moved(twin, embedding, sequence) as (function, start):
                copies = start.shape[1] if norm == "token" else 1
                mask = torch.eye(copies)[:, :, None].to(start) if norm == "token" else torch.ones(1, 1, 1).to(start)
                found = _power(function, start.repeat(copies, 1, 1), mask, iterations, tolerance, seed + number)
            best = int(found["value"].argmax())
            token = best if norm == "token" else pd.NA
            row = {name: tensor[best].item() for name, tensor in found.items()}
            rows.append({"sequence": number, "norm": norm, "token": token, **row, "bound": "lower bound", "seed": seed})
    return pd.DataFrame(rows).astype({"token": "Int64", "iterations": "int64"})


def beside_theory(
    model: Encoder,
    tokens: Int[Tensor, "sequence token"],
    *,
    iterations: int = 200,
    tolerance: float = 1e-4,
    seed: int = 0,
) -> pd.DataFrame:
    """Set the local constant of an encoder's output beside the bounds that theory composes layer by layer.

    Distances between embedded inputs are sums of token norms, as in theory; outputs are measured in the Euclidean norm.

    Args:
        model: one of this project's encoders, of the make that `stability.constants` can read.
        tokens: sequences without padding.
        iterations: of the power iteration, at most.
        tolerance: of the power iteration.
        seed: of the power iteration.

    Returns:
        Three rows per sequence, from measured to worst case: `rung` "power iteration", "composed from measured
        attention", "composed from dispersion and sinks"; `log10` and `value` (infinite beyond float64); for the first
        also `iterations`, `converged` and `residual`.
    """
    from stability.constants import constants

    double = cast("Encoder", private_copy(model).double())
    measured = local_input(double, tokens, norm="token", iterations=iterations, tolerance=tolerance, seed=seed)
    head = float(torch.linalg.matrix_norm(double.linear.weight.detach(), 2))
    rows: list[dict[str, Any]] = []
    for row in measured.to_dict("records"):
        sequence = tokens[row["sequence"]]
        kept = {name: row[name] for name in ("iterations", "converged", "residual")}
        logarithms = {"power iteration": math.log(row["value"]) if row["value"] > 0 else -math.inf}
        for name, form in (
            ("composed from measured attention", "measured"),
            ("composed from dispersion and sinks", "sharp"),
        ):
            encoder = constants(double, sequence, form=form).network.encoder  # type: ignore[arg-type]
            # From the embedding, which the encoder multiplies by sqrt(width), to the mean over tokens and the head.
            logarithms[name] = encoder + math.log(head * math.sqrt(model.config.width) / len(sequence))
        for rung, logarithm in logarithms.items():
            value = math.exp(logarithm) if logarithm < 709 else math.inf
            extra = kept if rung == "power iteration" else dict.fromkeys(kept, pd.NA)
            rows.append(
                {"sequence": row["sequence"], "rung": rung, "value": value, "log10": logarithm / math.log(10), **extra}
            )
    return pd.DataFrame(rows)


def _power(
    function: Function,
    start: Float[Tensor, "copy token width"],
    mask: Float[Tensor, "copy token 1"],
    iterations: int,
    tolerance: float,
    seed: int,
) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(start.shape, generator=generator, dtype=torch.float64).to(start) * mask
    v = v / _norms(v)
    pull: Any = vjp(function, start)[1]
    sigma = torch.zeros(len(start), dtype=start.dtype, device=start.device)
    steady, used = torch.zeros_like(sigma), torch.zeros_like(sigma)
    residual = torch.full_like(sigma, math.inf)
    for _ in range(iterations):
        image = jvp(function, (start,), (v,))[1]
        new = image.flatten(1).norm(dim=1)
        change = (new - sigma).abs() <= tolerance * new
        steady = torch.where(steady >= 2, steady, (steady + 1) * change)  # two small changes in a row
        back = pull(image)[0] * mask
        square = (new**2).clamp_min(torch.finfo(new.dtype).tiny)[:, None, None]
        residual = (back - square * v).flatten(1).norm(dim=1) / square[:, 0, 0]
        used += steady < 2
        sigma = new
        if bool((steady >= 2).all()):
            break
        # Where the Jacobian is zero, the vector stays.
        length = _norms(back)
        v = torch.where(length > 0, back / length.clamp_min(torch.finfo(v.dtype).tiny), v)
    return {
        "value": sigma,
        "iterations": (used + 1).clamp_max(iterations),
        "converged": steady >= 2,
        "residual": residual,
    }


def _norms(v: Float[Tensor, "copy token width"]) -> Float[Tensor, "copy 1 1"]:
    norms: Tensor = torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True)
    return norms


def _sequences(inputs: Tensor | Mapping[str, Any]) -> Iterator[Tensor | dict[str, Any]]:
    if isinstance(inputs, Tensor):
        yield from (inputs[number : number + 1] for number in range(len(inputs)))
        return
    count = max(len(value) for value in inputs.values() if isinstance(value, Tensor))
    for number in range(count):
        yield {
            name: value[number : number + 1] if isinstance(value, Tensor) else value for name, value in inputs.items()
        }


# The model as a function of the embedding's output; the input itself is repeated to the number of embeddings given.
@contextmanager
def _moved(model: nn.Module, embedding: str, inputs: Tensor | dict[str, Any]) -> Iterator[tuple[Function, Tensor]]:
    try:
        module = model.get_submodule(embedding)
    except AttributeError as error:
        names = [name for name, one in model.named_modules() if isinstance(one, nn.Embedding)]
        raise UserError(
            f"Expected a submodule {embedding!r}, but got a model whose embeddings are {', '.join(names) or 'absent'}."
        ) from error

    def call(copies: int) -> Tensor:
        if isinstance(inputs, Tensor):
            output = model(inputs.expand(copies, *inputs.shape[1:]))
        else:
            many = {n: v.expand(copies, *v.shape[1:]) if isinstance(v, Tensor) else v for n, v in inputs.items()}
            output = model(**many)
        return getattr(output, "logits", output)  # type: ignore[no-any-return]

    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda _, __, output: seen.append(output.detach().clone()))
    try:
        with torch.no_grad():
            call(1)
    finally:
        handle.remove()
    if len(seen) != 1 or seen[0].ndim != 3:
        raise UserError(
            f"Expected {embedding!r} to give (sequence, token, width) once, but it gave {len(seen)} outputs."
        )

    def function(moved: Tensor) -> Tensor:
        handle = module.register_forward_hook(lambda *_: moved)
        try:
            return call(len(moved))
        finally:
            handle.remove()

    yield function, seen[0]
