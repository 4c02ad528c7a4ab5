"""The paper's encoder: embedding, pre-LayerNorm blocks with attention under a selection, and a linear readout.

[1] Ram et al., Transformers Learn Faster with Semantic Focus, NeurIPS 2025, Section 5 and Appendix D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from probes.selection import Selection, parse
from stability.attention import SelfAttention, causal_mask
from stability.dropout import Dropout
from stability.errors import UserError

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu, "mish": F.mish}
EPSILON = 1e-5
POSITIONS = 64
"""Positions computed in advance; longer sequences extend them."""


@dataclass(frozen=True)
class EncoderConfig:
    """Everything that determines an encoder's architecture.

    Attributes:
        tokens: size of the vocabulary, padding included.
        classes: number of outputs.
        readout: `mean` classifies the mean over a sequence's tokens, `tokens` classifies every token.
        padding: the token that is padding; None if there is none.
        attention: short name of the selection that the model attends with, such as `full` or `topk:5`.
        blocks: number of blocks.
        width: size of a token's vector.
        hidden: size of the MLP's hidden layer.
        heads: attention heads.
        head_width: size of a head's queries, keys and values; width / heads where None (the released code: width).
        activation: `relu`, `gelu` or `mish`.
        dropout: rate for embeddings, attention weights and MLPs, in training only.
        causal: let a token attend to itself and earlier tokens only.
        inverse_temperature: factor on the logits.
        scalable_softmax: multiply the logits by the logarithm of the number of allowed keys.
        paper_compat: as the released code has it: sequences are padded to a multiple of the mask size, padding is
            attended to and averaged, each head is as wide as the model, and the first normalisation has no epsilon.
    """

    tokens: int
    classes: int
    readout: Literal["mean", "tokens"] = "mean"
    padding: int | None = None
    attention: str = "full"
    blocks: int = 5
    width: int = 64
    hidden: int = 64
    heads: int = 1
    head_width: int | None = None
    activation: str = "relu"
    dropout: float = 0.01
    causal: bool = False
    inverse_temperature: float = 1.0
    scalable_softmax: bool = False
    paper_compat: bool = False

    def __post_init__(self) -> None:
        for name in ("tokens", "classes", "blocks", "width", "hidden", "heads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(
                    f"Expected `{name}` of the encoder to be a whole number of at least 1, but got {value!r}."
                )
        if self.head_width is None and not self.paper_compat and self.width % self.heads:
            raise UserError(
                f"Expected `width` to be a multiple of `heads`, but got {self.width} and {self.heads}; "
                "choose other numbers or give `head_width`."
            )
        if self.width % 2:
            raise UserError(f"Expected an even `width` for sine and cosine positions, but got {self.width}.")
        if self.activation not in ACTIVATIONS:
            raise UserError(
                f"Expected `activation` to be one of {', '.join(ACTIVATIONS)}, but got {self.activation!r}."
            )
        if self.readout not in ("mean", "tokens"):
            raise UserError(f"Expected `readout` to be 'mean' or 'tokens', but got {self.readout!r}.")
        if not 0 <= self.dropout < 1:
            raise UserError(f"Expected `dropout` to be at least 0 and below 1, but got {self.dropout!r}.")
        object.__setattr__(self, "attention", parse(self.attention).name)

    @property
    def selection(self) -> Selection:
        """The selection that `attention` names."""
        return parse(self.attention)

    @property
    def size_of_head(self) -> int:
        """Size of a head's queries, keys and values."""
        if self.head_width is not None:
            return self.head_width
        return self.width if self.paper_compat else self.width // self.heads


class Block(nn.Module):
    """A pre-LayerNorm block: attention, then an MLP, each added to what came in; the norms have no parameters.

    Args:
        config: the encoder's architecture.
        epsilon: added to the variance in the norm before the attention.
    """

    def __init__(self, config: EncoderConfig, epsilon: float = EPSILON) -> None:
        super().__init__()
        self.attention = SelfAttention(
            config.width,
            config.heads,
            config.size_of_head,
            config.selection,
            inverse_temperature=config.inverse_temperature,
            scalable=config.scalable_softmax,
            dropout=config.dropout,
        )
        self.rise = nn.Linear(config.width, config.hidden)
        self.fall = nn.Linear(config.hidden, config.width)
        self.dropout = Dropout(config.dropout)
        self.activation = ACTIVATIONS[config.activation]
        self.width, self.epsilon = config.width, epsilon

    def forward(
        self,
        x: Float[Tensor, "batch token width"],
        allowed: Bool[Tensor, "#batch #head #token token"] | None = None,
    ) -> Float[Tensor, "batch token width"]:
        """Apply the block.

        Args:
            x: one vector a token.
            allowed: the keys that each query may attend to; all where omitted.

        Returns:
            One vector a token.
        """
        x = x + self.attention(F.layer_norm(x, (self.width,), eps=self.epsilon), allowed)
        hidden = self.activation(self.dropout(self.rise(F.layer_norm(x, (self.width,), eps=EPSILON))))
        return x + self.fall(hidden)  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """The paper's encoder [1].

    Two encoders that differ in `attention` alone and are initialised from the same seed start from equal weights.

    Args:
        config: the architecture.
        seed: of the initial weights.
    """

    def __init__(self, config: EncoderConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        with torch.device("meta"):
            self.embedding = nn.Embedding(config.tokens, config.width)
            first = 0.0 if config.paper_compat else EPSILON
            self.blocks = nn.ModuleList(Block(config, EPSILON if index else first) for index in range(config.blocks))
            self.linear = nn.Linear(config.width, config.classes)
        self.to_empty(device="cpu")
        self.dropout = Dropout(config.dropout)
        self.positions: Tensor
        self.register_buffer("positions", sinusoids(POSITIONS, config.width), persistent=False)
        self._multiple = _mask_size(config.selection) if config.paper_compat else 1
        self.reset(seed)

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw new weights: embedding and readout uniform within 0.1, other layers within 1 / sqrt(fan-in).

        Args:
            seed: of the draw.
        """
        generator = torch.Generator().manual_seed(seed)
        self.embedding.weight.uniform_(-0.1, 0.1, generator=generator)
        for module in self.blocks.modules():
            if isinstance(module, nn.Linear):
                bound = 1 / math.sqrt(module.in_features)
                module.weight.uniform_(-bound, bound, generator=generator)
                module.bias.uniform_(-bound, bound, generator=generator)
        self.linear.weight.uniform_(-0.1, 0.1, generator=generator)
        self.linear.bias.zero_()

    def use_generator(self, generator: torch.Generator | None) -> None:
        """Let all dropout draw from one generator.

        Args:
            generator: source of randomness; torch's default one where None.
        """
        for module in self.modules():
            if isinstance(module, Dropout):
                module.generator = generator

    def forward(
        self,
        tokens: Int[Tensor, "batch token"],
        attention_mask: Bool[Tensor, "batch token"] | Int[Tensor, "batch token"] | None = None,
    ) -> Float[Tensor, "batch classes"] | Float[Tensor, "batch token classes"]:
        """Classify sequences, or their tokens.

        Args:
            tokens: token indices.
            attention_mask: True or 1 at real tokens; where omitted, at all that are not the padding token.

        Returns:
            Class scores for each sequence, or for each token (`readout`).
        """
        if self._multiple > 1 and (excess := tokens.shape[1] % self._multiple):
            tokens = F.pad(tokens, (0, self._multiple - excess), value=self.config.padding or 0)
        length = tokens.shape[1]
        real = None if self.config.paper_compat else self._real(tokens, attention_mask)
        allowed = None if real is None else real[:, None, None, :]
        if self.config.causal:
            causal = causal_mask(length, tokens.device)
            allowed = causal if allowed is None else allowed & causal
        x = self.embedding(tokens) * math.sqrt(self.config.width) + self._positions(length)
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x, allowed)
        if self.config.readout == "tokens":
            return self.linear(x)  # type: ignore[no-any-return]
        if real is None:
            return self.linear(x.mean(1))  # type: ignore[no-any-return]
        kept = real[:, :, None].to(x.dtype)
        return self.linear((x * kept).sum(1) / kept.sum(1).clamp(min=1))  # type: ignore[no-any-return]

    def _real(self, tokens: Tensor, mask: Tensor | None) -> Bool[Tensor, "batch token"] | None:
        if mask is not None:
            return mask.bool()
        if self.config.padding is None:
            return None
        real = tokens != self.config.padding
        return None if bool(real.all()) else real

    def _positions(self, length: int) -> Float[Tensor, "token width"]:
        if len(self.positions) < length:
            self.positions = sinusoids(length, self.config.width).to(self.positions)
        return self.positions[:length]


def sinusoids(length: int, width: int) -> Float[Tensor, "token width"]:
    """Sines (even columns) and cosines (odd ones) of the position at falling frequencies (Vaswani et al. 2017).

    Args:
        length: number of positions.
        width: number of columns, even.

    Returns:
        float32 values.
    """
    frequency = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
    angle = torch.arange(length)[:, None] * frequency
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


def _mask_size(selection: Selection) -> int:
    parts = getattr(selection, "parts", (selection,))
    return max(int(getattr(part, "k", getattr(part, "size", 1))) for part in parts)
