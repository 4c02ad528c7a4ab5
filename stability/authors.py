"""Checkpoints of the paper's released code, read without executing anything.

Such a file is a pickle that also holds data set objects of the code's own classes. A restricted unpickler reads
tensors, plain values and the attributes of objects; any other name in the pickle is refused, and no code is run.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025, released code.
"""

from __future__ import annotations

import collections
import io
import pickle
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stability.checkpoints import Checkpoint, fit
from stability.errors import UserError
from stability.evaluation import loss_fn
from stability.model import Encoder, EncoderConfig

STORAGES = {
    "FloatStorage": torch.float32, "DoubleStorage": torch.float64, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip
REFUSED = sys.stdlib_module_names | {"torch", "numpy", "pandas", "transformers", "stability", "probes", "theory"}
PLAIN_ATTENTION = ("none", "full", "no", "nomask", "dense", "softmax", "standard", "vanilla", "regular", "all", "")
LAYERS = {
    "attention.query": "attention.W_q",
    "attention.key": "attention.W_k",
    "attention.value": "attention.W_v",
    "attention.out": "attention.W_o",
    "rise": "ffn.0",
    "fall": "ffn.3",
}


class Attributes:
    """An object of a class that is not there: its attributes, and nothing else."""


class _Reader(pickle.Unpickler):
    def __init__(self, data: bytes, archive: zipfile.ZipFile, prefix: str) -> None:
        super().__init__(io.BytesIO(data))
        self._archive, self._prefix = archive, prefix
        self._storages: dict[str, Tensor] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return collections.OrderedDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _tensor
        if module == "torch" and name in STORAGES:
            return STORAGES[name]
        if module.partition(".")[0] in REFUSED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, which is neither a tensor nor a plain value")
        return Attributes  # takes no arguments, so that a call with any fails

    def persistent_load(self, pid: Any) -> Tensor:
        kind, dtype, name, _, count = pid
        if kind != "storage" or not isinstance(dtype, torch.dtype):
            raise pickle.UnpicklingError("it holds a reference that is not a tensor's storage")
        if name not in self._storages:
            data = bytearray(self._archive.read(f"{self._prefix}data/{name}"))
            self._storages[name] = (
                torch.frombuffer(data, dtype=dtype, count=count) if count else torch.empty(0, dtype=dtype)
            )
        return self._storages[name]


def _tensor(storage: Tensor, offset: int, size: Any, stride: Any, *_: Any) -> Tensor:
    return storage.as_strided(tuple(size), tuple(stride), offset)


def read_pickle(path: Path) -> Any:
    """Read tensors and plain values from a file that `torch.save` wrote.

    Args:
        path: the file.

    Returns:
        What was saved; objects of unknown classes become `Attributes`.

    Raises:
        UserError: if it is damaged, or refers to anything but tensors, plain values and unknown classes.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            name = next(name for name in archive.namelist() if name.endswith("data.pkl"))
            return _Reader(archive.read(name), archive, name.removesuffix("data.pkl")).load()
    except StopIteration:
        raise UserError(f"Expected {path} to be a file that torch.save wrote, but it holds no data.") from None
    except (zipfile.BadZipFile, EOFError, OSError) as error:
        raise UserError(
            f"Expected {path} to be a file that torch.save wrote, but it is damaged or cut short ({error})."
        ) from error
    except Exception as error:
        raise UserError(
            f"Expected only tensors and plain values in {path}, but it can't be read so: {error}."
        ) from error


def open_authors(path: Path) -> Checkpoint:
    """Open a checkpoint of the released code; its logits are those of that code without dropout.

    Args:
        path: the .pt file.

    Returns:
        The checkpoint, with the settings dictionary as its configuration and the data that the file holds.

    Raises:
        UserError: if the file is damaged, refers to code, or lacks something.
    """
    saved = read_pickle(path)
    if not isinstance(saved, Mapping):
        raise UserError(f"Expected a dictionary in {path}, but got {type(saved).__name__}.")
    settings, weights = saved.get("cli_args_dict"), saved.get("model_state_dict")
    if not isinstance(settings, Mapping) or not isinstance(weights, Mapping):
        if saved and all(isinstance(value, Tensor) for value in saved.values()):
            raise UserError(f"Expected a model object to load the weights in {path} into, but got none.")
        raise UserError(f"Expected `model_state_dict` and `cli_args_dict` in {path}, but it lacks one of them.")
    try:
        config = _config(settings, weights)
        own = _weights(weights, config.blocks)
        positions = weights["pos_encoder.pe"][0]
    except (KeyError, IndexError, AttributeError, TypeError) as error:
        raise UserError(f"Expected a model of the released code in {path}, but it does not fit ({error!r}).") from error
    model = Encoder(config)
    fit(model, own, path)
    model.positions = positions.clone()
    data: dict[str, Tensor] = {}
    for prefix, name in (("", "train_data"), ("held_out_", "val_data")):
        inputs, labels = (getattr(saved.get(name), key, None) for key in ("X", "y"))
        if isinstance(inputs, Tensor) and isinstance(labels, Tensor):
            data |= {f"{prefix}sequences": inputs.long(), f"{prefix}labels": labels.long()}
    return Checkpoint(
        path=path,
        kind="authors",
        model=model.eval(),
        config=dict(settings),
        loss=loss_fn if data else None,
        **data,
    )


def _config(settings: Mapping[str, Any], weights: Mapping[str, Tensor]) -> EncoderConfig:
    tokens, width = weights["embedding.weight"].shape
    heads = int(settings.get("nheads") or 1)
    temperature = settings.get("inv_temp")
    return EncoderConfig(
        tokens=tokens,
        classes=weights["linear.weight"].shape[0],
        padding=tokens - 1,
        attention=_attention(settings),
        blocks=1 + max(int(name.split(".")[2]) for name in weights if name.startswith("encoder.transformer.")),
        width=width,
        hidden=weights["encoder.transformer.0.ffn.0.weight"].shape[0],
        heads=heads,
        head_width=weights["encoder.transformer.0.attention.W_q.weight"].shape[0] // heads,
        activation=str(settings.get("mlpa") or "relu").lower(),
        dropout=float(settings.get("dropout") or 0.0),
        inverse_temperature=1.0 if temperature is None else float(temperature),
        paper_compat=True,
    )


def _attention(settings: Mapping[str, Any]) -> str:
    mask, size, extra = str(settings.get("mask") or "").lower(), settings.get("mask_size"), settings.get("ngtk")
    if mask in PLAIN_ATTENTION:
        return "full"
    for start, word in (
        ("top", "topk"),
        ("band", "banded"),
        ("block", "block"),
        ("bot", "bottom-k"),
        ("rand", "random-k"),
    ):
        if mask.startswith(start):
            return f"{word}:{size}" + (f"+global:{extra}" if extra and word in ("banded", "block") else "")
    raise UserError(f"Expected a known attention mask in the checkpoint's settings, but got {mask!r}.")


def _weights(weights: Mapping[str, Tensor], blocks: int) -> dict[str, Tensor]:
    own = {name: weights[name] for name in ("embedding.weight", "linear.weight", "linear.bias")}
    for block in range(blocks):
        for mine, theirs in LAYERS.items():
            for kind in ("weight", "bias"):
                own[f"blocks.{block}.{mine}.{kind}"] = weights[f"encoder.transformer.{block}.{theirs}.{kind}"]
    return own
