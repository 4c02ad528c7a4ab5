"""One self-contained HTML page from the tables of several run folders.

The page is made from files alone, so every table in it can have been made elsewhere.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from stability import __version__
from stability.errors import UserError
from stability.files import atomic_write, read_table, refuse_existing
from stability.report_sections import MAKERS, Gathered, Section

KINDS = tuple(kind for kind, _ in MAKERS)


def gather(folders: Sequence[str | os.PathLike[str]]) -> Gathered:
    """Read every known table in the folders, and in their subfolders one level down.

    Args:
        folders: run folders, or folders of run folders.

    Returns:
        What was found.

    Raises:
        UserError: if a folder is missing, or none of them holds a known table.
    """
    from stability.landscape import Surface

    places: list[Path] = []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise UserError(f"Expected a folder at {folder}, but there is none; give run folders or a demo's folder.")
        places += [folder, *sorted(sub for sub in folder.iterdir() if sub.is_dir() and not sub.name.startswith("."))]
    found = Gathered({kind: {} for kind in KINDS}, {})
    for place in dict.fromkeys(place.resolve() for place in places):
        name = _unused(place.name, {name for frames in found.tables.values() for name in frames})
        for kind in KINDS:
            path = place / f"{kind}.parquet"
            if path.is_file():
                found.tables[kind][name] = read_table(path)
                if kind == "surface":
                    found.surfaces[name] = Surface.read(path)
    if not any(found.tables.values()):
        kinds = ", ".join(f"{kind}.parquet" for kind in KINDS)
        raise UserError(f"Expected tables ({kinds}) in {', '.join(map(str, folders))}, but found none.")
    return found


def _unused(name: str, used: set[str]) -> str:
    candidate, number = name, 2
    while candidate in used:
        candidate, number = f"{name} ({number})", number + 1
    return candidate


def sections(found: Gathered) -> list[Section]:
    """Turn the tables into the parts of the page.

    Args:
        found: what `gather` returned.

    Returns:
        One section for each kind of table that is there, in the order of the work.
    """
    return [make(found) for kind, make in MAKERS if found.tables[kind]]


def save_figures(parts: Sequence[Section], folder: Path) -> list[Path]:
    """Write every figure as PNG and as PDF.

    Args:
        parts: the sections whose figures to write.
        folder: where to.

    Returns:
        The paths written.
    """
    written = []
    for part in parts:
        for name, _, figure in part.figures:
            for suffix in ("png", "pdf"):
                path = folder / f"{name}.{suffix}"
                with atomic_write(path) as temporary:
                    figure.savefig(temporary, format=suffix, dpi=160, bbox_inches="tight")
                written.append(path)
    return written


def write_page(
    parts: Sequence[Section], out: Path, *, title: str, summary: Sequence[str] = (), found: Gathered | None = None
) -> Path:
    """Write the page.

    Args:
        parts: its sections.
        out: the HTML file.
        title: its heading.
        summary: lines in plain words, shown first.
        found: the tables whose provenance to list.

    Returns:
        `out`.
    """
    from jinja2 import Environment, PackageLoader

    environment = Environment(loader=PackageLoader("stability"), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.get_template("report.html.j2").render(
        title=title,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        version=__version__,
        summary=summary,
        sections=[
            {
                "title": part.title,
                "words": part.words,
                "figures": [{"caption": caption, "data": _png(figure)} for _, caption, figure in part.figures],
                "tables": part.tables,
            }
            for part in parts
        ],
        provenance=_provenance(found) if found else [],
    )
    with atomic_write(out) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return out


def _png(figure: Figure) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=130, bbox_inches="tight")
    return base64.b64encode(buffer.getvalue()).decode()


def _provenance(found: Gathered) -> list[dict[str, Any]]:
    rows = []
    for kind, frames in found.tables.items():
        for name, frame in frames.items():
            record = frame.attrs.get("provenance") or {}
            versions = ", ".join(f"{package} {number}" for package, number in record.get("versions", {}).items())
            label = f"{name}/{kind}.parquet"
            rows.append(
                {"table": label, "command": record.get("command"), "time": record.get("time"), "versions": versions}
            )
    return rows


def build(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    *,
    title: str = "Softmax stability",
    summary: Sequence[str] = (),
    force: bool = False,
) -> Path:
    """Gather the tables of several folders in one self-contained HTML file.

    Args:
        folders: run folders, or folders that hold run folders.
        out: the HTML file; `report.html` in the first folder if omitted.
        title: the page's heading.
        summary: lines in plain words, shown first.
        force: replace an existing file.

    Returns:
        The path of the page.
    """
    target = Path(out) if out is not None else Path(folders[0]) / "report.html"
    found = gather(folders)
    refuse_existing(target, force=force)
    return write_page(sections(found), target, title=title, summary=summary, found=found)
