"""The monitor in a plain loop and in transformers' Trainer."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

import probes


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 2)

    def forward(self, input_ids, labels=None):
        x = self.embedding(input_ids)
        x, _ = self.attention(x, x, x, need_weights=False)
        loss = nn.functional.cross_entropy(self.out(x.mean(1)), labels)
        return {"loss": loss}


def train(monitor):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Classifier()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        ids, labels = torch.randint(20, (6, 4, 7)), torch.randint(2, (6, 4))
        for number in range(6):
            if monitor is None:
                loss = model(ids[number], labels[number])["loss"]
            else:
                with monitor.step(model, number):
                    loss = model(ids[number], labels[number])["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def test_every_nth_step_is_logged_and_training_is_the_same():
    logged, said = [], []
    monitor = probes.Monitor(3, log=lambda scalars, step: logged.append((step, scalars)), report=said.append)
    assert all(torch.equal(a, b) for a, b in zip(train(monitor), train(None), strict=True))
    assert [step for step, _ in logged] == [0, 3]
    assert logged[0][1]["attention/full/dispersion/max"] > 0
    assert any(name.startswith("attention/topk:5/separation/p50/layer") for name in logged[0][1])
    monitor.finish()
    assert "2 of 6 steps" in said[0]
    assert "%" in said[0]
    with pytest.raises(ValueError, match="every"):
        probes.Monitor(0)


def test_inside_the_trainer(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    items = [{"input_ids": torch.randint(20, (7,)), "labels": torch.tensor(i % 2)} for i in range(8)]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True, disable_tqdm=True
    )
    monitor = probes.Monitor(2, report=lambda _: None)
    trainer = Trainer(Classifier(), arguments, train_dataset=items)
    trainer.add_callback(monitor.trainer_callback(trainer))
    trainer.train()
    assert sorted(monitor.history) == [0, 2]
    assert any("attention/full/dispersion/max" in entry for entry in trainer.state.log_history)


def test_callbacks_by_hand():
    """The hooks in the order in which a trainer calls them."""
    monitor = probes.Monitor(2, report=lambda _: None)
    logged = []

    class Loop:
        global_step = 0

        def log(self, scalars):
            logged.append(scalars)

    loop = Loop()
    callback = monitor.trainer_callback(loop)
    model = Classifier()
    for loop.global_step in range(3):
        callback.on_step_begin(None, loop, None, model=model)
        model(torch.randint(20, (4, 7)), torch.randint(2, (4,)))
        callback.on_step_end(None, loop, None)
    callback.on_train_end(None, loop, None)
    assert len(logged) == 2
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.skipif(importlib.util.find_spec("lightning") is not None, reason="Lightning is installed")
def test_lightning_is_asked_for_by_name():
    if importlib.util.find_spec("pytorch_lightning") is None:
        with pytest.raises(ValueError, match="install lightning"):
            probes.Monitor().lightning_callback()
