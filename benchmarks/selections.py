"""How long each selection takes to choose its keys, as a multiple of one q k^T.

    python -m benchmarks.selections [--length 4096] [--heads 8] [--out benchmarks/results/selections.md]

Queries go through in blocks of 256; the logits of a block are computed first and not counted, nor is the floor: the
time of these products alone. CPU seconds, so that other work on the machine does not count; of each, the least of
`--repeat` runs, the floor's taken right before.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from probes.attention import AttentionCall
from probes.selection import LearnedGate, Selection, parse

NAMES = (
    "full", "topk:5", "topk:64", "topk:64:threshold", "hardmax", "top-p:0.9", "threshold:2", "entmax:1.5", "sparsemax",
    "bottom-k:64", "random-k:64", "random-k:64:0:replacement", "banded:64", "block:64", "strided:8:64",
    "streaming:4:512",
    "a-shape:16:128", "banded:64+global:1", "moba:64:4", "quest:16:8", "nsa-like:32:4+window:64",
    "vertical-slash:64:64", "lsh:16:4", "zeta:16", "cluster:16", "sinkhorn-like:64",
)  # fmt: skip
ROWS = 256


def make_call(length: int, heads: int, dim: int, *, causal: bool) -> AttentionCall:
    """Queries and keys whose logits spread as those of trained models do (a dispersion of about 8 nats)."""
    generator = torch.Generator().manual_seed(0)
    query, key = torch.randn(2, 1, heads, length, dim, generator=generator) * 1.1
    return AttentionCall("attention", 0, "self", query=query, key=key, scale=dim**-0.5, causal=causal)


def run(call: AttentionCall, act: Callable[[torch.Tensor, slice], object]) -> float:
    """Seconds that `act` takes over all blocks of logits; the logits themselves are not counted."""
    seconds = 0.0
    for start in range(0, call.shape[2], ROWS):
        rows = slice(start, start + ROWS)
        logits = call.logits(rows)
        before = time.process_time()
        act(logits, rows)
        seconds += time.process_time() - before
    return seconds


def floor(call: AttentionCall) -> float:
    """Seconds of the products alone."""
    before = time.process_time()
    for start in range(0, call.shape[2], ROWS):
        call.logits(slice(start, start + ROWS))
    return time.process_time() - before


def measure(call: AttentionCall, selection: Selection, repeat: int) -> tuple[float, float, float]:
    """Least seconds of the choice and of the floor, and the kept share."""
    chosen: list[torch.Tensor] = []

    def choose(logits: torch.Tensor, rows: slice) -> None:
        chosen.append(selection.keep(logits, fresh.allowed(rows), start=rows.start, call=fresh))

    times, floors = [], []
    for _ in range(repeat):
        chosen.clear()
        floors.append(floor(call))
        fresh = call.part(slice(0, 1), slice(0, call.shape[1]))  # nothing computed for an earlier run is used again
        times.append(run(fresh, choose))
    kept = sum(int(block.sum()) for block in chosen)
    allowed = sum(int(call.allowed(slice(s, s + ROWS)).sum()) for s in range(0, call.shape[2], ROWS))
    return min(times), min(floors), kept / allowed


def main() -> None:
    """Print and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--names", nargs="*", default=[*NAMES, "gate:64:4"])
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    blocks = -(-options.length // 64)
    gate = torch.randn(1, options.heads, blocks, blocks, generator=torch.Generator().manual_seed(1))
    lines = [
        "# Cost of selections",
        "",
        f"`python -m benchmarks.selections`: {options.length} keys and queries, {options.heads} heads, head dimension "
        f"{options.dim}, float32, {options.threads} thread(s), blocks of {ROWS} queries, least of {options.repeat} "
        f"runs; torch {torch.__version__}, {platform.machine()}, {os.cpu_count()} cores. CPU seconds of choosing the "
        "keys, and as a multiple of one q k^T over the same blocks taken right before.",
        "",
        "| selection | seconds, all keys | x q k^T | kept share | seconds, causal | x q k^T | kept share |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines), flush=True)
    with torch.no_grad():
        for name in options.names:
            cells = [f"`{name}`"]
            for causal in (False, True):
                call = make_call(options.length, options.heads, options.dim, causal=causal)
                selection = LearnedGate(64, 4, gate) if name.startswith("gate") else parse(name)
                seconds, products, share = measure(call, selection, options.repeat)
                cells += [f"{seconds:.2f}", f"{seconds / products:.1f}", f"{share:.4f}"]
            lines.append("| " + " | ".join(cells) + " |")
            print(lines[-1], flush=True)
    if options.out is not None:
        temporary = options.out.with_suffix(".part")
        temporary.write_text("\n".join(lines) + "\n")
        temporary.replace(options.out)


if __name__ == "__main__":
    main()
