"""Selections that look at queries and keys, each against a plain loop over one sequence in Python floats."""

from __future__ import annotations

import functools
import math

import pytest
import torch

from probes.attention import AttentionCall
from probes.selection import LearnedGate, parse

NAMES = (
    "moba:3:2", "moba:4:1", "quest:3:2", "quest:4:1", "nsa-like:3:1", "nsa-like:3:2+window:2", "lsh:4:2", "lsh:4:1:5",
    "zeta:3", "cluster:3", "cluster:2:7", "sinkhorn-like:3", "sinkhorn-like:4+block:4", "vertical-slash:31:31",
    "vertical-slash:8:40",
)  # fmt: skip


def make_call(length=11, *, batch=2, heads=4, key_heads=2, dim=4, causal=False, left=(0, 0), seed=0, right=(0, 0)):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(batch, heads, length, dim, generator=generator, dtype=torch.float64)
    key = torch.randn(batch, key_heads, length, dim, generator=generator, dtype=torch.float64)
    real = torch.ones(batch, length, dtype=torch.bool)
    for b in range(batch):
        real[b, : left[b % len(left)]] = False
        real[b, length - right[b % len(right)] :] = False
    mask = real[:, None, None].expand(batch, 1, length, length)
    padded = not bool(real.all())
    return AttentionCall(
        "attention", 0, "self", query=query, key=key, scale=0.7, causal=causal,
        mask=mask if padded else None, queries=real if padded else None,
    )  # fmt: skip


def keep(name, call, rows=slice(None)):
    start = rows.start or 0
    return parse(name).keep(call.logits(rows), call.allowed(rows), start=start, call=call)


CALLS = {
    "plain": {},
    "one key head each": {"key_heads": 4},
    "causal": {"causal": True},
    "left padding": {"left": (3, 0), "causal": True},
    "right padding": {"right": (0, 4)},
    "both": {"left": (1, 2), "right": (3, 0), "length": 13},
    "one key": {"length": 1},
    "long": {"length": 72, "causal": True, "batch": 1, "heads": 2, "right": (3,)},
}


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def best(scores, count):
    """Indices of the largest scores, the lowest index first among equals."""
    return set(sorted(scores, key=lambda j: (-scores[j], j))[:count])


def nearest(x, centroids):
    products = [dot(x, c) for c in centroids]
    return products.index(max(products))


class Sequence:
    """One head of one sequence, in lists."""

    def __init__(self, call, b, h):
        groups = call.query.shape[1] // call.key.shape[1]
        self.q, self.k = call.query[b, h].tolist(), call.key[b, h // groups].tolist()
        self.allowed = call.allowed()[b, h].tolist()
        self.logits = call.logits()[b, h].tolist()
        length = len(self.k)
        self.real = [True] * length if call.queries is None else call.queries[b].tolist()
        self.position = [sum(self.real[:j]) for j in range(length)]
        self.scale, self.length = call.scale, length

    def blocks(self, size):
        out = {}
        for j in range(self.length):
            if self.real[j]:
                out.setdefault(self.position[j] // size, []).append(j)
        return out

    def mean(self, keys, of=None):
        of = self.k if of is None else of
        return [sum(of[j][d] for j in keys) / len(keys) for d in range(len(of[0]))]

    def candidates(self, i, size):
        return {b: keys for b, keys in self.blocks(size).items() if any(self.allowed[i][j] for j in keys)}

    def moba(self, i, size, top):
        own, blocks = self.position[i] // size, self.candidates(i, size)
        means = {b: self.mean(self.blocks(size)[b]) for b in blocks}
        scores = {b: math.inf if b == own else dot(self.q[i], means[b]) for b in blocks}
        return {j for b in best(scores, top) for j in blocks[b]}

    def quest(self, i, size, top):
        own, pages = self.position[i] // size, self.candidates(i, size)
        scores = {}
        for b, keys in pages.items():
            seen = [self.k[j] for j in keys if b != own or self.allowed[i][j]]
            scores[b] = sum(
                max(q * min(k[d] for k in seen), q * max(k[d] for k in seen)) for d, q in enumerate(self.q[i])
            )
        return {j for b in best(scores, top) for j in pages[b]}

    def nsa(self, i, size, top):
        own, blocks = self.position[i] // size, self.candidates(i, size)
        others = [b for b in blocks if b != own]
        logits = {b: self.scale * dot(self.q[i], self.mean(blocks[b])) for b in others}
        total = sum(math.exp(s) for s in logits.values())
        importance = {b: math.exp(logits[b]) / total for b in others}
        chosen = best(importance, top) | ({own} & set(blocks))
        return {j for b in chosen for j in blocks[b]}

    def lsh(self, i, buckets, hashes, seed=0):
        generator = torch.Generator().manual_seed(seed)
        directions = torch.randn(
            hashes, len(self.q[0]), buckets // 2, generator=generator, dtype=torch.float64
        ).tolist()

        def bucket(x, r):
            projected = [dot(x, column) for column in zip(*r, strict=True)]
            projected += [-p for p in projected]
            return projected.index(max(projected))

        return {j for j in range(self.length) if any(bucket(self.q[i], r) == bucket(self.k[j], r) for r in directions)}

    def zeta(self, i, k, seed=0):
        generator = torch.Generator().manual_seed(seed)
        draw = torch.randn(len(self.q[0]), 3, generator=generator, dtype=torch.float64)
        axes = torch.linalg.qr(draw).Q.T.tolist()

        def code(x):
            norm = math.sqrt(dot(x, x))
            levels = [min(int((dot(x, axis) / norm + 1) * 128), 255) for axis in axes]
            return int("".join(f"{levels[d]:08b}"[bit] for bit in range(8) for d in (2, 1, 0)), 2)

        distance = {j: -abs(code(self.q[i]) - code(self.k[j])) for j in range(self.length) if self.allowed[i][j]}
        return best(distance, k)

    def vertical_slash(self, i, vertical, slash):
        last = [q for q in range(self.length) if self.real[q]][-64:]
        columns, diagonals = dict.fromkeys(range(self.length), 0.0), {}
        for q in last:
            keys = [j for j in range(self.length) if self.allowed[q][j]]
            total = sum(math.exp(self.logits[q][j]) for j in keys)
            for j in keys:
                weight = math.exp(self.logits[q][j]) / total
                columns[j] += weight
                diagonals[q - j] = diagonals.get(q - j, 0.0) + weight
        real = [j for j in range(self.length) if self.real[j]]
        columns = {j: math.inf if self.position[j] < 30 else columns[j] for j in real}
        diagonals |= dict.fromkeys(range(30), math.inf)
        kept = best(columns, max(vertical, 30))
        lines = set(sorted(diagonals, key=lambda d: (-diagonals[d], abs(d), d))[: max(slash, 30)])
        return kept | {j for j in range(self.length) if i - j in lines}

    @functools.cache  # noqa: B019 - one sequence a test
    def centroids(self, clusters, seed):
        from probes.selection.largest import uniform

        here = torch.arange(self.length)
        draw = uniform(seed, torch.zeros(1, 1, dtype=torch.long), here)[0].tolist()
        real = [j for j in range(self.length) if self.real[j]]
        unit = [[x / math.sqrt(dot(k, k)) for x in k] for k in self.k]
        first = sorted(real, key=lambda j: -draw[j])[:clusters]
        centroids = [unit[j] for j in first]
        for _ in range(10):
            groups = [[j for j in real if nearest(unit[j], centroids) == c] for c in range(len(centroids))]
            sums = [[sum(unit[j][d] for j in g) for d in range(len(unit[0]))] for g in groups]
            centroids = [
                [x / math.sqrt(dot(s, s)) for x in s] if g else c
                for g, s, c in zip(groups, sums, centroids, strict=True)
            ]
        return centroids

    def cluster(self, i, clusters, seed=0):
        centroids = self.centroids(clusters, seed)
        return {j for j in range(self.length) if nearest(self.k[j], centroids) == nearest(self.q[i], centroids)}

    def sinkhorn(self, i, size):
        blocks, plan = self.blocks(size), self.plan(size)
        row = plan[self.position[i] // size]
        return set(blocks[row.index(max(row))])

    @functools.cache  # noqa: B019 - one sequence a test
    def plan(self, size):
        blocks = self.blocks(size)
        number = max(blocks) + 1
        queries = {b: [q for q in range(self.length) if self.position[q] // size == b and self.real[q]] for b in blocks}
        plan = [
            [
                self.scale * dot(self.mean(queries[a], self.q), self.mean(blocks[b]))
                if any(self.allowed[q][j] for q in queries[a] for j in blocks[b])
                else -math.inf
                for b in range(number)
            ]
            for a in range(number)
        ]
        for _ in range(20):
            for turn in (0, 1):
                lines = plan if turn == 0 else list(map(list, zip(*plan, strict=True)))
                lines = [
                    [x - math.log(sum(map(math.exp, line))) if x > -math.inf else x for x in line] for line in lines
                ]
                plan = lines if turn == 0 else list(map(list, zip(*lines, strict=True)))
        return plan


RULES = {
    "moba": Sequence.moba, "quest": Sequence.quest, "nsa-like": Sequence.nsa, "lsh": Sequence.lsh,
    "zeta": Sequence.zeta,
    "vertical-slash": Sequence.vertical_slash, "cluster": Sequence.cluster, "sinkhorn-like": Sequence.sinkhorn,
    "window": lambda s, i, w: {j for j in range(s.length) if s.position[i] - w < s.position[j] <= s.position[i]},
    "block": lambda s, i, w: {j for j in range(s.length) if s.position[i] // w == s.position[j] // w},
}  # fmt: skip


def slow(name, sequence, i):
    kept = set()
    for part in name.split("+"):
        word, *numbers = part.split(":")
        kept |= RULES[word](sequence, i, *map(int, numbers))
    allowed = [j for j in range(sequence.length) if sequence.allowed[i][j]]
    kept &= set(allowed)
    return kept or set(sorted(allowed, key=lambda j: (abs(j - i), j))[:1])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("case", CALLS)
def test_rule_equals_a_plain_loop(name, case):
    call = make_call(**CALLS[case])
    kept = keep(name, call)
    real = torch.ones(call.shape[0], call.shape[2]) if call.queries is None else call.queries
    for b in range(call.shape[0]):
        for h in range(call.shape[1]):
            sequence = Sequence(call, b, h)
            for i in range(call.shape[2]):
                if real[b, i]:
                    assert set(kept[b, h, i].nonzero().flatten().tolist()) == slow(name, sequence, i), (b, h, i)


@pytest.mark.parametrize("name", [*NAMES, "banded:3", "block:4", "global:2", "streaming:1:3", "strided:2:6", "topk:3"])
@pytest.mark.parametrize("case", ["causal", "both", "right padding", "long"])
def test_blocks_of_queries_give_what_the_whole_gives(name, case):
    call = make_call(**CALLS[case])
    whole = keep(name, call)
    parts = [keep(name, call, slice(first, min(first + 4, call.shape[2]))) for first in range(0, call.shape[2], 4)]
    assert torch.cat(parts, 2).equal(whole)


@pytest.mark.parametrize("name", NAMES)
def test_parts_of_a_call_give_what_the_whole_gives(name):
    call = make_call(left=(2, 7), length=9)
    whole = keep(name, call)
    for b in range(2):
        for h in range(4):
            part = call.part(slice(b, b + 1), slice(h, h + 1))
            assert keep(name, part).equal(whole[b : b + 1, h : h + 1])


CAUSAL = [n for n in NAMES if not n.startswith(("vertical", "cluster", "sinkhorn"))]


@pytest.mark.parametrize("name", CAUSAL)
def test_under_a_causal_mask_later_keys_have_no_say(name):
    call = make_call(length=14, causal=True)
    changed = make_call(length=14, causal=True)
    changed.key[:, :, 9:] += 5.0
    assert keep(name, call)[:, :, :9].equal(keep(name, changed)[:, :, :9])


@pytest.mark.parametrize("name", NAMES)
def test_order_of_heads_and_batch_elements_does_not_matter(name):
    call = make_call(left=(2, 0), right=(0, 2), key_heads=4)
    order, turn = [2, 0, 3, 1], [1, 0]
    moved = AttentionCall(
        "attention", 0, "self", query=call.query[turn][:, order], key=call.key[turn][:, order], scale=0.7,
        mask=call.mask[turn], queries=call.queries[turn],
    )  # fmt: skip
    assert keep(name, moved).equal(keep(name, call)[turn][:, order])


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith("vertical")])
def test_without_queries_and_keys_the_message_says_so(name):
    logits = torch.zeros(1, 1, 4, 4)
    for call in (None, AttentionCall("layer.3", 3, "self", scores=logits)):
        with pytest.raises(ValueError, match="queries and keys") as caught:
            parse(name).keep(logits, torch.ones_like(logits, dtype=torch.bool), call=call)
        assert "\n" not in str(caught.value)


def test_vertical_slash_of_a_whole_needs_no_call():
    call = make_call(length=80, causal=True)
    alone = parse("vertical-slash:31:31").keep(call.logits(), call.allowed())
    assert alone.equal(keep("vertical-slash:31:31", call))
    with pytest.raises(ValueError, match="give `call` or all queries"):
        parse("vertical-slash:31:31").keep(call.logits(slice(4, 8)), call.allowed(slice(4, 8)), start=4)


def test_nan_and_infinite_vectors_keep_allowed_keys_only():
    call = make_call(causal=True)
    call.key[0, 0, 3], call.query[1, 2, 5], call.key[1, 1, 2] = math.nan, math.inf, -math.inf
    for name in NAMES:
        kept, allowed = keep(name, call), call.allowed()
        assert not (kept & ~allowed).any()
        assert kept.any(-1).equal(allowed.any(-1))


def test_learned_gate_keeps_the_blocks_that_the_gate_prefers():
    call = make_call(length=10, batch=1, heads=2, key_heads=2, causal=True)
    scores = torch.tensor([[0.0, 9.0, 1.0, 2.0], [3.0, 0.0, 9.0, 1.0], [0.5, 4.0, 1.0, 9.0], [1.0, 1.0, 0.0, -1.0]])
    for gate in (scores[None, None], scores.repeat_interleave(3, 0)[None, None, :10], lambda _: scores[None, None]):
        selection = LearnedGate(3, 1, gate)
        kept = selection.keep(call.logits(), call.allowed(), call=call)
        for i in range(10):
            best_block = [0, 0, 1, 0][i // 3]  # future blocks are no candidates; equal scores take the first
            assert set(kept[0, 1, i].nonzero().flatten().tolist()) == {j for j in range(i + 1) if j // 3 == best_block}
    assert selection.name == "gate:3:1"
    with pytest.raises(ValueError, match="there are none"):
        keep("gate:3:1", call)
    with pytest.raises(ValueError, match=r"Expected gate scores of shape"):
        LearnedGate(3, 1, scores[None, None, :2]).keep(call.logits(), call.allowed(), call=call)


@pytest.mark.parametrize(
    "name",
    [
        "moba:0:1",
        "moba:4",
        "moba:4:0",
        "quest:4:x",
        "nsa-like:4",
        "lsh:3:1",
        "lsh:4:0",
        "zeta:0",
        "cluster:0",
        "sinkhorn-like:0",
        "vertical-slash:4",
        "vertical-slash:0:4",
        "gate:4:4:x",
    ],
)
def test_wrong_parameters_are_refused_in_one_sentence(name):
    with pytest.raises(ValueError, match="Expected a selection of the form") as caught:
        parse(name)
    assert "\n" not in str(caught.value)
