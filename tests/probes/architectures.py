"""Tiny random models of every supported architecture, with weights large enough that attention is not flat."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as tf
from torch import nn

VOCABULARY = 60
BASE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 40,
}
GROUPED = BASE | {"num_key_value_heads": 2}
LLAMA = GROUPED | {"head_dim": 8}
GEMMA = LLAMA | {"query_pre_attn_scalar": 8, "sliding_window": 4}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
SPEECH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "vocab_size": VOCABULARY,
}


@dataclass(frozen=True)
class Architecture:
    """How to build one model and what to give it.

    Args:
        name: as the list of supported models has it.
        model: its class.
        config: its configuration.
        kind: `encoder`, `decoder`, `both`, `image`, `windows`, `speech` or `pair`.
        only_eager: the library has no other implementation.
        differs: the library's own eager and sdpa code give different attention.
        window: sliding window of each layer, where it has any.
    """

    name: str
    model: Callable[..., nn.Module]
    config: Callable[[], Any]
    kind: str
    only_eager: bool = False
    differs: bool = False
    window: tuple[int | None, ...] = (None, None)

    def build(self, implementation: str, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model in evaluation mode, the same weights for every implementation."""
        config = self.config()
        config._attn_implementation = implementation
        random = torch.random.get_rng_state()
        torch.manual_seed(0)
        model = self.model(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 and "embed" not in name.lower():
                parameter.data.mul_(0.25 / parameter.data.std().clamp_min(1e-6))
            elif "sinks" in name:
                parameter.data.normal_()
        torch.random.set_rng_state(random)
        return model.to(dtype)

    def batch(self, padding: str) -> dict[str, torch.Tensor]:
        """Three sequences of nine tokens, the last two padded on the side that `padding` says."""
        generator = torch.Generator().manual_seed(1)
        mask = torch.ones(3, 9, dtype=torch.long)
        if padding == "right":
            mask[1, 5:] = mask[2, 7:] = 0
        elif padding == "left":
            mask[1, :4] = mask[2, :2] = 0
        ids = torch.randint(3, VOCABULARY, (3, 9), generator=generator) * mask
        given = {"input_ids": ids, "attention_mask": mask} if padding != "none" else {"input_ids": ids}
        size = 32 if self.kind == "windows" else 16
        pixels = {"pixel_values": torch.randn(3, 3, size, size, generator=generator)}
        if self.kind in ("image", "windows"):
            return pixels
        if self.kind == "pair":
            return given | pixels
        if self.kind == "both":
            return given | {"decoder_input_ids": torch.randint(3, VOCABULARY, (3, 6), generator=generator)}
        if self.kind == "speech":
            return {"input_features": torch.randn(3, 8, 40, generator=generator), "decoder_input_ids": ids[:, :6]}
        return given

    @property
    def paddings(self) -> tuple[str, ...]:
        """The paddings that make sense for its inputs."""
        return ("none",) if self.kind in ("image", "windows", "speech") else ("none", "left", "right")

    @property
    def implementations(self) -> tuple[str, ...]:
        """The library's own implementations that run everywhere."""
        return ("eager",) if self.only_eager else ("eager", "sdpa")


def _bloom() -> Any:
    return tf.BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=VOCABULARY)


def _falcon(**extra: Any) -> Any:
    return tf.FalconConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, vocab_size=VOCABULARY, **extra)


def _gpt(kind: Any, **extra: Any) -> Any:
    return kind(n_embd=32, n_layer=2, n_head=4, vocab_size=VOCABULARY, n_positions=40, **extra)


def _clip() -> Any:
    return tf.CLIPConfig(
        text_config=BASE | {"projection_dim": 16}, vision_config=VISION | {"projection_dim": 16}, projection_dim=16
    )


def _without(settings: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in names}


ARCHITECTURES = [
    Architecture("BERT", tf.BertModel, lambda: tf.BertConfig(**BASE), "encoder"),
    Architecture("RoBERTa", tf.RobertaModel, lambda: tf.RobertaConfig(**BASE), "encoder"),
    Architecture(
        "DistilBERT",
        tf.DistilBertModel,
        lambda: tf.DistilBertConfig(
            dim=32, n_layers=2, n_heads=4, hidden_dim=48, vocab_size=VOCABULARY, max_position_embeddings=40
        ),
        "encoder",
    ),
    Architecture("ALBERT", tf.AlbertModel, lambda: tf.AlbertConfig(**BASE, embedding_size=16), "encoder"),
    Architecture("ELECTRA", tf.ElectraModel, lambda: tf.ElectraConfig(**BASE, embedding_size=16), "encoder"),
    Architecture(
        "DeBERTa-v2",
        tf.DebertaV2Model,
        lambda: tf.DebertaV2Config(**BASE, relative_attention=True, pos_att_type=["p2c", "c2p"], type_vocab_size=0),
        "encoder",
        only_eager=True,
    ),
    Architecture("MPNet", tf.MPNetModel, lambda: tf.MPNetConfig(**BASE), "encoder", only_eager=True),
    Architecture(
        "ModernBERT",
        tf.ModernBertModel,
        lambda: tf.ModernBertConfig(**BASE, pad_token_id=0, global_attn_every_n_layers=2, local_attention=6),
        "encoder",
    ),
    Architecture("GPT-2", tf.GPT2Model, lambda: _gpt(tf.GPT2Config), "decoder"),
    Architecture(
        "GPT-Neo",
        tf.GPTNeoModel,
        lambda: tf.GPTNeoConfig(
            hidden_size=32,
            num_layers=2,
            num_heads=4,
            intermediate_size=48,
            vocab_size=VOCABULARY,
            max_position_embeddings=40,
            attention_types=[[["global", "local"], 1]],
            window_size=4,
        ),
        "decoder",
        only_eager=True,
        window=(None, 4),
    ),
    Architecture("GPT-NeoX", tf.GPTNeoXModel, lambda: tf.GPTNeoXConfig(**BASE), "decoder"),
    Architecture("GPT-J", tf.GPTJModel, lambda: _gpt(tf.GPTJConfig, rotary_dim=4), "decoder"),
    Architecture(
        "OPT",
        tf.OPTModel,
        lambda: tf.OPTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            ffn_dim=48,
            vocab_size=VOCABULARY,
            max_position_embeddings=40,
            word_embed_proj_dim=32,
        ),
        "decoder",
    ),
    Architecture("BLOOM", tf.BloomModel, _bloom, "decoder", only_eager=True),
    Architecture("Falcon", tf.FalconModel, _falcon, "decoder"),
    Architecture(
        "Falcon with ALiBi",
        tf.FalconModel,
        lambda: _falcon(alibi=True, multi_query=False),
        "decoder",
        differs=True,
    ),
    Architecture(
        "MPT",
        tf.MptModel,
        lambda: tf.MptConfig(d_model=32, n_layers=2, n_heads=4, vocab_size=VOCABULARY, max_seq_len=40),
        "decoder",
        only_eager=True,
    ),
    Architecture("Llama", tf.LlamaModel, lambda: tf.LlamaConfig(**LLAMA), "decoder"),
    Architecture(
        "Mistral", tf.MistralModel, lambda: tf.MistralConfig(**LLAMA, sliding_window=4), "decoder", window=(4, 4)
    ),
    Architecture("Mixtral", tf.MixtralModel, lambda: tf.MixtralConfig(**LLAMA, num_local_experts=4), "decoder"),
    Architecture("Qwen2", tf.Qwen2Model, lambda: tf.Qwen2Config(**GROUPED), "decoder"),
    Architecture("Qwen3", tf.Qwen3Model, lambda: tf.Qwen3Config(**LLAMA), "decoder"),
    Architecture(
        "Gemma 2",
        tf.Gemma2Model,
        lambda: tf.Gemma2Config(**GEMMA, attn_logit_softcapping=5.0),
        "decoder",
        only_eager=True,
        window=(4, None),
    ),
    Architecture(
        "Gemma 3",
        tf.Gemma3TextModel,
        lambda: tf.Gemma3TextConfig(**GEMMA, layer_types=["sliding_attention", "full_attention"]),
        "decoder",
        window=(4, None),
    ),
    Architecture("Phi", tf.PhiModel, lambda: tf.PhiConfig(**BASE), "decoder"),
    Architecture("StableLM", tf.StableLmModel, lambda: tf.StableLmConfig(**GROUPED), "decoder"),
    Architecture("OLMo 2", tf.Olmo2Model, lambda: tf.Olmo2Config(**GROUPED, pad_token_id=0, eos_token_id=1), "decoder"),
    Architecture("Cohere", tf.CohereModel, lambda: tf.CohereConfig(**GROUPED), "decoder"),
    Architecture(
        "gpt-oss",
        tf.GptOssModel,
        lambda: tf.GptOssConfig(**LLAMA, sliding_window=4, num_local_experts=4),
        "decoder",
        only_eager=True,
        window=(4, None),
    ),
    Architecture(
        "T5",
        tf.T5Model,
        lambda: tf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=VOCABULARY),
        "both",
    ),
    Architecture("BART", tf.BartModel, lambda: tf.BartConfig(**SPEECH, max_position_embeddings=40), "both"),
    Architecture(
        "Whisper",
        tf.WhisperModel,
        lambda: tf.WhisperConfig(
            **SPEECH,
            max_source_positions=20,
            max_target_positions=20,
            num_mel_bins=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=1,
        ),
        "speech",
    ),
    Architecture("ViT", tf.ViTModel, lambda: tf.ViTConfig(**VISION), "image"),
    Architecture("DeiT", tf.DeiTModel, lambda: tf.DeiTConfig(**VISION), "image"),
    Architecture(
        "Swin",
        tf.SwinModel,
        lambda: tf.SwinConfig(
            image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4
        ),
        "windows",
    ),
    Architecture("CLIP", tf.CLIPModel, _clip, "pair"),
    Architecture(
        "DINOv2",
        tf.Dinov2Model,
        lambda: tf.Dinov2Config(**_without(VISION, "intermediate_size"), mlp_ratio=2),
        "image",
    ),
]
