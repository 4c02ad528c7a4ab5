"""The attention operator against a plain one, with its gradients."""

from __future__ import annotations

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from probes.attend import attend
from probes.selection import Selection, parse

operator = sys.modules["probes.attend"]  # the name in the package is the function


def _plain(q: Tensor, k: Tensor, v: Tensor, selection: Selection, allowed: Tensor, scale: float) -> Tensor:
    logits = q @ k.mT * scale
    kept = selection.keep(logits.detach(), allowed.expand_as(logits))
    weights = logits.masked_fill(~kept, -torch.inf).softmax(-1)
    return weights.masked_fill(~kept.any(-1, keepdim=True), 0.0) @ v


@pytest.mark.parametrize("sparse_from", [0, 1000])
@pytest.mark.parametrize(
    "name", ["full", "topk:1", "topk:3", "topk:99", "hardmax", "banded:3", "block:4+global:1", "top-p:0.6"]
)
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "one bare row"])
def test_attend_and_its_gradients(name: str, mask: str, sparse_from: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator, "SPARSE_FROM", sparse_from)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 11, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3))
    allowed = torch.ones(2, 1, 11, 11, dtype=torch.bool)
    if mask == "padding":
        allowed[0, :, :, 7:] = False
    elif mask == "causal":
        allowed = allowed.tril()
    elif mask == "one bare row":
        allowed[1, 0, 5] = False
    selection = parse(name)
    got = attend(q, k, v, selection, allowed=None if mask == "none" else allowed, scale=0.7)
    expected = _plain(q, k, v, selection, allowed, 0.7)
    torch.testing.assert_close(got, expected)
    upstream = torch.randn(got.shape, generator=generator, dtype=torch.float64)
    for mine, theirs in zip(
        torch.autograd.grad(got, (q, k, v), upstream), torch.autograd.grad(expected, (q, k, v), upstream), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@given(st.integers(0, 2**32), st.integers(1, 4), st.booleans())
def test_ties_keep_the_lowest_index(seed: int, k: int, sparse: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-1, 2, (1, 1, 6, 2), generator=generator).double()  # few distinct logits
    keys = torch.randint(-1, 2, (1, 1, 6, 2), generator=generator).double()
    v = torch.randn(1, 1, 6, 3, generator=generator, dtype=torch.float64)
    old, operator.SPARSE_FROM = operator.SPARSE_FROM, 0 if sparse else 1000
    try:
        got = attend(q, keys, v, parse(f"topk:{k}"), scale=1.0)
    finally:
        operator.SPARSE_FROM = old
    allowed = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    torch.testing.assert_close(got, _plain(q, keys, v, parse(f"topk:{k}"), allowed, 1.0))


@pytest.mark.parametrize("name", ["full", "topk:2", "banded:3"])
def test_dropout_function_sees_the_weights(name: str) -> None:
    q = torch.randn(1, 1, 5, 2)
    assert not attend(q, q, q, parse(name), dropout=torch.zeros_like).any()
