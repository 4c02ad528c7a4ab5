"""Slices against closed forms: parabola, centre, geometry, and a model left as it was."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from toy_models import Encoder, Quadratic, own_loss, pairs

from stability import landscape
from stability.errors import UserError
from stability.landscape import directions


def test_quadratic_gives_the_exact_parabola() -> None:
    model = Quadratic()
    surface = landscape.slice(model, own_loss, steps=7, radius=2.0, seed=3)
    drawn = directions.gaussian(model, seed=3)
    dx, dy = drawn.x["theta"].numpy(), drawn.y["theta"].numpy()
    theta, matrix, linear = (t.detach().numpy() for t in (model.theta, model.matrix, model.linear))
    for row in surface.frame.itertuples():
        point = theta + row.x * dx + row.y * dy
        assert row.loss == pytest.approx(point @ matrix @ point / 2 + linear @ point + 3, rel=1e-12)
        assert row.distance == pytest.approx(np.linalg.norm(point - theta), rel=1e-12, abs=1e-14)
        assert row.relative_distance == pytest.approx(row.distance / np.linalg.norm(theta), rel=1e-12)
    assert len(surface.frame) == 49


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
@pytest.mark.parametrize("method", ["in place", "vmap"])
def test_centre_is_the_models_own_loss(dtype: torch.dtype, tolerance: float, method: str) -> None:
    model = Encoder().to(dtype)
    batches = pairs()
    surface = landscape.slice(
        model, (F.cross_entropy, batches), steps=3, method=method, functions={"accuracy": landscape.accuracy}
    )
    tokens, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    with torch.no_grad():
        output = model.eval()(tokens)
    assert surface.grid("loss")[1, 1] == pytest.approx(F.cross_entropy(output, labels).item(), rel=0, abs=tolerance)
    assert surface.grid("accuracy")[1, 1] == (output.argmax(-1) == labels).double().mean().item()
    assert surface.center["loss"] == pytest.approx(surface.grid("loss")[1, 1], abs=tolerance)


def test_both_methods_agree_away_from_the_centre() -> None:
    model = Encoder().double()
    one, other = (landscape.slice(model, (F.cross_entropy, pairs()), steps=5, method=m) for m in ("in place", "vmap"))
    np.testing.assert_allclose(one.grid(), other.grid(), rtol=1e-12)


def test_grid_orientation_and_columns() -> None:
    model = Quadratic(2)
    with torch.no_grad():
        model.theta.zero_()
        model.matrix.zero_()
        model.linear.copy_(torch.tensor([1.0, 10.0]))
    given = landscape.Directions(
        {"theta": torch.tensor([1.0, 0.0]).double()}, {"theta": torch.tensor([0.0, 1.0]).double()}
    )
    surface = landscape.slice(model, own_loss, directions=given, steps=3)
    np.testing.assert_allclose(surface.grid(), [[-8, -7, -6], [2, 3, 4], [12, 13, 14]])  # rows are y
    assert list(surface.frame.columns) == ["x", "y", "distance", "relative_distance", "loss", "seconds"]
    assert surface.frame["relative_distance"].isna().all()  # a model whose parameters are all 0 has no scale


@pytest.mark.parametrize("fails", [False, True])
def test_model_is_untouched_also_after_an_exception(fails: bool) -> None:
    model = Encoder()
    model.train()
    model.drop.eval()
    F.cross_entropy(model(pairs()[0][0]), pairs()[0][1]).backward()
    before = copy.deepcopy(model.state_dict())
    pointers = [parameter.data_ptr() for parameter in model.parameters()]
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    calls = []

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if fails and len(calls) > 9:
            raise RuntimeError("no")
        return F.cross_entropy(output, target)

    if fails:
        with pytest.raises(RuntimeError, match="no"):
            landscape.slice(model, (loss, pairs()), steps=3, method="in place")
    else:
        landscape.slice(model, (loss, pairs()), steps=3, method="in place", gradient_norm=True)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.training
    assert not model.drop.training
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert pointers == [parameter.data_ptr() for parameter in model.parameters()]
    kept = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(gradients, kept, strict=True))


def test_random_model_is_refused() -> None:
    class Leaky(Encoder):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().forward(tokens), 0.01)

    tokens, labels = (torch.cat(part) for part in zip(*pairs(400), strict=True))
    with pytest.raises(UserError, match="two evaluations of the centre to agree"):
        landscape.slice(Leaky(), (F.cross_entropy, [(tokens, labels)]), steps=3)


def test_nan_region_is_kept_and_counted() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.theta = nn.Parameter(torch.tensor([1.0, 1.0], dtype=torch.float64))

        def forward(self) -> torch.Tensor:
            return self.theta[0].sqrt() + 1 / self.theta[1].clamp_min(0)

    given = landscape.Directions(
        {"theta": torch.tensor([1.0, 0.0]).double()}, {"theta": torch.tensor([0.0, 1.0]).double()}
    )
    surface = landscape.slice(Root(), own_loss, directions=given, steps=5, radius=2.0)
    grid = surface.grid()
    assert np.isnan(grid[:, 0]).all()  # theta_0 = -1
    assert np.isinf(grid[:2, 1:]).all()  # theta_1 <= 0
    assert np.isfinite(grid[2:, 1:]).all()
    assert surface.non_finite == surface.metadata["non_finite"] == {"loss": 13}


def test_write_and_read_give_the_same_surface(tmp_path: Path) -> None:
    surface = landscape.slice(Quadratic(), own_loss, steps=3)
    again = landscape.Surface.read(surface.write(tmp_path / "surface.parquet"))
    assert again.frame.equals(surface.frame)
    assert again.metadata == surface.metadata


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 1}, "`steps` to be at least 2"),
        ({"radius": 0.0}, "`radius` to be a positive number"),
        ({"directions": "fancy"}, "`scaling` to be one of"),
        ({"method": "magic"}, "`method` to be auto"),
        ({"chunk": 0}, "`chunk` to be at least 1"),
        ({"reduction": "median"}, "`reduction` to be"),
        ({"functions": {"x": own_loss}}, "the surface's own columns"),
        (
            {"directions": landscape.Directions({"theta": torch.ones(3)}, {"theta": torch.ones(3)})},
            "of the model's own shapes",
        ),
        ({"directions": landscape.Directions({"theta": torch.ones(6)})}, "two directions for a slice"),
    ],
)
def test_mistakes_get_one_clear_sentence(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        landscape.slice(Quadratic(), own_loss, **arguments)  # type: ignore[arg-type]


def test_loss_of_another_form_is_refused() -> None:
    with pytest.raises(UserError, match="a function of the model or a pair"):
        landscape.slice(Quadratic(), 3.0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="at least one batch"):
        landscape.slice(Encoder(), (F.cross_entropy, []))
