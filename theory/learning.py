"""What the constants of the objective say about learning: convergence and stability of stochastic gradient descent.

[1] Ghadimi and Lan, Stochastic First- and Zeroth-Order Methods for Nonconvex Stochastic Programming, SIAM J. Optim.
2013.
[2] Hardt, Recht and Singer, Train Faster, Generalize Better: Stability of Stochastic Gradient Descent, ICML 2016.
"""

from __future__ import annotations

import sympy

from theory.bound import Bound
from theory.symbols import symbol

_lipschitz, _smooth, _steps = symbol("lipschitz"), symbol("smoothness"), symbol("steps")
_start, _noise = symbol("suboptimality"), symbol("noise")
_samples, _factor, _range = symbol("samples"), symbol("step_factor"), symbol("loss_range")

_convergence = 2 * _smooth * _start / _steps + 2 * _noise * sympy.sqrt(2 * _smooth * _start / _steps)
_power = 1 / (_smooth * _factor + 1)

gradient_norm = Bound(
    "sgd-gradient-norm",
    r"\min_t E \|\nabla f(\theta_t)\|^2",
    _convergence,
    "f is smooth with constant B; unbiased stochastic gradients with variance at most sigma^2; T steps of constant "
    "size min(1 / B, sqrt(2 D / (B sigma^2 T)))",
    "[1] Ghadimi and Lan 2013, Corollary 2.2 (with D_f^2 = 2 D / B and their free constant equal to D_f)",
)
gradient_norm_lipschitz = Bound(
    "sgd-gradient-norm-lipschitz",
    r"\min_t E \|\nabla f(\theta_t)\|^2",
    _convergence.subs(_noise, _lipschitz),
    "as sgd-gradient-norm, where the loss of each sample has the Lipschitz constant G, so that sigma is at most G",
    "[1] Ghadimi and Lan 2013, Corollary 2.2",
)
uniform_stability = Bound(
    "sgd-uniform-stability",
    r"\epsilon_{\mathrm{stab}}",
    _range
    * (1 + 1 / (_smooth * _factor))
    / (_samples - 1)
    * (2 * _factor * _lipschitz**2 / _range) ** _power
    * _steps ** (1 - _power),
    "the loss of each sample lies in an interval of length M and is Lipschitz with constant G and smooth with constant "
    "B in the parameters; T steps of SGD, step t of size at most a / t, sizes not increasing; it also bounds the "
    "expected generalisation gap",
    "[2] Hardt, Recht and Singer 2016, Theorem 3.12 (there M = 1; divide the loss by M, multiply the steps by it)",
)
BOUNDS = (gradient_norm, gradient_norm_lipschitz, uniform_stability)
