"""Training: the model's parts, reproducibility, resuming, divergence, run folders and their opening."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import probes
import stability
from stability import tasks
from stability.dropout import Dropout, dropped_positions
from stability.errors import UserError
from stability.evaluation import evaluate, loss_fn
from stability.files import read_table
from stability.model import Encoder, EncoderConfig, sinusoids
from stability.runs import Run

SMALL: dict[str, Any] = {"blocks": 2, "width": 16, "hidden": 16, "epochs": 3}
OPTIONS = {"length": 10, "train": 120, "held_out": 60}


def _train(attention: str = "topk:3", seed: int = 3, task: str = "even-pairs", **settings: Any) -> Run:
    return stability.train(task, attention, seed=seed, task_options=OPTIONS, **{**SMALL, **settings})


def _same(a: pd.DataFrame, b: pd.DataFrame) -> None:
    pd.testing.assert_frame_equal(a.drop(columns="seconds"), b.drop(columns="seconds"), check_exact=True)


def _slow_encoder(model: Encoder, tokens: list[int]) -> Tensor:
    # One sequence, token by token, in float64.
    c, w = model.config, {name: p.double() for name, p in model.state_dict().items()}
    width = c.width
    x = []
    for position, token in enumerate(tokens):
        row = w["embedding.weight"][token] * math.sqrt(width)
        for i in range(0, width, 2):
            angle = position / 10000 ** (i / width)
            row = row + F.one_hot(torch.tensor(i), width) * math.sin(angle)
            row = row + F.one_hot(torch.tensor(i + 1), width) * math.cos(angle)
        x.append(row)

    def norm(v: Tensor) -> Tensor:
        return (v - v.mean()) / (v.var(unbiased=False) + 1e-5).sqrt()

    for b in range(c.blocks):

        def layer(name: str, v: Tensor, b: int = b) -> Tensor:
            return w[f"blocks.{b}.{name}.weight"] @ v + w[f"blocks.{b}.{name}.bias"]

        h = [norm(v) for v in x]
        size = width // c.heads
        mixed = []
        for i in range(len(x)):
            heads = []
            for head in range(c.heads):
                part = slice(head * size, (head + 1) * size)
                q = layer("attention.query", h[i])[part]
                last = i + 1 if c.causal else len(x)
                logits = [
                    float(q @ layer("attention.key", h[j])[part])
                    / math.sqrt(size)
                    * c.inverse_temperature
                    * (math.log(last) if c.scalable_softmax else 1)
                    for j in range(last)
                ]
                kept = sorted(range(last), key=lambda j: -logits[j])[:3] if c.attention == "topk:3" else range(last)
                total = sum(math.exp(logits[j]) for j in kept)
                heads.append(sum(math.exp(logits[j]) / total * layer("attention.value", h[j])[part] for j in kept))
            mixed.append(layer("attention.out", torch.cat(heads)))  # type: ignore[arg-type]
        x = [v + m for v, m in zip(x, mixed, strict=True)]
        act = {"relu": F.relu, "gelu": F.gelu, "mish": F.mish}[c.activation]
        x = [v + layer("fall", act(layer("rise", norm(v)))) for v in x]
    pooled = torch.stack(x).mean(0) if c.readout == "mean" else torch.stack(x)
    return pooled @ w["linear.weight"].T + w["linear.bias"]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"attention": "topk:3", "activation": "gelu"},
        {"heads": 2, "activation": "mish", "inverse_temperature": 2.5},
        {"causal": True, "scalable_softmax": True, "readout": "tokens", "attention": "topk:3", "heads": 4},
    ],
    ids=str,
)
def test_encoder_against_a_slow_one_and_padding_changes_nothing(settings: dict[str, Any]) -> None:
    model = Encoder(
        EncoderConfig(tokens=4, classes=3, padding=3, blocks=2, width=8, hidden=6, **settings), seed=1
    ).eval()
    rows = [[0, 1, 2, 2, 1, 0, 1], [2, 0, 1, 1]]
    for row in rows:
        expected = _slow_encoder(model, row)
        torch.testing.assert_close(model(torch.tensor([row]))[0].double(), expected, rtol=1e-4, atol=1e-5)
    padded = model(torch.tensor([rows[0], rows[1] + [3, 3, 3]]))
    for got, row in zip(padded, rows, strict=True):
        alone = model(torch.tensor([row]))[0]
        torch.testing.assert_close(got if got.ndim == 1 else got[: len(row)], alone)


def test_paper_compat_pads_and_attends_to_padding() -> None:
    config = {"tokens": 3, "classes": 2, "padding": 2, "blocks": 2, "width": 8, "heads": 2, "attention": "banded:5"}
    model = Encoder(EncoderConfig(**config, paper_compat=True)).eval()  # type: ignore[arg-type]
    assert model.blocks[0].attention.query.out_features == 16  # each head is as wide as the model
    x = torch.tensor([[0, 1, 1, 0, 1, 0, 1]])
    assert torch.equal(model(x), model(F.pad(x, (0, 3), value=2)))


def test_same_start_whatever_the_attention() -> None:
    a, b = (
        Encoder(EncoderConfig(tokens=3, classes=2, attention=name), seed=5).state_dict() for name in ("full", "topk:5")
    )
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert float(a["embedding.weight"].abs().max()) <= 0.1
    assert float(a["blocks.3.attention.key.weight"].abs().max()) <= 1 / 8
    assert torch.equal(sinusoids(5, 4)[:, 1], torch.arange(5.0).cos())


def test_longer_than_the_positions_at_hand() -> None:
    model = Encoder(EncoderConfig(tokens=3, classes=2, blocks=1)).eval()
    assert model(torch.zeros(1, 200, dtype=torch.long)).shape == (1, 2)


def test_dropout_rate_and_independence() -> None:
    generator = torch.Generator().manual_seed(0)
    draws = [dropped_positions(1000, 0.01, generator) for _ in range(2000)]
    counts = np.bincount(np.concatenate([d.numpy() for d in draws]), minlength=1000)
    assert abs(counts.sum() / 2e6 - 0.01) < 4 * math.sqrt(0.01 * 0.99 / 2e6)
    assert counts[0] > 0
    assert counts[-1] > 0
    expected = 2000 * 0.01
    assert ((counts - expected) ** 2 / expected).sum() < 1000 + 5 * math.sqrt(2 * 1000)
    assert all(len(set(d.tolist())) == len(d) for d in draws)
    layer = Dropout(0.3).train()
    x = torch.ones(400, requires_grad=True)
    y = layer(x)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())  # type: ignore[arg-type]
    assert set(y.unique().tolist()) == {0.0, float(np.float32(1 / 0.7))}
    assert layer.eval()(x) is x


@pytest.mark.parametrize(
    "attention", ["full", "topk:3", "banded:5", "block:5+global:1", "random-k:3", "top-p:0.9", "moba:4:2"]
)
def test_same_seed_same_history_bit_for_bit(attention: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    a = _train(attention)
    torch.manual_seed(2)
    b = _train(attention)
    _same(a.history, b.history)
    assert all(torch.equal(p, q) for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True))
    assert not _train(attention, seed=4).history.train_loss.equals(a.history.train_loss)
    torch.manual_seed(1)
    assert torch.equal(before, torch.get_rng_state())


def test_history_and_record() -> None:
    run = _train(optimizer="adam", learning_rate=0.01, decay=0.5)
    assert list(run.history.columns) == [
        "epoch", "train_loss", "train_accuracy", "heldout_loss", "heldout_accuracy", "seconds", "gradient_norm",
        "learning_rate",
    ]  # fmt: skip
    assert run.history.epoch.tolist() == [1, 2, 3]
    assert run.history.learning_rate.tolist() == [0.01, 0.005, 0.0025]
    data = run.config.task.data(3)
    x, y = torch.from_numpy(data.train.sequences), torch.from_numpy(data.train.labels)
    with torch.inference_mode():
        scores = run.model(x)
    assert run.history.train_accuracy.iloc[-1] == pytest.approx(float((scores.argmax(-1) == y).double().mean()))
    assert run.history.train_loss.iloc[-1] == pytest.approx(float(F.cross_entropy(scores, y)), rel=1e-5)
    assert run.record["majority_accuracy_train"] == data.train.majority
    assert run.outcome == "finished"
    assert run.folder is None
    assert not run.model.training


def test_epochs_to_and_early_stop() -> None:
    run = _train(epochs=40, optimizer="adam", learning_rate=0.01, stop_at=0.9)
    assert run.outcome == "stopped early"
    assert len(run.history) < 40
    assert run.history.train_accuracy.iloc[-1] >= 0.9
    assert (run.history.train_accuracy.iloc[:-1] < 0.9).all()
    assert run.epochs_to(0.9) == len(run.history)
    assert run.epochs_to(1.01) is None


def test_labels_of_tokens() -> None:
    run = stability.train("mqar", task_options={"train": 30, "held_out": 20}, epochs=1, width=16, hidden=16)
    assert run.model.config.causal
    loss, accuracy = evaluate(run.model, *(torch.zeros(1, 4, dtype=torch.long), torch.full((1, 4), -100)))
    assert math.isnan(loss)
    assert math.isnan(accuracy)


def test_divergence_is_recorded(tmp_path: Path) -> None:
    run = _train("full", learning_rate=1e30, clip=math.inf, out=tmp_path / "run", epochs=5)
    assert run.outcome == "diverged"
    assert len(run.history) < 5
    assert math.isnan(run.history.train_loss.iloc[-1])
    assert 'outcome = "diverged"' in (tmp_path / "run" / "config.toml").read_text()


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_resume_bit_for_bit(tmp_path: Path, optimizer: str) -> None:
    whole = _train(epochs=5, optimizer=optimizer)
    _train(epochs=2, optimizer=optimizer, out=tmp_path / "run")
    more = _train(epochs=5, optimizer=optimizer, out=tmp_path / "run", resume=True)
    _same(whole.history, more.history)
    assert all(torch.equal(p, q) for p, q in zip(whole.model.parameters(), more.model.parameters(), strict=True))
    with pytest.raises(UserError, match="seed differ"):
        _train(epochs=6, optimizer=optimizer, out=tmp_path / "run", resume=True, seed=9)


def test_interrupted_run_leaves_nothing_in_place_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stability import training

    whole, real, calls = _train(epochs=4), training.evaluate, 0

    def stopped(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(training, "evaluate", stopped)
    with pytest.raises(KeyboardInterrupt):
        _train(epochs=4, out=tmp_path / "run")
    monkeypatch.setattr(training, "evaluate", real)
    assert not (tmp_path / "run").exists()
    _same(whole.history, _train(epochs=4, out=tmp_path / "run", resume=True).history)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_run_folder(tmp_path: Path) -> None:
    run = _train(out=tmp_path / "deep" / "run")
    assert run.folder == tmp_path / "deep" / "run"
    names = {"config.toml", "model.safetensors", "best.safetensors", "state.safetensors", "history.parquet"}
    assert {path.name for path in run.folder.iterdir()} == names
    pd.testing.assert_frame_equal(read_table(run.folder / "history.parquet"), run.history, check_exact=True)
    with pytest.raises(UserError, match="--force"):
        _train(out=run.folder)
    again = _train(out=run.folder, force=True, seed=8)
    assert stability.open(run.folder).config.seed == 8
    assert again.record["best_epoch"] == 1 + int(again.history.heldout_accuracy.to_numpy().argmax())


def test_opened_run(tmp_path: Path) -> None:
    run = _train(out=tmp_path / "run")
    checkpoint = stability.open(tmp_path / "run")
    assert checkpoint.kind == "run"
    assert checkpoint.config == run.config
    assert not checkpoint.model.training
    data = run.config.task.data(3)
    assert np.array_equal(checkpoint.sequences, data.train.sequences)  # type: ignore[arg-type]
    assert np.array_equal(checkpoint.held_out_labels, data.held_out.labels)  # type: ignore[arg-type]
    batches = list(checkpoint.batches(limit=50, batch_size=32))
    assert [len(b) for b in batches] == [32, 18]
    (x, y), *_ = checkpoint.batches(held_out=True, labels=True, batch_size=1000)
    with torch.inference_mode():
        assert checkpoint.loss is loss_fn
        assert float(checkpoint.loss(checkpoint.model(x), y)) == pytest.approx(
            run.history.heldout_loss.iloc[-1], rel=1e-5
        )
    best = stability.open(tmp_path / "run", best=True)
    with torch.inference_mode():
        right = (best.model(x).argmax(-1) == y).double().mean()
    assert float(right) == pytest.approx(run.history.heldout_accuracy.max())


def test_padding_is_left_out_of_measurements(tmp_path: Path) -> None:
    options = {"train": 20, "held_out": 10, "min_length": 5, "max_length": 30}
    run = stability.train("listops", "topk:3", out=tmp_path / "run", task_options=options, **{**SMALL, "epochs": 1})
    checkpoint = stability.open(tmp_path / "run")
    table = probes.measure(checkpoint.model, checkpoint.batches(), selections=["full"])
    assert checkpoint.sequences is not None
    real = int((checkpoint.sequences != run.config.task.padding).sum())
    rows = table[(table.metric == "dispersion") & (table.scope == "head")]
    assert rows["count"].tolist() == [real] * len(rows)
    assert 0 < real < checkpoint.sequences.numel()
    for batch, labels in checkpoint.batches(labels=True):
        assert torch.equal(checkpoint.model(**batch), checkpoint.model(batch["tokens"]))
        assert len(labels) == len(batch["tokens"])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:5000]), "cut short"),
        (lambda f: (f / "model.safetensors").unlink(), "no such file"),
        (lambda f: (f / "config.toml").unlink(), "neither"),
        (lambda f: (f / "config.toml").write_text("task = ["), "TOML"),
        (lambda f: (f / "config.toml").write_text("seed = 1"), "no 'task'"),
        (lambda f: _edit(f, 'task = "even-pairs"', 'task = "odd-pears"'), "known: "),
        (lambda f: _edit(f, "width = 16", "width = 32"), "shape"),
        (lambda f: _edit(f, "blocks = 2", "blocks = 3"), "lacks"),
        (lambda f: _edit(f, 'attention = "topk:3"', 'attention = "topmost:3"'), "known: "),
        (lambda f: _edit(f, "heads = 1", 'heads = 1\nnonsense = "x"'), "does not fit"),
    ],
)
def test_damaged_run_folders(tmp_path: Path, damage: Any, message: str) -> None:
    _train(out=tmp_path / "run", epochs=1)
    damage(tmp_path / "run")
    with pytest.raises(UserError, match=message) as caught:
        stability.open(tmp_path / "run")
    assert "\n" not in str(caught.value)


def _edit(folder: Path, old: str, new: str) -> None:
    text = (folder / "config.toml").read_text()
    assert old in text
    (folder / "config.toml").write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "sdg"}, "'sgd' or 'adam'"),
        ({"epochs": 0}, "at least 1"),
        ({"stop_at": 95}, "at most 1"),
        ({"dropout": 1.0}, "below 1"),
        ({"heads": 3}, "multiple of `heads`"),
        ({"activation": "tanh"}, "relu, gelu, mish"),
        ({"layers": 3}, "Expected settings among"),
        ({"seed": -1}, "seed"),
        ({"learning_rate": 0}, "above 0"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        _train(**settings)


def test_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="writable folder"):
        _train(out=tmp_path / "file" / "run")


def test_every_task_trains() -> None:
    for name in set(tasks.known()) - {"language", "mqar"}:
        options = {"train": 20, "held_out": 10}
        options |= {"min_length": 5, "max_length": 30} if name == "listops" else {"length": 9}
        run = stability.train(name, "topk:3", task_options=options, **{**SMALL, "epochs": 1})
        assert math.isfinite(run.history.train_loss[0])
