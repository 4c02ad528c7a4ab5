"""Directions against their definitions, written out slowly."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from toy_models import Encoder, Quadratic, own_loss, pairs

from stability import landscape
from stability.errors import UserError
from stability.landscape.directions import inner


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().double() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tensor_scaling_gives_each_tensor_its_parameters_norm(dtype: torch.dtype) -> None:
    model = Encoder().to(dtype)
    drawn = landscape.gaussian(model, seed=5)
    for name, parameter in parameters(model).items():
        for direction in drawn.each():
            assert direction[name].double().norm() == pytest.approx(parameter.norm().item(), rel=1e-6)
            assert direction[name].dtype == dtype
    total = sum(parameter.square().sum() for parameter in parameters(model).values()).sqrt().item()
    assert drawn.norms == pytest.approx((total, total), rel=1e-6)


def test_filter_scaling_gives_each_row_its_norm() -> None:
    model = Encoder().double()
    drawn = landscape.gaussian(model, seed=5, scaling="filter")
    for name, parameter in parameters(model).items():
        rows, targets = (t.reshape(len(t), -1) if t.ndim > 1 else t[None] for t in (drawn.y[name], parameter))
        for row, target in zip(rows, targets, strict=True):
            assert row.norm() == pytest.approx(target.norm().item(), rel=1e-12)


def test_layer_scaling_gives_each_module_its_norm() -> None:
    model = Encoder().double()
    drawn = landscape.gaussian(model, seed=5, scaling="layer")
    for prefix, module in model.named_modules():
        names = [f"{prefix}.{name}" for name, _ in module.named_parameters(recurse=False)]
        if names:
            norms = [
                torch.cat([source[name].reshape(-1) for name in names]).norm()
                for source in (drawn.y, parameters(model))
            ]
            assert norms[0] == pytest.approx(norms[1].item(), rel=1e-12)


def test_unscaled_is_the_plain_gaussian_of_the_seed() -> None:
    model = Encoder().double()
    drawn = landscape.gaussian(model, seed=5, scaling="unscaled", orthogonal=False)
    generator = torch.Generator().manual_seed(5)
    for direction in drawn.each():
        for name, parameter in parameters(model).items():
            assert torch.equal(direction[name], torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("scaling", ["tensor", "filter", "layer", "unscaled"])
def test_orthogonal_after_scaling(scaling: str) -> None:
    model = Encoder().double()
    loose, drawn = (landscape.gaussian(model, seed=2, scaling=scaling, orthogonal=o) for o in (False, True))
    assert abs(loose.inner_product) > 1e-6 * loose.norms[0] ** 2
    assert abs(drawn.inner_product) < 1e-13 * drawn.norms[0] ** 2
    assert drawn.norms == pytest.approx(loose.norms, rel=1e-12)
    assert all(torch.equal(loose.x[name], drawn.x[name]) for name in loose.x)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.integers(0, 2**32),
    st.sampled_from(["tensor", "filter", "layer"]),
)
def test_orthogonal_also_with_tensors_of_one_entry(sizes: list[int], seed: int, scaling: str) -> None:
    model = nn.Module()
    for number, size in enumerate(sizes):
        model.register_parameter(f"p{number}", nn.Parameter(torch.arange(1.0, size + 1, dtype=torch.float64)))
    drawn = landscape.gaussian(model, seed=seed, scaling=scaling)
    if sum(sizes) > 1:
        assert abs(drawn.inner_product) <= 1e-9 * drawn.norms[0] * drawn.norms[1]


def test_biases_and_norms_can_stay() -> None:
    model = Encoder()
    names = set(landscape.gaussian(model).x)
    assert names == set(dict(model.named_parameters()))
    assert {name for name in names if name not in landscape.gaussian(model, keep_norms=False).x} == {
        "norm.weight",
        "norm.bias",
    }
    without = set(landscape.gaussian(model, keep_biases=False).x)
    assert names - without == {name for name in names if name.endswith("bias") and not name.startswith("norm")}
    surface = landscape.slice(
        model, (F.cross_entropy, pairs()), steps=3, directions=landscape.gaussian(model, keep_biases=False)
    )
    assert surface.metadata["direction_details"]["keep_biases"] is False


def test_zero_parameters_do_not_move() -> None:
    model = Encoder()
    nn.init.zeros_(model.head.bias)
    drawn = landscape.gaussian(model)
    assert not drawn.x["head.bias"].any()
    assert all(torch.isfinite(tensor).all() for direction in drawn.each() for tensor in direction.values())


def test_global_generator_is_left_alone() -> None:
    state = torch.get_rng_state()
    landscape.slice(Encoder(), (F.cross_entropy, pairs()), steps=3)
    assert torch.equal(state, torch.get_rng_state())


def test_saved_directions_serve_a_second_model(tmp_path: Path) -> None:
    drawn = landscape.gaussian(Encoder(seed=0), seed=9)
    again = landscape.Directions.read(drawn.write(tmp_path / "directions.safetensors"))
    assert again.fingerprint() == drawn.fingerprint()
    assert (again.kind, again.scaling, again.seed, dict(again.details)) == (
        "gaussian",
        "tensor",
        9,
        dict(drawn.details),
    )
    surface = landscape.slice(Encoder(seed=1), (F.cross_entropy, pairs()), steps=3, directions=again)
    assert surface.direction_norms == drawn.norms
    with pytest.raises(UserError, match="of the model's own shapes"):
        landscape.slice(Encoder(width=16), (F.cross_entropy, pairs()), steps=3, directions=again)
    with pytest.raises(UserError, match="saved directions"):
        landscape.Directions.read(tmp_path / "none.safetensors")


def test_hessian_of_a_quadratic_is_its_matrix() -> None:
    model = Quadratic(9)
    found = landscape.hessian(model, own_loss, tolerance=1e-10)
    values, vectors = np.linalg.eigh(model.matrix.numpy())
    assert found.details["eigenvalues"] == pytest.approx(values[[-1, -2]], rel=1e-9)
    for direction, vector in zip(found.each(), vectors[:, [-1, -2]].T, strict=True):
        assert abs(direction["theta"].numpy() @ vector) == pytest.approx(1, abs=1e-9)
    assert max(found.details["residuals"]) < 1e-8
    assert abs(found.inner_product) < 1e-9


def test_hessian_product_equals_differences_of_gradients() -> None:
    model = Encoder().double().eval()
    found = landscape.hessian(model, (F.cross_entropy, pairs()), tolerance=1e-8)
    tokens, labels = (torch.cat(part) for part in zip(*pairs(), strict=True))
    step = 1e-5

    def gradient(sign: int) -> dict[str, torch.Tensor]:
        moved = {name: parameter + sign * step * found.x[name] for name, parameter in parameters(model).items()}
        moved = {name: tensor.requires_grad_() for name, tensor in moved.items()}
        loss = F.cross_entropy(torch.func.functional_call(model, moved, (tokens,)), labels)
        return dict(zip(moved, torch.autograd.grad(loss, list(moved.values())), strict=True))

    up, down = gradient(1), gradient(-1)
    eigenvalue = found.details["eigenvalues"][0]
    for name in up:
        product = (up[name] - down[name]) / (2 * step)
        torch.testing.assert_close(product, eigenvalue * found.x[name], rtol=1e-4, atol=1e-6 * abs(eigenvalue))


def test_tiny_and_linear_models_have_a_hessian_too() -> None:
    assert landscape.hessian(Quadratic(2), own_loss).details["eigenvalues"] == pytest.approx(
        np.linalg.eigvalsh(Quadratic(2).matrix.numpy())[::-1], rel=1e-12
    )
    with pytest.raises(UserError, match="find curvature"):
        landscape.hessian(Quadratic(7), lambda model: model.theta.sum())
    with pytest.raises(UserError, match="at most the 1 parameters"):
        landscape.hessian(Quadratic(1), own_loss)


def test_principal_directions_span_the_run() -> None:
    model, generator = Quadratic(8), torch.Generator().manual_seed(0)
    u, v = torch.linalg.qr(torch.randn(8, 2, generator=generator, dtype=torch.float64)).Q.T
    run = [{"theta": model.theta.detach() + a * u + b * v} for a, b in [(5, 0), (3, 1), (1, 1), (0.5, 0)]]
    found = landscape.principal(model, run)
    plane = torch.stack([u, v])
    for direction in found.each():
        assert (plane @ direction["theta"]).norm() == pytest.approx(1, abs=1e-12)
    assert abs(found.inner_product) < 1e-12
    assert sum(found.details["explained"]) == pytest.approx(1)
    spots = torch.tensor(found.details["coordinates"], dtype=torch.float64)
    rebuilt = spots @ torch.stack([found.x["theta"], found.y["theta"]])
    torch.testing.assert_close(rebuilt, torch.stack([c["theta"] for c in run]) - model.theta.detach())
    with pytest.raises(UserError, match="at least two directions"):
        landscape.principal(model, run[:1])


def test_given_checkpoints_are_at_one() -> None:
    origin, first, second = (Encoder(seed=s).double() for s in range(3))
    found = landscape.towards(origin, first.state_dict(), second.state_dict())
    surface = landscape.slice(origin, (F.cross_entropy, pairs()), steps=3, directions=found)
    for model, value in ((first, surface.grid()[1, 2]), (second, surface.grid()[2, 1])):
        own = landscape.slice(model, (F.cross_entropy, pairs()), steps=3).center["loss"]
        assert value == pytest.approx(own, rel=1e-10)
    point = surface.frame.iloc[8]  # (1, 1): directions that are not orthogonal are measured right
    together = {name: found.x[name] + found.y[name] for name in found.x}
    assert point["distance"] == pytest.approx(inner(together, together) ** 0.5, rel=1e-12)


def test_line_and_between() -> None:
    model = Quadratic()
    drawn = landscape.gaussian(model, seed=4, count=1)
    surface = landscape.line(model, own_loss, steps=5, seed=4)
    for row in surface.frame.itertuples():
        theta = model.theta.detach() + row.x * drawn.x["theta"]
        assert row.loss == pytest.approx(
            (theta @ model.matrix @ theta / 2 + model.linear @ theta + 3).item(), rel=1e-12
        )
    assert (surface.frame["y"] == 0).all()
    assert surface.grid().shape == (1, 5)
    a, b = Encoder(seed=0).double(), Encoder(seed=1).double()
    path = landscape.between(a, b, (F.cross_entropy, pairs()), steps=5, beyond=0.5)
    assert path.x.tolist() == [-0.5, 0, 0.5, 1, 1.5]
    ends = [landscape.slice(model, (F.cross_entropy, pairs()), steps=3).center["loss"] for model in (a, b)]
    assert path.grid()[0, [1, 3]] == pytest.approx(ends, rel=1e-10)
    with pytest.raises(UserError, match="give checkpoints of one model"):
        landscape.between(a, Encoder(width=16), (F.cross_entropy, pairs()))


def test_gradient_norm_along_the_slice() -> None:
    model = Quadratic()
    surface = landscape.slice(model, own_loss, steps=3, gradient_norm=True)
    drawn = landscape.gaussian(model)
    for row in surface.frame.itertuples():
        theta = model.theta.detach() + row.x * drawn.x["theta"] + row.y * drawn.y["theta"]
        assert row.gradient_norm == pytest.approx((model.matrix @ theta + model.linear).norm().item(), rel=1e-12)
    encoder = Encoder().double().eval()
    tokens, labels = (torch.cat(part) for part in zip(*pairs(), strict=True))
    F.cross_entropy(encoder(tokens), labels).backward()
    expected = sum(p.grad.square().sum() for p in encoder.parameters() if p.grad is not None).sqrt().item()
    assert landscape.slice(encoder, (F.cross_entropy, pairs()), steps=3, gradient_norm=True).center[
        "gradient_norm"
    ] == (pytest.approx(expected, rel=1e-10))


def test_paper_grid_misses_the_centre_and_says_its_value() -> None:
    from stability.landscape import grid

    np.testing.assert_allclose(grid.axis(200, 1.0), np.linspace(-1, 1, 200), atol=1e-15)
    for steps in (3, 21, 41, 51, 201):
        along = grid.axis(steps, 0.7)
        assert along[steps // 2] == 0
        np.testing.assert_allclose(along, np.linspace(-0.7, 0.7, steps), atol=1e-15)
    surface = landscape.slice(Quadratic(), own_loss, steps=4)
    assert 0 not in surface.x
    assert surface.center["loss"] == pytest.approx(own_loss(Quadratic()).item(), rel=1e-12)
    paper = landscape.slice(Quadratic(), own_loss, paper_compat=True)
    assert len(paper.frame) == 40000
    assert paper.metadata["direction_details"]["orthogonal"] is False


def test_batches_may_be_mappings_and_sums() -> None:
    class Named(Encoder):
        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> torch.Tensor:  # type: ignore[override]
            return super().forward(input_ids)

    plain = landscape.slice(Encoder(), (F.cross_entropy, pairs()), steps=3)
    named = [
        {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels} for tokens, labels in pairs()
    ]
    nested = [({"input_ids": tokens}, labels) for tokens, labels in pairs()]
    for batches in (named, nested, iter(nested)):
        surface = landscape.slice(Named(), (F.cross_entropy, batches), steps=3)
        np.testing.assert_array_equal(surface.grid(), plain.grid())

    def total(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction="sum")

    summed = landscape.slice(Encoder(), (total, pairs()), steps=3, reduction="sum")
    np.testing.assert_allclose(summed.grid() / 20, plain.grid(), rtol=1e-6)
    with pytest.raises(UserError, match="each batch to be"):
        landscape.slice(Encoder(), (F.cross_entropy, [torch.zeros(2)]), steps=3)
