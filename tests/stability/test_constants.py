"""The network's constants against derivatives and finite differences of a real small encoder."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from stability.constants import constants
from stability.model import Encoder, EncoderConfig

CASES = [
    {"attention": "full"},
    {"attention": "topk:3"},
    {"attention": "topk:3", "heads": 2, "activation": "gelu"},
    {"attention": "banded:3", "activation": "mish", "hidden": 12},
    {"attention": "full", "heads": 4, "blocks": 3},
]


def encoder(seed, scale=1.0, **settings):
    config = EncoderConfig(tokens=7, classes=3, width=8, **({"blocks": 2, "hidden": 8} | settings))
    model = Encoder(config, seed=seed).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(scale)
    tokens = torch.randint(0, 7, (9,), generator=torch.Generator().manual_seed(seed))
    return model, tokens


def loss_of(model, tokens, change=None, label=1):
    """Cross-entropy, after `change` was added to the first block's input."""

    def shift(_, inputs):
        return (inputs[0] + change, *inputs[1:])

    handle = model.blocks[0].register_forward_pre_hook(shift) if change is not None else None
    try:
        return F.cross_entropy(model(tokens[None]), torch.tensor([label]))
    finally:
        if handle is not None:
            handle.remove()


def norm_21(tokens):
    return float(tokens.norm(dim=-1).sum())


@pytest.mark.parametrize("form", ["measured", "sharp"])
@pytest.mark.parametrize("settings", CASES, ids=str)
def test_input_constant_is_at_least_every_finite_difference(settings, form):
    for seed in range(3):
        model, tokens = encoder(seed, scale=(1.0, 3.0, 0.3)[seed], **settings)
        bound = math.exp(constants(model, tokens, form=form).network.objective_input)
        change = torch.zeros(9, 8, dtype=torch.float64, requires_grad=True)
        (gradient,) = torch.autograd.grad(loss_of(model, tokens, change), change)
        steepest = torch.zeros_like(gradient)
        worst = gradient.norm(dim=1).argmax()
        steepest[worst] = gradient[worst]
        generator = torch.Generator().manual_seed(seed)
        random = [torch.randn(9, 8, dtype=torch.float64, generator=generator) for _ in range(5)]
        for direction in [steepest, gradient, *random]:
            unit = direction / norm_21(direction)
            with torch.no_grad():
                up, down = loss_of(model, tokens, 1e-6 * unit), loss_of(model, tokens, -1e-6 * unit)
            measured = abs(float(up - down)) / 2e-6
            assert 0 < measured <= bound
        # The derivative's dual norm is the largest over all directions.
        assert float(gradient.norm(dim=1).max()) <= bound


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_encoder_constant_is_at_least_every_finite_difference(settings):
    model, tokens = encoder(5, scale=2.0, **settings)
    bound = math.exp(constants(model, tokens).network.encoder)
    last = []
    model.blocks[-1].register_forward_hook(lambda _, inputs, output: last.append(output.detach()[0]))
    generator = torch.Generator().manual_seed(0)
    for key in range(9):
        unit = torch.zeros(9, 8, dtype=torch.float64)
        unit[key] = torch.randn(8, dtype=torch.float64, generator=generator)
        unit /= norm_21(unit)
        with torch.no_grad():
            loss_of(model, tokens, 1e-6 * unit)
            loss_of(model, tokens, -1e-6 * unit)
        assert 0 < norm_21(last[-2] - last[-1]) / 2e-6 <= bound


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_parameter_constants_are_at_least_gradients_and_finite_differences(settings):
    for seed in range(3):
        model, tokens = encoder(seed, scale=(1.0, 2.0, 0.5)[seed], **settings)
        found = constants(model, tokens)
        loss_of(model, tokens).backward()
        squares = {}
        for name, parameter in model.named_parameters():
            module = name.rsplit(".", 1)[0]
            squares[module] = squares.get(module, 0.0) + float(parameter.grad.square().sum())
        assert set(squares) == set(found.parameters)
        for module, square in squares.items():
            assert math.sqrt(square) <= math.exp(found.parameters[module]), module
        total = math.exp(found.objective_parameters)
        assert math.sqrt(sum(squares.values())) <= total
        directions = [[p.grad.clone() for p in model.parameters()], [torch.randn_like(p) for p in model.parameters()]]
        for direction in directions:
            size = math.sqrt(sum(float(one.square().sum()) for one in direction))
            losses = []
            for sign in (1, -1):
                with torch.no_grad():
                    for parameter, one in zip(model.parameters(), direction, strict=True):
                        parameter.add_(one, alpha=sign * 1e-6 / size)
                    losses.append(float(loss_of(model, tokens)))
                    for parameter, one in zip(model.parameters(), direction, strict=True):
                        parameter.sub_(one, alpha=sign * 1e-6 / size)
            assert 0 < abs(losses[0] - losses[1]) / 2e-6 <= total


def test_measured_form_is_at_most_the_sharp_one():
    model, tokens = encoder(1, attention="topk:3")
    measured, sharp = (constants(model, tokens, form=form).network for form in ("measured", "sharp"))
    assert measured.objective_input <= sharp.objective_input


def test_the_model_is_left_as_it_was():
    model, tokens = encoder(0, attention="topk:3")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    model.train()
    constants(model, tokens)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_other_encoders_are_refused():
    model, tokens = encoder(0, causal=True)
    with pytest.raises(ValueError, match="no causal mask"):
        constants(model, tokens)
    model, tokens = encoder(0)
    with pytest.raises(ValueError, match=r"one sequence without padding.*\(1, 9\)"):
        constants(model, tokens[None])


def test_activation_slopes_are_upper_bounds():
    x = torch.linspace(-6, 6, 200_001, dtype=torch.float64, requires_grad=True)
    from stability.constants import ACTIVATION
    from stability.model import ACTIVATIONS

    for name, function in ACTIVATIONS.items():
        (slope,) = torch.autograd.grad(function(x).sum(), x)
        assert ACTIVATION[name] - 0.01 <= float(slope.abs().max()) <= ACTIVATION[name]


@pytest.mark.parametrize(("attention", "length"), [("topk:1", 7), ("full", 1)])
def test_a_softmax_that_cannot_move_has_the_constant_zero(attention, length):
    model = Encoder(EncoderConfig(tokens=9, classes=4, attention=attention, blocks=2, width=8, hidden=12), seed=0)
    found = constants(model.eval(), torch.arange(length))
    moving = {name: log for name, log in found.parameters.items() if not name.endswith((".query", ".key"))}
    still = {name: log for name, log in found.parameters.items() if name.endswith((".query", ".key"))}
    assert still
    assert all(log == -math.inf for log in still.values())
    assert all(math.isfinite(log) for log in moving.values())
