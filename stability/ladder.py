r"""The ladder: from the largest change that was measured to the worst case that a theorem allows, for one attention.

All rungs bound the same quantity, the local Lipschitz constant of :math:`A(X) = V X\, \mathrm{softmax}_K(X^T W X)` with
respect to X at one input, distances between token matrices being sums of token norms. The extreme points of the unit
ball of that norm move a single token, so a maximum over tokens is exact; summing the norms of the blocks over queries
is an upper bound of the largest directional derivative.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

import theory
from probes.attention import AttentionCall
from stability.layer import Layer

RUNGS = ("finite difference", "Jacobian blocks", "measured attention", "sharp, sets held", "sharp", "published")
_THEOREM = {"full": "full", "regular": "regular", "heavy-hitter": "heavy_hitter"}


def ladder(
    layers: Layer | AttentionCall | Iterable[Layer | AttentionCall], *, trials: int = 16, seed: int = 0
) -> pd.DataFrame:
    """Evaluate all rungs for one or more layers.

    Args:
        layers: heads of attention layers, or attention calls (their first batch element and head are read).
        trials: random perturbations beside the structured ones.
        seed: of the random perturbations.

    Returns:
        One row a layer and rung, from measured to worst case: `module`, `layer`, `head`, `kind`, `rung`, `value`,
        `log10` and `flag`, which says of a published bound which of the other rungs lie above it. The rungs are
        "finite difference" (largest found), "Jacobian blocks" (max_j sum_i ||dA_i/dx_j||_2), "measured attention" (from
        the attention matrix), "sharp, sets held" (from dispersion, sinks and norms, where the sets follow the input),
        "sharp" (ours, Theorems 3 to 5) and "published" (reconstructed). The last two exist only where a theorem does.
    """
    many = [layers] if not isinstance(layers, Iterable) else list(layers)
    heads = [Layer.from_call(one) if isinstance(one, AttentionCall) else one for one in many]
    table = pd.DataFrame([row for one in heads for row in _rows(one, trials, seed)])
    return table.astype({"layer": "Int64", "head": "Int64"})


def _rows(layer: Layer, trials: int, seed: int) -> list[dict[str, object]]:
    sums, directions = jacobian_sums(layer)
    rungs = {
        "finite difference": largest_difference(layer, sums, directions, trials=trials, seed=seed),
        "Jacobian blocks": float(sums.max()),
        **bounds(layer),
    }
    published = rungs.get("published", math.inf)
    above = [name for name, value in rungs.items() if name != "published" and value > published]
    return [
        {
            "module": layer.module,
            "layer": layer.layer,
            "head": layer.head,
            "kind": layer.kind,
            "rung": name,
            "value": rungs[name],
            "log10": math.log10(rungs[name]) if 0 < rungs[name] < math.inf else rungs[name],
            "flag": f"below {', '.join(above)}" if name == "published" and above else "",
        }
        for name in RUNGS
        if name in rungs
    ]


def bounds(layer: Layer) -> dict[str, float]:
    """Evaluate the rungs that come from theory.

    Args:
        layer: one head.

    Returns:
        By rung, from `measured attention` to `published`.
    """
    known = layer.quantities()
    norms = {name: known[name] for name in ("token_norm", "score_norm", "value_norm")}
    shared = {"dispersion": known["dispersions"], "keys": known["kept"], "queries_per_key": known["queries_per_key"]}
    held = theory.attention.masked_input_stability(**shared, **norms)
    found = {"measured attention": float(theory.attention.measured_input_stability(layer.weights().numpy(), **norms))}
    if layer.kind in {"full", "regular", "masked"}:
        found["sharp"] = held
    else:
        found["sharp, sets held"] = held
    if layer.kind == "heavy-hitter":
        found["sharp"] = theory.attention.masked_input_stability(**shared, **norms, separation=known["separation"])
    if layer.kind in _THEOREM:
        quantities = {name: value for name, value in known.items() if name not in {"dispersions", "kept"}}
        found["published"] = float(getattr(theory, _THEOREM[layer.kind]).input_stability.value(**quantities))
    return found


def jacobian_sums(layer: Layer) -> tuple[Float[Tensor, " token"], Float[Tensor, "token pick dim"]]:
    r"""Evaluate :math:`\sum_i \|\partial A_i / \partial x_j\|_2` for each token j, by forward-mode differentiation.

    Args:
        layer: one head.

    Returns:
        The sums, and for each token two unit directions that move the outputs most: climbed to from the one that is
        best in the Euclidean norm, and from the one that is best for the most sensitive output.
    """
    length, dim = layer.tokens.shape
    free = dim if layer.free is None else layer.free
    sums, directions = [], []
    for key in range(length):
        jacobian = torch.func.jacfwd(partial(_moved, layer, key))(layer.tokens[key, :free])  # (query, out, free)
        # Largest singular values from Gram matrices on the shorter side, which is much faster than an SVD.
        gram = jacobian @ jacobian.mT if jacobian.shape[1] <= free else jacobian.mT @ jacobian
        norms = torch.linalg.eigvalsh(gram)[:, -1].clamp(min=0).sqrt()
        sums.append(norms.sum())
        flat, worst = jacobian.flatten(0, 1), jacobian[norms.argmax()]
        best = torch.linalg.eigh(torch.stack([flat.mT @ flat, worst.mT @ worst])).eigenvectors[..., -1]
        directions.append(_climb(jacobian, best))
    padded = torch.nn.functional.pad(torch.stack(directions), (0, dim - free))
    return torch.stack(sums), padded


def _moved(layer: Layer, key: int, start: Float[Tensor, " free"]) -> Float[Tensor, "query out"]:
    # The output after the leading coordinates of one token were replaced.
    token = torch.cat([start, layer.tokens[key, len(start) :]])
    here = torch.arange(len(layer.tokens))[:, None] == key
    return layer.output(torch.where(here, token, layer.tokens))


def _climb(
    jacobian: Float[Tensor, "query out free"], directions: Float[Tensor, "pick free"], steps: int = 10
) -> Float[Tensor, "pick free"]:
    # The sum of norms is convex in the direction, so stepping to the normalised gradient never lowers it on the sphere.
    flat = jacobian.flatten(0, 1)
    for _ in range(steps):
        moved = (directions @ flat.T).reshape(len(directions), *jacobian.shape[:2])  # (pick, query, out)
        unit = moved / moved.norm(dim=-1, keepdim=True).clamp(min=1e-300)
        gradient = unit.flatten(1) @ flat
        norm = gradient.norm(dim=-1, keepdim=True)
        # Where nothing moves the outputs every direction is as good as any; a zero one would not be a direction.
        directions = torch.where(norm > 0, gradient / norm.clamp(min=1e-300), directions)
    return directions


def largest_difference(
    layer: Layer,
    sums: Float[Tensor, " token"],
    directions: Float[Tensor, "token pick dim"],
    *,
    trials: int = 16,
    seed: int = 0,
) -> float:
    """Search for the largest central difference over structured and random perturbations.

    Args:
        layer: one head.
        sums: how sensitive the outputs are to each token.
        directions: promising directions of each token.
        trials: random perturbations: half of them of the most sensitive token, half of all tokens.
        seed: of the random perturbations.

    Returns:
        The largest ratio of distances found.
    """
    length, dim = layer.tokens.shape
    free = dim if layer.free is None else layer.free
    generator = torch.Generator().manual_seed(seed)
    worst = int(sums.argmax())
    picks = directions.shape[1]
    single = torch.zeros(length * picks, length, dim, dtype=torch.float64)
    rows = torch.arange(length).repeat_interleave(picks)
    single[torch.arange(len(rows)), rows] = directions.flatten(0, 1)
    random = torch.zeros(trials, length, dim, dtype=torch.float64)
    random[..., :free] = torch.randn(trials, length, free, dtype=torch.float64, generator=generator)
    random[: trials // 2, torch.arange(length) != worst] = 0
    together = directions[worst, 0].expand(1, length, dim)
    largest = 0.0
    norm = layer.tokens.norm(dim=1).max().clamp(min=1e-30)
    step = (
        1e-5 * norm / (1 + torch.linalg.matrix_norm(layer.score, 2) * norm**2)
    )  # small against what bends the softmax
    everything = torch.cat([single, random, together])
    for moves in torch.split(everything, max(1, 4_000_000 // (length * max(length, dim)))):
        unit = moves / moves.norm(dim=-1).sum(-1)[:, None, None]
        change = layer.output(layer.tokens + step * unit) - layer.output(layer.tokens - step * unit)
        largest = max(largest, float((change.norm(dim=-1).sum(-1) / (2 * step)).max()))
    return largest


def plot_ladder(table: pd.DataFrame, *, ax: Any = None) -> Any:
    """Draw the rungs of each layer on a logarithmic scale.

    Args:
        table: what `ladder` returned.
        ax: matplotlib Axes to draw on; new ones where omitted.

    Returns:
        The Axes. A published bound below a rigorous one is drawn as a cross.
    """
    if ax is None:
        from matplotlib.figure import Figure

        ax = Figure(figsize=(7, 4.5), layout="constrained").add_subplot()
    places = list(dict.fromkeys(zip(table["module"], table["layer"].fillna(-1), table["head"].fillna(-1), strict=True)))
    shades = np.linspace(0.75, 0.0, len(RUNGS))
    for (rung, marker), shade in zip(zip(RUNGS, "ovs^D*", strict=True), shades, strict=True):
        rows = table[(table["rung"] == rung) & np.isfinite(table["value"])]
        if rows.empty:
            continue
        at = [
            places.index(key)
            for key in zip(rows["module"], rows["layer"].fillna(-1), rows["head"].fillna(-1), strict=True)
        ]
        colour = "tab:red" if rung == "published" else str(shade)
        line = "--" if rung == "published" else "-"
        ax.plot(at, rows["value"], marker=marker, linestyle=line, color=colour, label=rung)
        low = (rows["flag"] != "").to_numpy()
        if low.any():
            ax.plot(
                np.array(at)[low],
                rows["value"][low],
                "x",
                color="black",
                markersize=11,
                label="published, below a rigorous one",
            )
    names = [_place_name(layer, head, module) for module, layer, head in places]
    ax.set_xticks(range(len(places)), names)
    ax.set(yscale="log", xlabel="layer (head)", ylabel="Lipschitz constant in X, (2,1) norm (dimensionless)")
    ax.grid(visible=True, axis="y", alpha=0.3)
    ax.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return ax


def _place_name(layer: int, head: int, module: str) -> str:
    if layer < 0:
        return module or "layer"
    return f"{layer}" if head < 0 else f"{layer} ({head})"
