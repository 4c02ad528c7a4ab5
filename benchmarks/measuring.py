"""What probing costs: time beside the model's plain forward pass, and memory beside plain attention.

    python -m benchmarks.measuring            # a few minutes; writes benchmarks/results/measuring.md
    python -m benchmarks.measuring --quick    # a smaller version, printed only

The statistics are those of full attention and top-5 together, every metric of the table. Ratios are taken side by side
in one process, in CPU seconds of one thread, the best of the rounds.
"""

from __future__ import annotations

import argparse
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

# Run as a script, this file would hide the package of the same name.
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import probes
from probes import leading
from probes.attention import AttentionCall
from probes.scan import scan

RESULTS = Path(__file__).parent / "results" / "measuring.md"
SELECTIONS = [probes.Full(), probes.TopK(5)]


def bert(length: int) -> nn.Module:
    """Two layers of BERT-base's shape."""
    from transformers import BertConfig, BertModel

    config = BertConfig(num_hidden_layers=2, max_position_embeddings=length, attn_implementation="sdpa")
    return BertModel(config).eval()


def gpt2(length: int) -> nn.Module:
    """Two layers of GPT-2's shape."""
    from transformers import GPT2Config, GPT2Model

    return GPT2Model(GPT2Config(n_layer=2, n_positions=length, attn_implementation="sdpa")).eval()


def best(action: Callable[[], object], rounds: int) -> float:
    """CPU seconds of the fastest round: other work on the machine disturbs them less than the clock's."""
    times = []
    for _ in range(rounds):
        start = time.process_time()
        action()
        times.append(time.process_time() - start)
    return min(times)


def floor(calls: list[AttentionCall]) -> Callable[[], None]:
    """One more product of queries and keys, in tiles, with the buffer reused: less than this no statistic can cost."""

    def action() -> None:
        for call in calls:
            query, key = call.query, call.key
            assert query is not None
            assert key is not None
            length = query.shape[2]
            for first in range(0, length, 128):
                end = min(first + 128, length) if call.causal else length
                torch.matmul(query[:, :, first : first + 128], key[:, :, :end].mT)

    return action


def ratios(build: Callable[[int], nn.Module], length: int, rounds: int, fast: bool) -> dict[str, float]:
    """Times for one model and length."""
    torch.manual_seed(0)
    model = build(length)
    ids = torch.randint(0, 1000, (1, length))
    with torch.no_grad(), patch.object(leading, "ACCELERATED", fast and leading.ACCELERATED):
        with probes.capture(model) as calls:
            model(ids)

        def watched() -> None:
            with probes.watch(model, SELECTIONS):
                model(ids)

        if fast:
            watched()  # compiles
        plain = best(lambda: model(ids), rounds)
        both = best(watched, rounds)
        product = best(floor(calls), rounds)
    return {"plain": plain, "probe": both - plain, "ratio": (both - plain) / plain, "floor": product / plain}


def attention_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of 16384 tokens and 8 heads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, 16384, 64, generator=generator) for _ in range(3))
    return q, k, v


def peak(what: str) -> float:
    """Peak memory of a process that does one thing, in MiB."""
    run = subprocess.run([sys.executable, __file__, "--memory", what], capture_output=True, text=True, check=True)
    return float(run.stdout.split()[-1])


def measure_memory(what: str) -> None:
    """Do one thing and print the peak memory of this process."""
    q, k, v = attention_inputs()
    with torch.no_grad():
        if what == "attention":
            F.scaled_dot_product_attention(q, k, v)
        elif what == "probe":
            call = AttentionCall("m", 0, "self", query=q, key=k, value=v, scale=64**-0.5)
            scan(call, SELECTIONS, torch.ones(1, 16384, dtype=torch.bool))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)


def report(lengths: list[int]) -> str:
    """Everything, as a page."""
    lines = [
        "# What probing costs",
        "",
        "Written by `python -m benchmarks.measuring`: statistics of full attention and top-5 together, all metrics,",
        "against the model's plain forward pass (transformers, sdpa, float32, two layers of its shape, batch 1), in",
        "CPU seconds.",
        f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}.",
        "",
        "| model | length | forward (s) | one more q k^T / forward | probe / forward, torch | probe / forward, numba |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, build in (("BERT-base", bert), ("GPT-2", gpt2)):
        for length in lengths:
            rounds = 3 if length < 1000 else 1
            slow = ratios(build, length, rounds, fast=False)
            quick = ratios(build, length, rounds, fast=True) if leading.ACCELERATED else None
            last = "not installed" if quick is None else f"{quick['ratio']:.2f}"
            lines.append(
                f"| {name} | {length} | {slow['plain']:.3f} | {slow['floor']:.2f} | {slow['ratio']:.2f} | {last} |"
            )
            print(lines[-1], flush=True)
    base, attention, probe = (peak(what) for what in ("nothing", "attention", "probe"))
    lines += [
        "",
        "Peak memory of a process at 16384 tokens, 8 heads, head dimension 64 (MiB):",
        "",
        "| q, k, v alone | plain attention | all statistics | ratio |",
        "| --- | --- | --- | --- |",
        f"| {base:.0f} | {attention:.0f} | {probe:.0f} | {probe / attention:.2f} |",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="length 512 only, printed, not written")
    parser.add_argument("--memory", choices=["nothing", "attention", "probe"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory:
        measure_memory(given.memory)
        return
    torch.set_num_threads(1)
    page = report([512] if given.quick else [512, 4096])
    print(page)
    if not given.quick:
        RESULTS.parent.mkdir(exist_ok=True)
        RESULTS.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
