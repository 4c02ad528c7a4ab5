"""Running a model with another selection, against the same model with masks written in by hand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from probes.apply import apply
from probes.attend import attend
from probes.capture import capture
from probes.effect import outcome
from probes.errors import MissedAttention
from probes.selection import parse

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES
from check_architecture import OwnWeights

SELECTIONS = ("topk:3", "banded:3", "top-p:0.7", "moba:4:1", "quest:2:2", "lsh:4:1", "topk:2+sink:1")


def library_model(kind, implementation):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    shared = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 50}
    if kind == "bert":
        config = transformers.BertConfig(**shared, intermediate_size=64, initializer_range=0.3)
        cls = transformers.BertModel
    elif kind == "gpt2":
        config = transformers.GPT2Config(n_embd=32, n_head=4, n_layer=2, vocab_size=50, initializer_range=0.3)
        cls = transformers.GPT2LMHeadModel
    elif kind == "gpt-oss":
        config = transformers.GptOssConfig(
            **shared, num_key_value_heads=2, head_dim=8, intermediate_size=32, num_local_experts=2,
            num_experts_per_tok=1, sliding_window=4, initializer_range=0.3,
            layer_types=["sliding_attention", "full_attention"],
        )  # fmt: skip
        cls = transformers.GptOssForCausalLM
    else:
        config = transformers.LlamaConfig(**shared, num_key_value_heads=2, intermediate_size=64, initializer_range=0.3)
        cls = transformers.LlamaForCausalLM
    config._attn_implementation = implementation
    return cls(config).eval()


def batch(padding):
    ids = torch.randint(1, 50, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[0, :3] = 0
    if padding == "right":
        mask[1, 8:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def first(output):
    return output.logits if hasattr(output, "logits") else output[0]


LIBRARY = [
    ("bert", "eager"),
    ("bert", "sdpa"),
    ("gpt2", "eager"),
    ("gpt2", "sdpa"),
    ("llama", "eager"),
    ("llama", "sdpa"),
    ("gpt-oss", "eager"),
]


@pytest.mark.parametrize(("kind", "implementation"), LIBRARY)
@pytest.mark.parametrize("padding", ["none", "left", "right"])
def test_full_and_observed_are_bit_identical(kind, implementation, padding):
    model, inputs = library_model(kind, implementation), batch(padding)
    with torch.no_grad():
        plain = first(model(**inputs))
        for selection in ("full", "observed"):
            with apply(model, selection):
                assert first(model(**inputs)).equal(plain)
        assert first(model(**inputs)).equal(plain)


@pytest.mark.parametrize("selection", SELECTIONS)
@pytest.mark.parametrize(("kind", "implementation"), LIBRARY)
def test_the_layer_averages_the_values_of_the_kept_keys(kind, implementation, selection):
    """The first layer's input to its output projection is recomputed from the captured call."""
    model, inputs = library_model(kind, implementation), batch("left")
    projection = next(
        m for n, m in model.named_modules() if n.endswith(("attention.output.dense", "attn.c_proj", "self_attn.o_proj"))
    )
    seen = []
    handle = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        with capture(model) as calls:
            model(**inputs)
        seen.clear()
        with apply(model, selection):
            model(**inputs)
    handle.remove()
    call = calls[0]
    logits, allowed = call.logits(), call.allowed()
    kept = parse(selection).keep(logits, allowed, call=call)
    logits = logits.masked_fill(~kept, -torch.inf)
    if call.sinks is not None:
        logits = torch.cat([logits, call.sinks.float()[None, :, None, None].expand(*logits.shape[:3], 1)], -1)
    weights = logits.softmax(-1)[..., : allowed.shape[-1]].nan_to_num(0.0)
    value = call.value.repeat_interleave(call.shape[1] // call.value.shape[1], 1)
    expected = (weights @ value).transpose(1, 2).flatten(2)
    real = inputs["attention_mask"].bool()
    assert (seen[0].reshape(expected.shape) - expected)[real].abs().max() < 1e-5
    changed = (kept != allowed).any()
    assert bool(changed)


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_eager_and_sdpa_agree_and_nothing_stays_behind(kind):
    eager, sdpa, inputs = library_model(kind, "eager"), library_model(kind, "sdpa"), batch("right")
    sdpa.load_state_dict(eager.state_dict())
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        plain = first(sdpa(**inputs))
        with apply(eager, "topk:2"), apply(sdpa, "topk:2"):
            pass
        with apply(eager, "topk:2"):
            left = first(eager(**inputs))
        with apply(sdpa, "topk:2"):
            right = first(sdpa(**inputs))
        assert (left - right)[real].abs().max() < 1e-4
        assert (left - plain)[real].abs().max() > 1e-3
        assert first(sdpa(**inputs)).equal(plain)


class WrittenOut(nn.Module):
    def __init__(self, style):
        super().__init__()
        torch.manual_seed(0)
        self.style, self.qkv = style, nn.Linear(16, 48)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)  # 3, batch, head, length, dim
        if self.style == "sdpa":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        future = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        if self.style == "einsum":
            scores = torch.einsum("bhid,bhjd->bhij", q, k) / 8**0.5
            weights = scores.masked_fill(future, float("-inf")).softmax(dim=-1)
            return torch.einsum("bhij,bhjd->bhid", weights, v)
        scores = (q @ k.transpose(-2, -1) / 8**0.5).masked_fill(future, -1e9)
        return F.softmax(scores, dim=-1) @ v


@pytest.mark.parametrize("style", ["sdpa", "einsum", "matmul"])
@pytest.mark.parametrize("selection", ["topk:2", "banded:3", "hardmax", "full"])
def test_attention_written_by_hand(style, selection):
    model, x = WrittenOut(style), torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(2)) * 3
    with apply(model, selection):
        out = model(x)
    q, k, v = model.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    logits = q @ k.mT / 8**0.5
    allowed = torch.ones(9, 9, dtype=torch.bool).tril().expand(2, 2, 9, 9)
    kept = parse(selection).keep(logits, allowed)
    expected = logits.masked_fill(~kept, -torch.inf).softmax(-1) @ v
    assert (out - expected).abs().max() < 5e-6
    out.sum().backward()
    assert bool(model.qkv.weight.grad.any())


class Attends(nn.Module):
    def __init__(self, selection):
        super().__init__()
        self.selection, self.linear = parse(selection), nn.Linear(8, 8)

    def forward(self, x, allowed=None):
        x = self.linear(x)[:, None]
        return attend(x, x, x, self.selection, allowed=allowed)


def test_a_model_of_this_project_takes_another_selection():
    model, x = Attends("topk:2"), torch.randn(2, 7, 8) * 2
    allowed = torch.ones(1, 1, 7, 7, dtype=torch.bool).tril()
    plain = model(x, allowed)
    for same in ("topk:2", "observed"):
        with apply(model, same):
            assert model(x, allowed).equal(plain)
    for other in ("full", "banded:3", "moba:2:1"):
        with apply(model, other):
            out = model(x, allowed)
        with capture(model) as calls:
            model(x, allowed)
        kept = parse(other).keep(calls[0].logits(), calls[0].allowed(), call=calls[0])
        expected = calls[0].logits().masked_fill(~kept, -torch.inf).softmax(-1) @ calls[0].value
        assert (out - expected).abs().max() < 1e-5
        assert not out.equal(plain)


def test_dropout_of_a_models_own_choosing_stays():
    x = torch.randn(1, 5, 8)
    model = nn.Module()
    model.forward = lambda x: attend(
        x[:, None], x[:, None], x[:, None], parse("full"), dropout=lambda weights: torch.zeros_like(weights)
    )
    with apply(model, "topk:2"):
        assert model(x).eq(0).all()


def test_multi_head_attention_of_torch():
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2, enable_nested_tensor=False
    ).eval()
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(3)) * 3
    with torch.no_grad():
        plain = model(x)
        with apply(model, "full"):
            assert model(x).equal(plain)
        with apply(model, "topk:99"):
            assert (model(x) - plain).abs().max() < 1e-5
        with apply(model, "hardmax"):
            assert (model(x) - plain).abs().max() > 1e-3
        assert model(x).equal(plain)


def test_what_cannot_be_replaced_is_an_error():
    with pytest.raises(MissedAttention, match="without any"), apply(nn.Linear(4, 4), "topk:2") as model:
        model(torch.zeros(1, 4))
    with pytest.raises(ValueError, match="Expected a selection"), apply(nn.Linear(4, 4), "tok:2"):
        pass
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"), apply("model", "topk:2"):
        pass
    model = WrittenOut("matmul")
    with pytest.raises(ValueError, match="queries and keys"), apply(model, "moba:2:1"):
        model(torch.zeros(1, 5, 16))
    with pytest.raises(RuntimeError, match="own"), apply(model, "topk:2"):
        raise RuntimeError("own")
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=lambda architecture: architecture.name)
def test_every_architecture_takes_a_selection(architecture):
    """The library's own eager code returns its weights: with top-2 in place no query has more than two."""
    model, inputs = architecture.build("eager"), architecture.batch("none")
    with torch.no_grad():
        plain = outcome(model(**inputs)).clone()
        with apply(model, "full"):
            assert outcome(model(**inputs)).equal(plain)
        with apply(model, "topk:2"):
            own = OwnWeights(model)
            changed = outcome(model(**inputs, output_attentions=True))
            own.close()
        assert outcome(model(**inputs)).equal(plain)
    assert not changed.equal(plain)
    assert own.seen
    for weights in own.seen:
        assert (weights > 1e-30).sum(-1).max() <= 2  # a finite mask of the model's own, -100 in Swin, leaves 1e-44
