"""`stability selections`: the names of all key selections, with a line each."""

from __future__ import annotations

_COMPOSITION = """\
A+B keeps what A or B keeps, A&B what both keep, and & binds tighter: banded:5+global:1, topk:8&banded:64+sink:4.
Unions and intersections of regular selections are regular, those of heavy-hitters are heavy-hitters; any other mixture
has no theorem."""


def list_selections() -> str:
    """Describe every selection: how its short name is written, its kind, the theorem that speaks of it, what it keeps.

    Returns:
        A table as text, sorted by kind and name, and how names combine.
    """
    from probes.selection import THEOREM, known

    order = list(THEOREM)
    rows = [("name", "kind", "theorem", "keeps")]
    for _, cls in sorted(known().items(), key=lambda item: (order.index(item[1].kind), item[0])):
        usage, _, line = cls.summary.partition(": ")
        rows.append((usage, cls.kind, THEOREM[cls.kind], line))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    lines = ["  ".join([*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[3]]) for row in rows]
    return "\n".join([*lines, "", _COMPOSITION])
