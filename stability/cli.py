"""The command line `stability`: each command reads files, writes files, and says where.

Nothing heavy is imported here; each command imports what it needs when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from stability import __version__

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
    force: Force = False,
) -> None:
    """Train a pair, measure it and a language model, check the inequalities, draw the landscapes, write a report."""
    from stability.demo import run_demo

    run_demo(out, seed=seed, force=force)


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
