"""`stability bounds`: the Appendix F.4 on two measurement tables, the region figures, and explanations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from stability.files import atomic_write, read_table, refuse_existing, write_table

if TYPE_CHECKING:
    import pandas as pd


def run_bounds(
    full_table: Path, heavy_hitter_table: Path, out: Path | None = None, force: bool = False
) -> pd.DataFrame:
    """Judge the two conditions on the measurement tables of a pair of models and write the verdicts.

    Args:
        full_table: measurements of full attention, a Parquet file.
        heavy_hitter_table: measurements of heavy-hitter attention, such as top-k.
        out: the file to write, or a folder for `verdicts.parquet`; beside `heavy_hitter_table` where omitted.
        force: replace an existing file.

    Returns:
        The verdicts (see `theory.compare`); `frame.attrs["path"]` says where they were written.
    """
    from theory.verdicts import compare

    target = out if out is not None else heavy_hitter_table.parent
    if target.is_dir() or target.suffix != ".parquet":
        target /= "verdicts.parquet"
    refuse_existing(target, force=force)
    verdicts = compare(full=read_table(full_table), heavy_hitter=read_table(heavy_hitter_table))
    write_table(verdicts, target, full_table=str(full_table), heavy_hitter_table=str(heavy_hitter_table))
    verdicts.attrs["path"] = str(target)
    return verdicts


def run_regions(out: Path, force: bool = False) -> list[Path]:
    """Write the two region figures of Appendix F.4 as PNG and PDF.

    Args:
        out: the folder.
        force: replace existing files.

    Returns:
        The four files.
    """
    from theory.plots import input_figure, parameter_figure

    draw = {"region-parameter": parameter_figure, "region-input": input_figure}
    targets = {out / f"{name}.{kind}": name for name in draw for kind in ("png", "pdf")}
    for path in targets:
        refuse_existing(path, force=force)
    figures = {name: figure() for name, figure in draw.items()}
    for path, name in targets.items():
        with atomic_write(path) as temporary:
            figures[name].savefig(temporary, format=path.suffix[1:], dpi=150)
    return list(targets)


def explain(name: str) -> str:
    """Explain a theorem, a bound or a condition.

    Args:
        name: such as `theorem-5`, `softmax-full` or `f4-parameter`.

    Returns:
        Its assumptions, its formula in LaTeX and its source.
    """
    from theory import catalogue

    return catalogue.explain(name)
