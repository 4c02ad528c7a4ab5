"""The list that `stability selections` prints."""

from __future__ import annotations

from probes.selection import THEOREM, known
from stability.commands.selections import list_selections


def test_every_selection_has_its_line_with_kind_and_theorem():
    lines = list_selections().splitlines()
    for word, cls in known().items():
        (line,) = [line for line in lines if line.split(":")[0].split()[:1] == [word]]
        assert cls.kind in line
        assert THEOREM[cls.kind] in line
        assert cls.summary.partition(": ")[2] in line
    assert any("A+B" in line for line in lines)
