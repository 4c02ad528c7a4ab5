"""Every supported architecture: softmax of the captured logits is the model's own weights, and nothing changes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES
from check_architecture import check

CASES = [
    pytest.param(architecture, implementation, padding, id=f"{architecture.name}-{implementation}-{padding}")
    for architecture in ARCHITECTURES
    for implementation in architecture.implementations
    for padding in architecture.paddings
]


@pytest.mark.parametrize(("architecture", "implementation", "padding"), CASES)
def test_captured_attention_is_the_models_own(architecture, implementation, padding):
    found = check(architecture, implementation, padding)
    assert found.weights < 1e-5
    assert found.keys
    assert found.statistics < 5e-4
    assert found.unchanged
    expected = {"both": 6, "speech": 6, "pair": 4, "windows": 4}.get(architecture.kind, 2)
    assert found.calls == expected
    if padding != "none" and architecture.kind in ("encoder", "decoder"):
        assert found.real == (21, 21)
    if architecture.kind == "both":
        assert found.kinds == ("self", "cross")
        assert found.real[:2] == ((21, 21) if padding != "none" else (None, None))
        assert found.real[2:] == (None,) * 4


def test_the_page_lists_every_architecture_and_no_failure():
    text = (Path(__file__).parents[2] / "docs" / "architectures.md").read_text(encoding="utf-8")
    for architecture in ARCHITECTURES:
        for implementation in architecture.implementations:
            assert f"| {architecture.name} | {implementation} |" in text
    assert "NO |" not in text
