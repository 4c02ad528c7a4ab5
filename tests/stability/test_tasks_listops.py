"""ListOps against a slow evaluator and plain rejection, its files, and text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from scipy.stats import chi2_contingency

import stability
from stability import tasks
from stability.errors import UserError
from stability.tasks.listops import WORDS, read_tsv, write_tsv


def _value(words: list[str]) -> int:
    stack: list[list[object]] = [[]]
    for word in words:
        if word.startswith("["):
            stack.append([word])
        elif word == "]":
            operator, *values = stack.pop()
            numbers = [int(str(v)) for v in values]
            function = {"[MIN": min, "[MAX": max, "[MED": lambda v: int(np.median(v)), "[SM": lambda v: sum(v) % 10}
            stack[-1].append(function[str(operator)](numbers))
        else:
            stack[-1].append(int(word))
    ((value,),) = stack
    return int(str(value))


def _depth(words: list[str]) -> int:
    depth = deepest = 1
    for word in words:
        depth += word.startswith("[") - (word == "]")
        deepest = max(deepest, depth)
    return deepest


def _plain(rng: np.random.Generator, depth: int, max_depth: int, max_args: int) -> list[str]:
    r = rng.random() if depth < max_depth else 1.0
    if r > 0.25:
        return [str(rng.integers(10))]
    words = [("[MIN", "[MAX", "[MED", "[SM")[rng.integers(4)]]
    for _ in range(rng.integers(2, max_args + 1)):
        words += _plain(rng, depth + 1, max_depth, max_args)
    return [*words, "]"]


def test_labels_lengths_and_depth() -> None:
    task = tasks.make("listops", {"train": 1500, "held_out": 500, "min_length": 40, "max_length": 80, "max_depth": 5})
    data = task.data(1)
    seen = set()
    for examples in (data.train, data.held_out):
        for row, label in zip(examples.sequences, examples.labels, strict=True):
            words = [WORDS[token] for token in row if token < 15]
            assert (row[len(words) :] == 15).all()
            assert 40 < len(words) < 80
            assert _depth(words) <= 5
            assert _value(words) == label
            seen.add(tuple(words))
    assert len(seen) == 2000


def test_same_distribution_as_plain_rejection() -> None:
    rng = np.random.default_rng(0)
    plain: Counter[int] = Counter()
    shapes: Counter[str] = Counter()
    while plain.total() < 4000:
        words = _plain(rng, 1, 4, 4)
        if 6 < len(words) < 20:
            plain[len(words)] += 1
            shapes[words[0] + str(len(words) // 4) + str(sum(w.startswith("[") for w in words))] += 1
    task = tasks.make("listops", {"min_length": 6, "max_length": 20, "max_depth": 4, "max_args": 4})
    fast: Counter[int] = Counter()
    fast_shapes: Counter[str] = Counter()
    for row in task.sample(4000, rng).sequences:
        words = [WORDS[token] for token in row if token < 15]
        fast[len(words)] += 1
        fast_shapes[words[0] + str(len(words) // 4) + str(sum(w.startswith("[") for w in words))] += 1
    for a, b in ((plain, fast), (shapes, fast_shapes)):
        keys = [key for key in a | b if a[key] + b[key] > 20]  # type: ignore[operator,attr-defined]
        assert len(keys) > 8
        table = [[counter[key] for key in keys] for counter in (a, b)]  # type: ignore[index]
        assert chi2_contingency(table).pvalue > 1e-4


def test_impossible_lengths() -> None:
    with pytest.raises(UserError, match="no tree of this depth"):
        tasks.make("listops", {"max_depth": 2, "max_args": 3}).data(0)
    with pytest.raises(UserError, match="different trees"):
        tasks.make("listops", {"min_length": 0, "max_length": 2, "max_depth": 1, "train": 9}).data(0)


def test_paper_size_is_fast() -> None:
    import time

    begun = time.process_time()
    examples = tasks.make("listops").sample(700, np.random.default_rng(0))
    assert time.process_time() - begun < 12  # at most a minute for 7000
    assert (examples.sequences < 15).sum(1).min() > 500


def test_tsv(tmp_path: Path) -> None:
    task = tasks.make("listops", {"min_length": 5, "max_length": 30})
    examples = task.sample(50, np.random.default_rng(0))
    write_tsv(examples, tmp_path / "train.tsv")
    again = read_tsv(tmp_path / "train.tsv")
    assert np.array_equal(again.sequences, examples.sequences)
    assert np.array_equal(again.labels, examples.labels)
    (tmp_path / "binary.tsv").write_text("Source\tTarget\n( ( ( [MAX 2 ) 9 ) ] )\t9\n")
    assert [WORDS[t] for t in read_tsv(tmp_path / "binary.tsv").sequences[0]] == ["[MAX", "2", "9", "]"]
    both = {"file": str(tmp_path / "train.tsv"), "held_out_file": str(tmp_path / "binary.tsv")}
    assert tasks.make("listops", both).data(0).disjoint


@pytest.mark.parametrize(("text", "message"), [("a\tb\n", "Source and Target"), ("Source\tTarget\n[MAX\n", "line 2")])
def test_bad_tsv(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.tsv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_tsv(tmp_path / "bad.tsv")


def test_language(tmp_path: Path) -> None:
    pytest.importorskip("sentencepiece")
    rng = np.random.default_rng(0)
    words = ["stone", "river", "cloud", "walks", "under", "the", "old", "bridge", "slowly"]
    lines = [" ".join(rng.choice(words, 8)) for _ in range(200)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    task = tasks.make("language", {"file": str(tmp_path / "text.txt"), "length": 16, "vocabulary_size": 60})
    data = task.data(0)
    assert data.train.sequences.shape[1] == 16
    flat, labels = data.train.sequences.ravel(), data.train.labels.ravel()
    real = labels != tasks.IGNORED
    both = real[:-1] & real[1:]
    assert (labels[:-1][both] == flat[1:][both]).all()
    learned = task.learn(lines[:180])  # type: ignore[attr-defined]
    assert learned.decode(flat[: len(learned.encode(lines[0]))].tolist()) == lines[0]
    assert flat[real].max() < task.vocabulary - 1
    run = stability.train(task, "topk:3", out=tmp_path / "run", epochs=1, blocks=1, batch_size=16)
    opened = stability.open(tmp_path / "run")
    assert opened.config == run.config
    assert run.model.config.causal
    (tmp_path / "bad.txt").write_bytes(b"a\nb\xff\n")
    with pytest.raises(UserError, match="byte 3"):
        tasks.make("language", {"file": str(tmp_path / "bad.txt")}).data(0)
