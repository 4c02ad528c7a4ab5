"""Time of a training step: our top-5 and full attention beside a plain rendering of the paper's method.

The plain method computes the top-k indices, fills a dense boolean mask sample by sample, fills the other logits with
minus infinity and takes a dense softmax. All are timed in turn, round by round, so that other load on the machine hits
them alike; the median of each is reported. Beside them stands what the full step's matrix products alone would take at
the rate measured in the same run. Run: python -P benchmarks/training.py [even-pairs] [listops]
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import stability.attention
from probes import attend as fast_attend
from probes.selection import Selection
from stability.model import Encoder, EncoderConfig
from stability.settings import TrainingConfig
from stability.training import make_optimizer, step

SHAPES = {"even-pairs": (25, 40, 5, 15), "listops": (25, 600, 10, 2)}  # batch, length, blocks, rounds


def plain_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    selection: Selection,
    *,
    allowed: Tensor | None = None,
    scale: float = 1.0,
    dropout: Callable[[Tensor], Tensor] | float = 0.0,
) -> Tensor:
    """Attention to the top keys by a dense mask that is filled sample by sample."""
    logits = query @ key.transpose(-2, -1) * scale
    chosen = logits.topk(5, dim=-1).indices
    mask = torch.zeros(logits.shape, dtype=torch.bool)
    rows = torch.arange(logits.shape[-2])[:, None]
    for sample in range(logits.shape[0]):
        for head in range(logits.shape[1]):
            mask[sample, head, rows, chosen[sample, head]] = True
    weights = logits.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.nn.functional.dropout(weights, 0.01) @ value


def make_step(attention: str, attend: Callable[..., Tensor], shape: tuple[int, int, int]) -> Callable[[], None]:
    """Build a model and return one training step of it."""
    batch, length, blocks = shape
    model = Encoder(EncoderConfig(tokens=16, classes=10, attention=attention, blocks=blocks), seed=1).train()
    model.use_generator(torch.Generator().manual_seed(0))
    optimizer = make_optimizer(model, TrainingConfig())
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randint(0, 15, (batch, length), generator=generator)
    labels = torch.randint(0, 10, (batch,), generator=generator)

    def run() -> None:
        stability.attention.attend = attend  # type: ignore[assignment]
        step(model, optimizer, inputs, labels, 0.5)

    return run


def floor(shape: tuple[int, int, int]) -> float:
    """Seconds that the matrix products of a full step take at the rate of a large product here."""
    batch, length, blocks = shape
    a = torch.randn(1000, 1000)
    rates = []
    for _ in range(5):
        begun = time.perf_counter()
        a @ a
        rates.append(2e9 / (time.perf_counter() - begun))
    tokens = batch * length
    forward = blocks * (2 * tokens * 64 * 64 * 6 + 2 * 2 * batch * length * length * 64)
    return 3 * forward / max(rates)


def measure(name: str) -> dict[str, float]:
    """Time all three at one shape."""
    *shape, rounds = SHAPES[name]
    size = (shape[0], shape[1], shape[2])
    steps = {
        "full": make_step("full", fast_attend, size),
        "top-5": make_step("topk:5", fast_attend, size),
        "plain": make_step("topk:5", plain_attend, size),
    }
    times: dict[str, list[float]] = {key: [] for key in steps}
    for number in range(rounds + 1):
        for key, run in steps.items():
            begun = time.perf_counter()
            run()
            if number:  # the first round warms up
                times[key].append(time.perf_counter() - begun)
    result = {f"{key}_ms": 1e3 * statistics.median(value) for key, value in times.items()}
    result["matrix_products_of_full_ms"] = 1e3 * floor(size)
    result["plain_over_top5"] = result["plain_ms"] / result["top-5_ms"]
    result["top5_over_full"] = result["top-5_ms"] / result["full_ms"]
    return result


def main() -> None:
    """Measure the shapes that were named, print and record them."""
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(SHAPES)
    record = {"machine": platform.processor() or platform.machine(), "torch": torch.__version__, "threads": 1}
    results = {name: measure(name) for name in names}
    for name, values in results.items():
        print(name, {key: round(value, 2) for key, value in values.items()})
    target = Path(__file__).parent / "results" / "training.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps({**record, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
