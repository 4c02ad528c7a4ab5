"""Loss slice and Lipschitz estimates of a model and loss of your own.

    python examples/landscape.py

Any torch module will do, with a function of the model as the loss or, as here, a loss function and batches. The figure
goes to landscape.png.
"""

import torch
import torch.nn.functional as F

from stability import landscape, lipschitz
from stability.landscape import figures

generator = torch.Generator().manual_seed(0)
points = torch.rand(512, 2, generator=generator) * 2 - 1
labels = (points.prod(1) > 0).long()  # which diagonal pair of quadrants
model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
for _ in range(300):
    optimizer.zero_grad()
    F.cross_entropy(model(points), labels).backward()
    optimizer.step()

batches = [(points, labels)]
surface = landscape.slice(
    model, (F.cross_entropy, batches), steps=31, seed=0, functions={"accuracy": landscape.accuracy}, gradient_norm=True
)
table = lipschitz.estimate(surface)
ax = figures.contour(surface)
ax.figure.savefig("landscape.png", dpi=120)

print(f"At the centre: {surface.center}")
print(f"One grid unit is a parameter distance of {surface.direction_norms[0]:.2f}; not finite: {surface.non_finite}")
print(table.query("function == 'loss' and unit == 'parameter'")[["radius", "p50", "p95", "max", "count", "bound"]])

# The directions of largest curvature, and slopes in many random directions instead of two.
sharpest = landscape.hessian(model, (F.cross_entropy, batches))
print(f"Largest Hessian eigenvalues: {sharpest.details['eigenvalues']}")
print(lipschitz.sample(model, (F.cross_entropy, batches), distances=[0.0, 1.0, 4.0], directions=100, progress=False))
