"""Opening of library folders and of files of weights, and the mistakes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import stability
from stability.checkpoints import read_lines
from stability.errors import UserError
from stability.figures import learning_curves

transformers = pytest.importorskip("transformers")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small GPT-2 built at random, with a tokenizer."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    config = transformers.GPT2Config(vocab_size=12, n_positions=16, n_embd=8, n_layer=2, n_head=2, eos_token_id=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    words = {word: index for index, word in enumerate(["[UNK]", "[EOS]", "a", "b", "c"])}
    plain = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", eos_token="[EOS]")
    tokenizer.save_pretrained(tmp_path / "gpt2")
    return tmp_path / "gpt2"


def test_library_folder(folder: Path, tmp_path: Path) -> None:
    checkpoint = stability.open(folder)
    assert checkpoint.kind == "transformers"
    assert type(checkpoint.model).__name__ == "GPT2LMHeadModel"
    assert not checkpoint.model.training
    (tmp_path / "text.txt").write_text("a b c\n\na\nc c b a\n" + "a " * 40)
    batches = list(checkpoint.batches(text=tmp_path / "text.txt", batch_size=3))
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(3, 4), (1, 16)]
    assert batches[0]["attention_mask"].sum(1).tolist() == [3, 1, 4]
    assert checkpoint.model(**batches[0]).logits.shape == (3, 4, 12)
    assert len(list(checkpoint.batches(text=["a", "b"], limit=1))) == 1
    with pytest.raises(UserError, match="give a text"):
        checkpoint.batches()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "neither"),
        (lambda f: (f / "model.safetensors").unlink(), "none"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 100), "can't be loaded"),
        (lambda f: (f / "config.json").write_text("{"), "JSON"),
        (lambda f: (f / "config.json").write_text("{}"), "model_type"),
        (lambda f: (f / "config.json").write_text('{"model_type": "nonesuch"}'), "nonesuch"),
        (lambda f: _narrow(f), "can't be loaded"),
    ],
)
def test_damaged_library_folders(folder: Path, damage: Any, message: str) -> None:
    damage(folder)
    with pytest.raises(UserError, match=message) as caught:
        stability.open(folder)
    assert "\n" not in str(caught.value)


def _narrow(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "n_embd": 16}))


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_weights_with_a_model(tmp_path: Path, suffix: str) -> None:
    source, target = nn.Linear(3, 2), nn.Linear(3, 2)
    path = tmp_path / f"weights{suffix}"
    save_file(source.state_dict(), path) if suffix == ".safetensors" else torch.save(source.state_dict(), path)
    checkpoint = stability.open(path, model=target)
    assert checkpoint.kind == "weights"
    assert torch.equal(target.weight, source.weight)
    with pytest.raises(UserError, match="model object"):
        stability.open(path)
    with pytest.raises(UserError, match="shape"):
        stability.open(path, model=nn.Linear(4, 2))
    with pytest.raises(UserError, match="lacks"):
        stability.open(path, model=nn.Sequential(nn.Linear(3, 2)))


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such file or folder"):
        stability.open(tmp_path / "nothing")
    with pytest.raises(UserError, match="neither"):
        stability.open(tmp_path)


@pytest.mark.parametrize(("content", "message"), [(b"", "empty"), (b" \n \n", "empty"), (b"ok \xff", "byte 3")])
def test_bad_text(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(UserError, match=message):
        read_lines(tmp_path / "text.txt")


def test_learning_curves() -> None:
    history = pd.DataFrame(
        {"epoch": [1, 2, 3], "train_accuracy": [0.5, 0.96, 1.0], "heldout_accuracy": [0.5, 0.9, np.nan]}
    )
    ax = learning_curves({"full": history, "top-5": history[:1]})
    assert learning_curves({"again": history}, ax) is ax
    labels = [text.get_text() for text in ax.get_legend().get_texts()]
    assert labels[0] == "full, training (95%: epoch 2)"
    assert labels[2] == "top-5, training (95%: never)"
    assert "epoch" in ax.get_xlabel()
    assert "%" in ax.get_ylabel()
