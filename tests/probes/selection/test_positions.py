"""Selections by position, each against a plain loop over queries and keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from probes.selection import parse


def banded(q, allowed, positions, k):
    keys = [j for j, ok in enumerate(allowed) if ok]
    before = sum(j < q for j in keys)
    low = max(min(before - (k - 1) // 2, len(keys) - k), 0)
    return set(keys[low : low + k])


def block(q, allowed, positions, size):
    return {j for j, p in enumerate(positions) if p // size == positions[q] // size}


def strided(q, allowed, positions, stride, window):
    offsets = [d for d in range(-(window // 2), window // 2 + 1) if d % stride == 0]
    return {j for j, p in enumerate(positions) if p - positions[q] in offsets}


def last(q, allowed, positions, count):
    total = positions[-1]
    return {j for j, p in enumerate(positions[:-1]) if p >= total - count or positions[q] >= total - count}


def streaming(q, allowed, positions, sink, window):
    at = positions[q]
    return {j for j, p in enumerate(positions) if p < sink or at - window < p <= at}


RULES = {
    "banded:1": lambda *row: banded(*row, 1),
    "banded:4": lambda *row: banded(*row, 4),
    "banded:5": lambda *row: banded(*row, 5),
    "banded:99": lambda *row: banded(*row, 99),
    "block:3": lambda *row: block(row[0], row[1], row[2][:-1], 3),
    "strided:1:4": lambda *row: strided(row[0], row[1], row[2][:-1], 1, 4),
    "strided:2:8": lambda *row: strided(row[0], row[1], row[2][:-1], 2, 8),
    "global:2": lambda *row: last(*row, 2),
    "sink:2": lambda *row: streaming(row[0], row[1], row[2][:-1], 2, 0),
    "window:3": lambda *row: streaming(row[0], row[1], row[2][:-1], 0, 3),
    "streaming:2:3": lambda *row: streaming(row[0], row[1], row[2][:-1], 2, 3),
    "a-shape:1:4": lambda *row: streaming(row[0], row[1], row[2][:-1], 1, 4),
    "banded:3+global:1": lambda *row: banded(*row, 3) | last(*row, 1),
    "strided:2:8&window:4": lambda *row: (
        strided(row[0], row[1], row[2][:-1], 2, 8) & streaming(row[0], row[1], row[2][:-1], 0, 4)
    ),
}


def expected(name, allowed):
    """The rule on one (query, key) table of allowed keys; positions count the keys that some query may attend to."""
    queries, keys = len(allowed), len(allowed[0])
    real = [any(allowed[q][j] for q in range(queries)) for j in range(keys)]
    positions = [sum(real[:j]) for j in range(keys + 1)]  # the last one is the number of real keys
    rows = []
    for q in range(queries):
        row = {j for j in RULES[name](q, allowed[q], positions) if allowed[q][j]}
        if not row and any(allowed[q]):
            row = {min((j for j in range(keys) if allowed[q][j]), key=lambda j: (abs(j - q), j))}
        rows.append(row)
    return rows


def kept_sets(name, allowed, **options):
    table = torch.tensor([[allowed]])
    kept = parse(name).keep(torch.zeros(table.shape), table, **options)
    return [set(row.nonzero().flatten().tolist()) for row in kept[0, 0]]


@st.composite
def tables(draw):
    length = draw(st.integers(1, 11))
    causal, left, right = draw(st.booleans()), draw(st.integers(0, 3)), draw(st.integers(0, 3))
    holes = draw(st.sampled_from([0.0, 0.3]))
    window = draw(st.sampled_from([99, 4]))
    random = draw(st.randoms(use_true_random=False))
    return [
        [
            left <= j < length - right and (j <= q or not causal) and q - j < window and random.random() >= holes
            for j in range(length)
        ]
        for q in range(length)
    ]


@pytest.mark.parametrize("name", RULES)
@settings(max_examples=60, deadline=None)
@given(allowed=tables())
def test_rule_equals_a_plain_loop(name, allowed):
    assert kept_sets(name, allowed) == expected(name, allowed)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("left", "right"), [(0, 3), (4, 0), (2, 1)])
def test_padding_on_either_side_changes_nothing_for_real_queries(name, causal, left, right):
    length = 9
    bare = torch.ones(length, length, dtype=torch.bool)
    bare = bare.tril() if causal else bare
    padded = torch.zeros(left + length + right, left + length + right, dtype=torch.bool)
    padded[left : left + length, left : left + length] = bare
    inner = parse(name).keep(torch.zeros(1, 1, *padded.shape), padded[None, None])[0, 0]
    alone = parse(name).keep(torch.zeros(1, 1, length, length), bare[None, None])[0, 0]
    assert inner[left : left + length, left : left + length].equal(alone)


@pytest.mark.parametrize("name", [name for name in RULES if "global" not in name])
def test_blocks_of_queries_give_what_the_whole_gives(name):
    allowed = torch.ones(12, 12, dtype=torch.bool).tril()[None, None]
    whole = parse(name).keep(torch.zeros(1, 1, 12, 12), allowed)
    parts = [
        parse(name).keep(torch.zeros(1, 1, 4, 12), allowed[:, :, first : first + 4], start=first) for first in (0, 4, 8)
    ]
    assert torch.cat(parts, 2).equal(whole)
    rows = torch.tensor([11, 3, 7])
    assert parse(name).keep(torch.zeros(1, 1, 3, 12), allowed[:, :, rows], start=rows).equal(whole[:, :, rows])


def test_banded_under_a_causal_mask_is_the_last_k():
    allowed = [[j <= q for j in range(7)] for q in range(7)]
    assert kept_sets("banded:3", allowed) == [set(range(max(0, q - 2), q + 1)) for q in range(7)]


def test_banded_keeps_exactly_k_at_the_borders():
    allowed = [[True] * 7 for _ in range(7)]
    assert kept_sets("banded:4", allowed) == [
        {0, 1, 2, 3},
        {0, 1, 2, 3},
        {1, 2, 3, 4},
        {2, 3, 4, 5},
        {3, 4, 5, 6},
        {3, 4, 5, 6},
        {3, 4, 5, 6},
    ]


def test_global_tokens_stand_at_the_end_of_each_padded_sequence():
    allowed = [[j < 5 for j in range(7)] for _ in range(7)]
    assert kept_sets("block:1+global:1", allowed)[:5] == [{0, 4}, {1, 4}, {2, 4}, {3, 4}, {0, 1, 2, 3, 4}]


@pytest.mark.parametrize(
    "name",
    [
        "banded:0",
        "banded",
        "block:0",
        "strided:0:4",
        "strided:4",
        "strided:4:0",
        "global:0",
        "sink:-1",
        "window:0",
        "streaming:-1:4",
        "streaming:4:0",
        "a-shape:1:x",
    ],
)
def test_wrong_parameters_are_refused_in_one_sentence(name):
    with pytest.raises(ValueError, match="Expected a selection of the form") as caught:
        parse(name)
    assert "\n" not in str(caught.value)
