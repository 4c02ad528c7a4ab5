"""Nothing is missed silently: what ran and looks like attention, but was not captured.

Three things give attention away: the name of a module's class, a softmax or exponential of products of activations,
and a softmax in the dispatcher that no torch function announced (traced and scripted code). Token mixers that are
known not to be softmax attention are named beside that, and are no error.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from probes.capture.frames import Frame
from probes.errors import MissedAttention

ATTENTION = re.compile(r"attention|attn|multi_?head|\bMHA\b", re.IGNORECASE)
NOT_ITSELF = re.compile(r"(output|norm|dropout|droppath|embedding|bias|mask|config|model|layerscale)s?$", re.IGNORECASE)
LINEAR = re.compile(
    r"linear_?att|performer|hyena|rwkv|ret(net|ention)|delta_?(net|rule)|favor|cosformer", re.IGNORECASE
)
STATE_SPACE = re.compile(r"mamba|\bs4|ssm|ssd|state_?space|selective_?scan|rg_?lru|griffin|xlstm", re.IGNORECASE)
OTHER_MIXER = re.compile(r"fnet|fourier|gmlp|spatial_?gating|mixer", re.IGNORECASE)
SOFTMAX_LIKE = {"softmax", "softmax_", "_softmax", "log_softmax", "softmin", "exp", "exp_", "exp2", "logsumexp"}
HIDDEN_KERNELS = (
    "_softmax",
    "_safe_softmax",
    "_scaled_dot_product",
    "_native_multi_head_attention",
    "_transformer_encoder",
)


@dataclass
class Findings:
    """What an audit found.

    Args:
        missing: layers that look like softmax attention and were not read, with the reason.
        other: layers that mix tokens without softmax attention, with what they are.
    """

    missing: dict[str, str] = field(default_factory=dict)
    other: dict[str, str] = field(default_factory=dict)

    def report(self, on_missing: str) -> None:
        """Raise or warn if anything was missed.

        Args:
            on_missing: `raise` or `warn`.

        Raises:
            MissedAttention: if something was missed and `on_missing` is `raise`.
        """
        if not self.missing:
            return
        layers = "; ".join(f"{name or 'the model itself'} ({reason})" for name, reason in self.missing.items())
        message = f"Expected to read the logits of every attention layer, but could not read {layers}"
        if on_missing == "raise":
            raise MissedAttention(f"{message}; use on_missing='warn' to measure the others.")
        warnings.warn(f"{message}; the others are measured.", stacklevel=4)


@dataclass
class _Open:
    """What had been seen when a module was entered."""

    claims: int
    suspects: int
    found: int


class Audit:
    """Counts claims and suspicious operations, module by module.

    Args:
        findings: where to note what is found.
    """

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self._claims = 0
        self._suspects: list[str] = []
        self._found = 0
        self._open: list[_Open] = []

    def entered(self) -> None:
        """A module begins to run."""
        self._open.append(_Open(self._claims, len(self._suspects), self._found))

    def claimed(self) -> None:
        """An attention call was captured."""
        self._claims += 1

    def suspect(self, reason: str) -> None:
        """Something ran that a softmax attention would consist of.

        Args:
            reason: what it was.
        """
        self._suspects.append(reason)

    def missed(self, frame: Frame | None, reason: str) -> None:
        """Attention ran that can't be read.

        Args:
            frame: the running module.
            reason: why.
        """
        kind = "" if frame is None else f"{type(frame.module).__name__}: "
        self.findings.missing.setdefault("" if frame is None else frame.name, kind + reason)
        self._found += 1

    def left(self, frame: Frame) -> None:
        """A module has run; say what it was.

        Args:
            frame: the module.
        """
        if not self._open:
            return
        seen = self._open.pop()
        kind, module = type(frame.module).__name__, frame.module
        if self._claims > seen.claims or self._found > seen.found:
            return
        what = _other_mixer(module, kind)
        if what is not None:
            self.findings.other.setdefault(frame.name, f"{kind}: {what}")
            self._found += 1
        elif looks_like_attention(module):
            reasons = self._suspects[seen.suspects :]
            if reasons:
                self.missed(frame, reasons[0])
            elif sum(parameter.ndim >= 2 for parameter in module.parameters()) >= 2:
                self.findings.other.setdefault(frame.name, f"{kind}: no softmax ran in it")
                self._found += 1


def looks_like_attention(module: nn.Module) -> bool:
    """Whether a module's class is named after attention.

    Args:
        module: any module.

    Returns:
        True for names such as `BertSelfAttention`, not for what stands beside it, such as `AttentionOutput`.
    """
    name = type(module).__name__
    return ATTENTION.search(name) is not None and NOT_ITSELF.search(name) is None


def _other_mixer(module: nn.Module, kind: str) -> str | None:
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        mixes = any(size > step for size, step in zip(module.kernel_size, module.stride, strict=True))
        return "convolution, not softmax attention" if mixes else None
    if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        return "recurrence, not softmax attention"
    for pattern, what in (
        (LINEAR, "linear attention"),
        (STATE_SPACE, "state-space layer"),
        (OTHER_MIXER, "token mixing"),
    ):
        if pattern.search(kind) and not kind.endswith(("Model", "Norm", "Block", "Layer", "LM", "Cache", "Config")):
            return f"{what}, not softmax attention"
    return None


class Dispatched(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees attention kernels that no torch function announced.

    Args:
        announced: whether a torch function is running, which has been looked at already.
        report: called with the kernel's name.
    """

    supports_higher_order_operators = True

    def __init__(self, announced: Callable[[], bool], report: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._announced = announced
        self._report = report

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        schema = getattr(func, "_schema", None)
        name = "" if schema is None else schema.name.partition("::")[2]
        if name.startswith(HIDDEN_KERNELS) and "backward" not in name and not self._announced():
            first = args[0] if args else None
            if not name.endswith("softmax") or (isinstance(first, Tensor) and first.ndim >= 3):
                self._report(f"{name} ran in compiled or traced code")
        return result


def without_modes() -> Any:
    """A context in which no dispatch mode is active.

    Returns:
        The context.
    """
    return torch.utils._python_dispatch._disable_current_modes()
