"""Composition of constants, and what they say about learning, against plain arithmetic."""

from __future__ import annotations

import math

import numpy as np
import pytest

from theory import learning, network

BLOCKS = [
    network.Block(2.0, 5.0, 3.0, 0.5, 0.7, 1.5, 1.1, 4.0, 1.13),
    network.Block(0.5, 7.0, 2.0, 2.0, 1.0, 0.9, 2.0, 3.0),
]


def test_compose_against_plain_products():
    found = network.compose(BLOCKS, length=10, head_norm=3.0, pooled_norm=2.5)
    attention = [1 + 0.5 * 2.0, 1 + 2.0 * 0.5]
    mlp = [1 + 0.7 * 1.13 * 1.5 * 1.1, 1 + 1.0 * 0.9 * 2.0]
    end = math.sqrt(2) * 3.0 / 10
    assert math.exp(found.encoder) == pytest.approx(attention[0] * mlp[0] * attention[1] * mlp[1])
    assert math.exp(found.objective_input) == pytest.approx(end * attention[0] * mlp[0] * attention[1] * mlp[1])
    assert np.exp(found.behind_mlp) == pytest.approx([end * attention[1] * mlp[1], end])
    assert np.exp(found.behind_attention) == pytest.approx([end * attention[1] * mlp[1] * mlp[0], end * mlp[1]])
    assert np.exp(found.scores) == pytest.approx([5.0 * end * attention[1] * mlp[1] * mlp[0], 7.0 * end * mlp[1]])
    assert np.exp(found.values) == pytest.approx([3.0 * end * attention[1] * mlp[1] * mlp[0], 2.0 * end * mlp[1]])
    assert np.exp(found.mlp_in) == pytest.approx([1.13 * 1.1 * 40 * end * attention[1] * mlp[1], 2.0 * 30 * end])
    assert np.exp(found.mlp_out) == pytest.approx([1.13 * 1.5 * 40 * end * attention[1] * mlp[1], 0.9 * 30 * end])
    assert math.exp(found.head) == pytest.approx(math.sqrt(2) * 2.5)
    every = [*found.scores, *found.values, *found.mlp_in, *found.mlp_out, found.head]
    assert math.exp(found.objective_parameters) == pytest.approx(math.hypot(*np.exp(every)))


def test_deep_networks_stay_in_the_log_domain():
    wild = network.Block(1e300, 1e300, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
    found = network.compose([wild] * 50, length=10, head_norm=1.0, pooled_norm=1.0)
    assert found.encoder == pytest.approx(50 * (300 * math.log(10) + math.log(2)))
    assert math.isfinite(found.objective_parameters)
    assert math.isinf(
        network.compose([network.Block(math.inf, *[1.0] * 7)], length=2, head_norm=1, pooled_norm=1).encoder
    )


def test_no_blocks_are_refused():
    with pytest.raises(ValueError, match="at least one block"):
        network.compose([], length=2, head_norm=1.0, pooled_norm=1.0)


def test_layer_norm_slope_by_finite_differences():
    generator = np.random.default_rng(0)
    for _ in range(20):
        x = generator.standard_normal(6) * 10 ** generator.uniform(-2, 2)
        step = generator.standard_normal(6)
        step *= 1e-6 * x.std() / np.linalg.norm(step)

        def normed(v):
            return (v - v.mean()) / v.std()

        slope = np.linalg.norm(normed(x + step) - normed(x - step)) / (2 * np.linalg.norm(step))
        assert slope <= network.layer_norm(token_deviation=x.std()) * (1 + 1e-6)


def test_cross_entropy_is_root_two_lipschitz_and_no_less():
    generator = np.random.default_rng(1)
    logits = generator.standard_normal((1000, 4)) * 5
    weights = np.exp(logits - logits.max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    gradients = np.linalg.norm(weights - np.eye(4)[0], axis=1)
    assert gradients.max() <= math.sqrt(2)
    assert np.linalg.norm(np.array([0, 1, 0, 0]) - np.eye(4)[0]) == pytest.approx(math.sqrt(2))


def test_convergence_holds_for_noisy_descent_on_a_quadratic():
    """Mean squared gradient of SGD with the source's step size, averaged over runs, against the bound."""
    smoothness, noise, steps, runs = 4.0, 0.5, 200, 400
    curvature = np.array([4.0, 1.0, 0.1])
    generator = np.random.default_rng(2)
    x = np.tile([1.0, -2.0, 3.0], (runs, 1))
    start = 0.5 * float((curvature * x[0] ** 2).sum())
    size = min(1 / smoothness, math.sqrt(2 * start / (smoothness * noise**2 * steps)))
    squares = []
    for _ in range(steps):
        gradient = curvature * x
        squares.append((gradient**2).sum(1).mean())
        x = x - size * (gradient + noise / math.sqrt(3) * generator.standard_normal((runs, 3)))
    bound = learning.gradient_norm(smoothness=smoothness, suboptimality=start, noise=noise, steps=steps)
    assert min(squares) <= np.mean(squares) <= bound
    general = learning.gradient_norm_lipschitz(smoothness=smoothness, suboptimality=start, lipschitz=noise, steps=steps)
    assert general == pytest.approx(bound)


def test_uniform_stability_as_printed_and_scaled():
    values = {"smoothness": 2.0, "step_factor": 0.1, "samples": 100, "lipschitz": 3.0, "steps": 1000}
    printed = (1 + 1 / 0.2) / 99 * (2 * 0.1 * 9) ** (1 / 1.2) * 1000 ** (0.2 / 1.2)
    assert learning.uniform_stability(**values, loss_range=1.0) == pytest.approx(printed)
    # Dividing loss, constants and the result by M while multiplying the steps by M is the same run of SGD.
    scaled = {"smoothness": 2 / 5, "step_factor": 0.5, "samples": 100, "lipschitz": 3 / 5, "steps": 1000}
    assert learning.uniform_stability(**values, loss_range=5.0) == pytest.approx(
        5 * learning.uniform_stability(**scaled, loss_range=1.0)
    )
    assert np.isinf(learning.uniform_stability(**(values | {"samples": 1}), loss_range=1.0))
