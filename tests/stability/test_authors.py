"""The reader of the released code's checkpoints: equal logits, and nothing is executed."""

from __future__ import annotations

import json
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import stability
from stability.authors import LAYERS
from stability.errors import UserError
from stability.model import Encoder, EncoderConfig

REFERENCE = Path(__file__).parents[3] / "shared" / "reference"
SETTINGS = {"nheads": 1, "mask": "topk", "mask_size": 3, "inv_temp": None, "mlpa": "gelu", "dropout": 0.01, "ngtk": 0}


@pytest.mark.skipif(not (REFERENCE / "even-pairs-top5-authors.pt").is_file(), reason="the reference file is not here")
def test_reference_checkpoint_gives_the_listed_logits() -> None:
    listed = json.loads((REFERENCE / "even-pairs-top5.json").read_text())
    checkpoint = stability.open(REFERENCE / "even-pairs-top5-authors.pt")
    assert checkpoint.kind == "authors"
    assert checkpoint.config["seed"] == 140439608
    with torch.inference_mode():
        logits = checkpoint.model(torch.tensor(listed["first_inputs"]))
        torch.testing.assert_close(logits, torch.tensor(listed["first_logits"]), rtol=0, atol=1e-5)
        assert checkpoint.sequences is not None
        assert checkpoint.loss is not None
        loss = checkpoint.loss(checkpoint.model(checkpoint.sequences), checkpoint.labels)
    assert checkpoint.sequences[:4].tolist() == listed["first_inputs"]
    assert float(loss) == pytest.approx(listed["mean_loss_5000"], rel=1e-2)
    assert checkpoint.held_out_sequences is not None
    assert checkpoint.held_out_sequences.shape == (2000, 40)


class Pairs:  # pickled by reference to a module that the reader does not know
    pass


Pairs.__module__, Pairs.__qualname__ = "somebodys_datasets", "Pairs"


def _save(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Encoder, Tensor]:
    import sys
    import types

    module = types.ModuleType("somebodys_datasets")
    module.Pairs = Pairs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "somebodys_datasets", module)
    config = EncoderConfig(
        tokens=3,
        classes=2,
        padding=2,
        attention="topk:3",
        blocks=2,
        width=8,
        hidden=6,
        activation="gelu",
        paper_compat=True,
    )
    model = Encoder(config, seed=3).eval()
    weights = model.state_dict()
    theirs = {name: weights[name] for name in ("embedding.weight", "linear.weight", "linear.bias")}
    theirs["pos_encoder.pe"] = model.positions[None, :9]
    for name, other in LAYERS.items():
        for block in range(2):
            for kind in ("weight", "bias"):
                theirs[f"encoder.transformer.{block}.{other}.{kind}"] = weights[f"blocks.{block}.{name}.{kind}"]
    data = Pairs()
    data.X, data.y = torch.randint(0, 2, (5, 9)), torch.randint(0, 2, (5,))  # type: ignore[attr-defined]
    torch.save({"cli_args_dict": SETTINGS, "train_data": data, "model_state_dict": theirs, "epoch": 3}, path)
    return model, data.X  # type: ignore[attr-defined]


def test_synthetic_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = _save(tmp_path / "last.pt", monkeypatch)
    checkpoint = stability.open(tmp_path / "last.pt")
    assert torch.equal(checkpoint.sequences, x)  # type: ignore[arg-type]
    assert checkpoint.held_out_sequences is None
    assert torch.equal(checkpoint.model(x), model(x))
    with pytest.raises(UserError, match="held-out data"):
        checkpoint.batches(held_out=True)


@pytest.mark.parametrize(
    ("mask", "selection"), [("none", "full"), (None, "full"), ("banded", "banded:3"), ("block", "block:3")]
)
def test_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: str | None, selection: str) -> None:
    monkeypatch.setitem(SETTINGS, "mask", mask)
    _save(tmp_path / "last.pt", monkeypatch)
    assert stability.open(tmp_path / "last.pt").model.config.attention == selection


class _Evil:
    def __init__(self, call: Any) -> None:
        self.call = call

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize(
    "call",
    [(os.system, ("touch owned",)), (eval, ("open('owned', 'w')",)), (os.getcwd, ()), (torch.load, ("x",))],
    ids=["system", "eval", "no arguments", "torch"],
)
def test_malicious_pickle_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with zipfile.ZipFile("evil.pt", "w") as archive:
        archive.writestr("evil/data.pkl", pickle.dumps({"model_state_dict": _Evil(call)}, protocol=2))
    with pytest.raises(UserError, match="tensors and plain values"):
        stability.open("evil.pt")
    assert not Path("owned").exists()


def test_call_of_an_unknown_class_with_arguments_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "evil.pt", "w") as archive:
        archive.writestr("evil/data.pkl", b"\x80\x02cunheard_of\nthing\nX\x01\x00\x00\x00a\x85R.")
    with pytest.raises(UserError, match="tensors and plain values"):
        stability.open(tmp_path / "evil.pt")


def test_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _save(tmp_path / "last.pt", monkeypatch)
    whole = (tmp_path / "last.pt").read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cut short"):
        stability.open(tmp_path / "half.pt")
