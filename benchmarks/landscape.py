"""Cost of a point of the loss surface on the even-pairs model, side by side in one run.

    python -m benchmarks.landscape [--sequences 5000] [--rounds 3] [--points 4] [--threads 1]

Compared, per point and alternating so that a busy machine hits all alike: the plain method (weights set in place, a
loop over batches, Python sums), the PyPI package `loss-landscapes`, and ours. Beside it the share of the rate that this
machine reaches in matrix products of the model's own shapes, the points per second in chunks against one at a time, and
two worker processes against one, one thread each. On a machine with a GPU the chunks are timed there too. Wall times on
a shared machine are noisy; CPU seconds are steadier.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import loss_landscapes
import numpy as np
import torch
import torch.nn.functional as F
from loss_landscapes.metrics import Loss
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from stability import landscape
from stability.landscape.evaluate import Evaluator
from stability.landscape.objective import make_objective
from stability.model import Encoder, EncoderConfig

BATCH = 128
Batches = list[tuple[Tensor, Tensor]]


def even_pairs(sequences: int) -> Batches:
    """Random sequences of 40 bits in batches of 128."""
    bits = torch.randint(0, 2, (sequences, 40), generator=torch.Generator().manual_seed(0))
    labels = (bits[:, 0] != bits[:, -1]).long()
    return list(zip(bits.split(BATCH), labels.split(BATCH), strict=True))


def plain(
    model: nn.Module, directions: landscape.Directions, batches: Batches, points: list[tuple[float, float]]
) -> None:
    """The usual way: set each weight, run each batch, add up Python numbers."""
    origin = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.eval()
    for x, y in points:
        for name, parameter in model.named_parameters():
            parameter.data = origin[name] + x * directions.x[name] + y * directions.y[name]
        loss, right, count = 0.0, 0, 0
        with torch.no_grad():
            for inputs, labels in batches:
                output = model(inputs)
                loss += F.cross_entropy(output, labels).item() * len(labels)
                right += (output.argmax(1) == labels).sum().item()
                count += len(labels)
        _ = loss / count, right / count
    for name, parameter in model.named_parameters():
        parameter.data = origin[name]


def timed(action: Callable[[], object], points: int) -> tuple[float, float]:
    """Wall and CPU seconds per point."""
    wall, cpu = time.perf_counter(), time.process_time()
    action()
    return (time.perf_counter() - wall) / points, (time.process_time() - cpu) / points


def product_rate(rows: int = BATCH * 40, width: int = 64, length: int = 40) -> float:
    """Floating-point operations per CPU second in the model's own matrix products, weighted as they occur in it."""
    a, w = torch.randn(rows, width), torch.randn(width, width)
    q = torch.randn(rows // length, length, width)

    def once() -> None:
        for _ in range(6):
            F.linear(a, w)
        weights = q @ q.transpose(1, 2)
        _ = weights @ q

    operations = 6 * 2 * rows * width * width + 2 * 2 * rows * length * width
    once()
    best = min(timed(lambda: [once() for _ in range(20)], 20)[1] for _ in range(5))
    return operations / best


def side_by_side(attention: str, batches: Batches, rounds: int, count: int) -> list[str]:
    """Compare the three on one model."""
    model = Encoder(EncoderConfig(tokens=3, classes=2, attention=attention)).eval()
    drawn = landscape.gaussian(model)
    points = [(0.01 * n, 0.01) for n in range(count)]
    functions = {"accuracy": landscape.accuracy}
    evaluator = Evaluator(model, make_objective((F.cross_entropy, batches), functions), drawn)
    method = evaluator.plan(points=441).method
    inputs, labels = (torch.cat(part) for part in zip(*batches, strict=True))
    side = max(2, round(count**0.5))
    sides: dict[str, tuple[Callable[[], object], int]] = {
        "plain": (lambda: plain(model, drawn, batches, points), count),
        "loss-landscapes": (
            lambda: loss_landscapes.random_plane(
                model, Loss(F.cross_entropy, inputs, labels), 1, side, "layer", deepcopy_model=True
            ),
            side * side,
        ),
        f"ours ({method}, chunks)": (lambda: evaluator.values(points, method), count),
        "ours, one point at a time": (lambda: [evaluator.values([point], method) for point in points], count),
    }
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    rates = []
    for action, _ in sides.values():
        action()
    for _ in range(rounds):
        rates.append(product_rate())
        for name, (action, number) in sides.items():
            found[name].append(timed(action, number))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(batches[0][0])
    operations = counter.get_total_flops() / len(batches[0][0]) * len(inputs)
    ours = statistics.median(cpu for _, cpu in found[f"ours ({method}, chunks)"])
    rate = statistics.median(rates)
    lines = []
    for name, seconds in found.items():
        wall, cpu = (statistics.median(column) for column in zip(*seconds, strict=True))
        share = operations / cpu / rate
        lines.append(f"| {attention} | {name} | {wall:.2f} | {cpu:.2f} | {cpu / ours:.2f} | {share:.0%} |")
    return lines


def small_models() -> list[str]:
    """Where vmap over points wins: milliseconds a point, 16 points at once, by the size of the forward pass."""
    lines = []
    for width, length, batch in ((8, 6, 8), (8, 6, 64), (16, 10, 64), (32, 20, 32), (64, 40, 8), (64, 40, 32)):
        model = Encoder(EncoderConfig(tokens=3, classes=2, width=width, hidden=width)).eval()
        bits = torch.randint(0, 2, (batch, length), generator=torch.Generator().manual_seed(0))
        batches = [(bits, (bits[:, 0] != bits[:, -1]).long())]
        evaluator = Evaluator(model, make_objective((F.cross_entropy, batches)), landscape.gaussian(model))
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model(bits)
        points = [(0.01 * n, 0.01) for n in range(16)]
        cpu = {}
        for method in ("in place", "vmap"):
            evaluator.values(points, method)
            cpu[method] = min(timed(partial(evaluator.values, points, method), 16)[1] for _ in range(5)) * 1000
        size = counter.get_total_flops() / 1e6
        lines.append(
            f"| {size:.2f} | {cpu['in place']:.2f} | {cpu['vmap']:.2f} | {cpu['in place'] / cpu['vmap']:.2f} |"
        )
    return lines


def efficiency(batches: Batches, count: int) -> str:
    """Two processes against one, one thread each, both warm."""
    model = Encoder(EncoderConfig(tokens=3, classes=2)).eval()
    walls, cpus = [], []
    for workers in (1, 2):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            for steps in (3, count):  # the first trace warms up
                start = time.perf_counter()
                options = {"executor": pool, "chunk": 1, "threads": 1, "method": "in place", "progress": False}
                landscape.line(model, (F.cross_entropy, batches), steps=steps, **options)
                wall = time.perf_counter() - start
        walls.append(wall)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)  # counts the pool's processes once they have ended
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    gain = walls[0] / walls[1] / 2
    return (
        f"1 worker {walls[0]:.1f} s, 2 workers {walls[1]:.1f} s for {count} points: efficiency {gain:.2f}; "
        f"CPU seconds with start and warming up {cpus[0]:.1f} and {cpus[1]:.1f}"
    )


def on_gpu(batches: Batches) -> list[str]:
    """Points per second on a GPU, in chunks and one at a time."""
    model = Encoder(EncoderConfig(tokens=3, classes=2)).eval().cuda()
    moved = [(inputs.cuda(), labels.cuda()) for inputs, labels in batches]
    evaluator = Evaluator(model, make_objective((F.cross_entropy, moved)), landscape.gaussian(model))
    lines = []
    for method, chunk in (("in place", 1), ("in place", 16), ("vmap", 16), ("vmap", 64)):
        points = [(0.01 * n, 0.01) for n in range(chunk)]
        evaluator.values(points, method)
        torch.cuda.synchronize()
        wall = min(timed(lambda p=points, m=method: evaluator.values(p, m), chunk)[0] for _ in range(3))
        lines.append(f"| {torch.cuda.get_device_name()} | {method}, chunks of {chunk} | {1 / wall:.1f} points/s |")
    return lines


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--points", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    np.random.seed(0)  # noqa: NPY002 - loss-landscapes draws from the global generator
    batches = even_pairs(options.sequences)
    print(f"threads: {torch.get_num_threads()}; matrix products: {product_rate() / 1e9:.0f} GFLOP per CPU second")
    print("| attention | method | wall s a point | CPU s a point | CPU, against ours | share of the product rate |")
    print("| --- | --- | --- | --- | --- | --- |")
    for attention in ("full", "topk:5"):
        print("\n".join(side_by_side(attention, batches, options.rounds, options.points)))
    print("| million operations a forward pass | in place, CPU ms | vmap, CPU ms | ratio |\n| --- | --- | --- | --- |")
    print("\n".join(small_models()))
    print(efficiency(batches, 4 * options.points + 1))
    if torch.cuda.is_available():
        print("\n".join(on_gpu(batches)))


if __name__ == "__main__":
    main()
