"""The command line `stability`: each command reads files, writes files, and says where.

Nothing heavy is imported here; each command imports what it needs when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stability import __version__

if TYPE_CHECKING:
    import pandas as pd

app = typer.Typer(
    name="stability",
    help="Measure the softmax stability of attention, check the bounds, draw the loss landscape.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

Force = Annotated[bool, typer.Option("--force", help="Replace what is there.")]


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stability {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for everything that the demo makes.")] = Path("demo"),
    seed: Annotated[int, typer.Option(help="Seed of data, initialisation and training.")] = 1,
    epochs: Annotated[int, typer.Option(help="Epochs after which training stops.")] = 20,
    steps: Annotated[int, typer.Option(help="Points along each side of the loss slices.")] = 21,
    force: Force = False,
) -> None:
    """Train a pair, measure it and a language model, check the inequalities, draw the landscapes, write a report."""
    from stability.demo import run_demo

    run_demo(out, seed=seed, epochs=epochs, steps=steps, force=force)


@app.command()
def train(
    task: Annotated[str, typer.Argument(help="The task, such as even-pairs.")],
    attention: Annotated[str, typer.Option(help="The selection that the model attends with, such as topk:5.")] = "full",
    seed: Annotated[int, typer.Option(help="Seed of data, initial weights, batch order and dropout.")] = 1,
    out: Annotated[Path | None, typer.Option(help="The run folder; runs/TASK-ATTENTION-seedN if omitted.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data; the paper's number if omitted.")] = None,
    stop_at: Annotated[float | None, typer.Option(help="Training accuracy, 0 to 1, at which to stop.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="An option of the task, NAME=VALUE; repeatable.")] = None,
    blocks: Annotated[int | None, typer.Option(help="Number of blocks.", show_default=False)] = None,
    width: Annotated[int | None, typer.Option(help="Size of a token's vector.")] = None,
    hidden: Annotated[int | None, typer.Option(help="Size of the MLP's hidden layer.")] = None,
    heads: Annotated[int | None, typer.Option(help="Attention heads.")] = None,
    activation: Annotated[str | None, typer.Option(help="relu, gelu or mish.")] = None,
    dropout: Annotated[float | None, typer.Option(help="Dropout rate in training.")] = None,
    causal: Annotated[bool | None, typer.Option("--causal/--no-causal", help="Attend to earlier tokens only.")] = None,
    inverse_temperature: Annotated[float | None, typer.Option(help="Factor on the logits.")] = None,
    optimizer: Annotated[str | None, typer.Option(help="sgd or adam.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate of the first epoch.")] = None,
    decay: Annotated[float | None, typer.Option(help="Factor on the learning rate after each epoch.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Sequences in a step.")] = None,
    clip: Annotated[float | None, typer.Option(help="Largest gradient norm.")] = None,
    paper_compat: Annotated[
        bool, typer.Option("--paper-compat", help="Pad and attend as the paper's code does.")
    ] = False,
    scalable_softmax: Annotated[bool, typer.Option("--scalable-softmax", help="Logits times log of keys.")] = False,
    head_width: Annotated[int | None, typer.Option(help="Size of a head; width / heads if omitted.")] = None,
    seeds: Annotated[int | None, typer.Option(help="Train this many seeds, a run folder each below --out.")] = None,
    workers: Annotated[int, typer.Option(help="Processes for --seeds.")] = 1,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted or finished run.")] = False,
    force: Force = False,
) -> None:
    """Train the paper's encoder on a task and write a run folder."""
    from stability.commands import train as commands

    settings: dict[str, Any] = {
        "epochs": epochs,
        "stop_at": stop_at,
        "blocks": blocks,
        "width": width,
        "hidden": hidden,
        "heads": heads,
        "head_width": head_width,
        "activation": activation,
        "dropout": dropout,
        "causal": causal,
        "inverse_temperature": inverse_temperature,
        "scalable_softmax": scalable_softmax or None,
        "optimizer": optimizer,
        "learning_rate": learning_rate,
        "decay": decay,
        "batch_size": batch_size,
        "clip": clip,
        "paper_compat": paper_compat or None,
    }
    options = commands.task_options(option or [])
    if seeds is not None:
        _show_outcomes(commands.run_seeds(task, attention, seeds, seed, out, workers, options, **settings))
        return
    run = commands.run_train(task, attention, seed, out, force, resume, task_options=options, **settings)
    typer.echo("\n".join(commands.words(run)))


def _show_outcomes(outcomes: dict[Path, str]) -> None:
    for folder, outcome in outcomes.items():
        typer.echo(f"{folder}: {outcome}")


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="A TOML file that says which runs to do.")],
    workers: Annotated[int, typer.Option(help="Processes, one thread each.")] = 1,
) -> None:
    """Do the runs of a sweep file that are not done yet, one run folder each."""
    from stability.commands.train import run_sweep

    _show_outcomes(run_sweep(file, workers))


@app.command()
def summary(
    folder: Annotated[Path, typer.Argument(help="A folder of run folders.")],
    out: Annotated[Path | None, typer.Option(help="A Parquet file for the table.")] = None,
    force: Force = False,
) -> None:
    """Summarise run folders: epochs to 95 %, accuracies, speed-up against full attention."""
    from stability.commands.train import run_summary
    from stability.summary import to_text

    typer.echo(to_text(run_summary(folder, out, force)))


@app.command()
def probe(
    checkpoint: Annotated[Path, typer.Argument(help="A run folder, a transformers folder, or a checkpoint file.")],
    select: Annotated[list[str] | None, typer.Option(help="A selection, such as topk:5; repeatable.")] = None,
    text: Annotated[Path | None, typer.Option(help="A UTF-8 text file, one document a line.")] = None,
    dataset: Annotated[Path | None, typer.Option(help="Token ids, .npy or .parquet.")] = None,
    limit: Annotated[int | None, typer.Option(help="Number of sequences or documents.")] = None,
    length: Annotated[int | None, typer.Option(help="Tokens to pack text to, or to cut sequences to.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in a batch.")] = 32,
    queries: Annotated[float, typer.Option(help="Share of the queries to look at.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of their choice.")] = 0,
    include_padding: Annotated[bool, typer.Option("--include-padding", help="Count padded queries too.")] = False,
    on_missing: Annotated[str, typer.Option(help="raise or warn if a layer's attention can't be read.")] = "raise",
    memory: Annotated[float, typer.Option(help="Gigabytes of values to keep for exact percentiles.")] = 1.0,
    shard: Annotated[str | None, typer.Option(help="I/N: measure a part, for stability merge.")] = None,
    raw: Annotated[Path | None, typer.Option(help="A new folder for every query's own values.")] = None,
    out: Annotated[Path | None, typer.Option(help="Table or folder to write; the run folder if omitted.")] = None,
    force: Force = False,
) -> None:
    """Measure dispersion, separation, sink ratio and more for every head of a checkpoint."""
    from stability.commands.probe import run_probe
    from stability.errors import UserError

    if on_missing not in ("raise", "warn"):
        raise UserError(f"Expected --on-missing to be raise or warn, but got {on_missing!r}.")
    table = run_probe(
        checkpoint,
        select or ["full"],
        text=text,
        dataset=dataset,
        limit=limit,
        length=length,
        batch_size=batch_size,
        out=out,
        force=force,
        shard=shard,
        queries=queries,
        seed=seed,
        include_padding=include_padding,
        on_missing="warn" if on_missing == "warn" else "raise",
        memory=memory,
        raw=raw,
    )
    if shard is None:
        _show_measurements(table)
    typer.echo(f"Table: {table.attrs['path']}")


@app.command()
def merge(
    parts: Annotated[list[Path], typer.Argument(help="All parts that probe --shard wrote.")],
    out: Annotated[Path | None, typer.Option(help="Table or folder to write.")] = None,
    force: Force = False,
) -> None:
    """Make one measurement table of the parts of a sharded measurement."""
    from stability.commands.probe import run_merge

    table = run_merge(parts, out, force)
    _show_measurements(table)
    typer.echo(f"Table: {table.attrs['path']}")


def _show_measurements(table: pd.DataFrame) -> None:
    columns = ["selection", "metric", "count", "undefined", "p50", "p75", "p90", "p95", "max"]
    shown = table[(table["scope"] == "model") & table["metric"].isin(["dispersion", "separation", "sink_ratio"])]
    typer.echo("All layers and heads together (dispersion and separation in nats):")
    typer.echo(shown[columns].to_string(index=False, float_format="{:.4g}".format))


@app.command()
def selections() -> None:
    """List the selections: how each is written, its kind, its theorem, what it keeps."""
    from stability.commands.selections import list_selections

    typer.echo(list_selections())


@app.command()
def landscape(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint with labelled data, such as a run folder.")],
    steps: Annotated[int, typer.Option(help="Points along each direction; odd numbers include the centre.")] = 51,
    radius: Annotated[float, typer.Option(help="Largest coordinate, in multiples of the directions.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Seed of the directions.")] = 0,
    directions: Annotated[
        str, typer.Option(help="tensor, filter, layer, unscaled, hessian, pca or checkpoints.")
    ] = "tensor",
    reuse: Annotated[Path | None, typer.Option(help="A directions.safetensors of an earlier run to use.")] = None,
    to: Annotated[list[Path] | None, typer.Option(help="A further checkpoint, for pca and checkpoints.")] = None,
    orthogonal: Annotated[bool, typer.Option(help="Make the two directions orthogonal after scaling.")] = True,
    keep_biases: Annotated[bool, typer.Option(help="Move biases too.")] = True,
    keep_norms: Annotated[bool, typer.Option(help="Move parameters of normalisation layers too.")] = True,
    line: Annotated[bool, typer.Option("--line", help="Trace the first direction only.")] = False,
    paper_compat: Annotated[bool, typer.Option("--paper-compat", help="The paper's grid and directions.")] = False,
    gradient_norm: Annotated[bool, typer.Option("--gradient-norm", help="Add the gradient's norm.")] = False,
    limit: Annotated[int | None, typer.Option(help="Use the first sequences only.")] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences in a batch.")] = 128,
    held_out: Annotated[bool, typer.Option("--held-out", help="Use the held-out sequences.")] = False,
    workers: Annotated[int, typer.Option(help="Processes on this machine.")] = 1,
    scheduler: Annotated[str | None, typer.Option(help="Address of a Dask scheduler to use instead.")] = None,
    method: Annotated[str, typer.Option(help="auto, 'in place' or vmap.")] = "auto",
    chunk: Annotated[int | None, typer.Option(help="Points between two writes to the disk.")] = None,
    csv: Annotated[bool, typer.Option("--csv", help="Also write the surface as the paper's scripts do.")] = False,
    figures: Annotated[bool, typer.Option(help="Draw figures, PNG and PDF.")] = True,
    out: Annotated[Path | None, typer.Option(help="Folder to write to; the checkpoint's own if omitted.")] = None,
    force: Force = False,
) -> None:
    """Trace the loss on a slice around a checkpoint and estimate Lipschitz constants; a stopped run goes on."""
    from stability.commands.landscape import run_landscape

    traced = run_landscape(
        checkpoint,
        steps=steps,
        radius=radius,
        seed=seed,
        directions=directions,
        reuse=reuse,
        to=to or (),
        orthogonal=orthogonal,
        keep_biases=keep_biases,
        keep_norms=keep_norms,
        line=line,
        paper_compat=paper_compat,
        gradient_norm=gradient_norm,
        limit=limit,
        batch_size=batch_size,
        held_out=held_out,
        workers=workers,
        scheduler=scheduler,
        method=method,
        chunk=chunk,
        out=out,
        force=force,
        csv=csv,
        figures=figures,
    )
    for path in traced.paths:
        typer.echo(f"Written: {path}")


@app.command()
def bounds(
    full_table: Annotated[Path | None, typer.Argument(help="Measurement table of full attention.")] = None,
    topk_table: Annotated[Path | None, typer.Argument(help="Measurement table of heavy-hitter attention.")] = None,
    regions: Annotated[bool, typer.Option("--regions", help="Draw where the inequalities hold, instead.")] = False,
    explain: Annotated[str | None, typer.Option(help="Print assumptions, formula and source of a bound.")] = None,
    out: Annotated[Path | None, typer.Option(help="Where to write; beside the second table if omitted.")] = None,
    force: Force = False,
) -> None:
    """Check the inequalities of Appendix F.4 on a pair of measurement tables."""
    from stability.commands import bounds as commands
    from stability.errors import UserError

    if explain is not None:
        typer.echo(commands.explain(explain))
    elif regions:
        for path in commands.run_regions(out or Path("regions"), force):
            typer.echo(f"Figure: {path}")
    elif full_table is None or topk_table is None:
        raise UserError("Expected two tables, FULL_TABLE and TOPK_TABLE, or --regions, or --explain NAME.")
    else:
        verdicts = commands.run_bounds(full_table, topk_table, out, force)
        typer.echo("\n".join(verdicts.loc[verdicts["scope"] == "model", "words"]))
        typer.echo(f"Table: {verdicts.attrs['path']}")


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold run folders.")],
    out: Annotated[Path | None, typer.Option(help="The HTML file; report.html in the first folder if omitted.")] = None,
    title: Annotated[str, typer.Option(help="The report's heading.")] = "Softmax stability",
    force: Force = False,
) -> None:
    """Gather the tables of several folders in one self-contained HTML file."""
    from stability.report import build

    typer.echo(f"Report: {build(folders, out, title=title, force=force)}")


def main() -> None:
    """Run the command line; a user's mistake ends in one sentence and exit code 2, without a traceback.

    Raises:
        ValueError: only where the environment variable STABILITY_TRACEBACK asks for the traceback.
        OSError: likewise.
    """
    try:
        app()
    except (ValueError, OSError) as error:
        if os.environ.get("STABILITY_TRACEBACK"):
            raise
        typer.echo(f"stability: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        typer.echo("stability: stopped.", err=True)
        sys.exit(130)


if __name__ == "__main__":
    main()
