"""Hand-written attention, torch's own modules, and what capture must leave as it was."""

from __future__ import annotations

import math
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import probes

BATCH, LENGTH, HEADS, DIM = 3, 7, 2, 8
WIDTH = HEADS * DIM


def inputs(seed=0):
    x = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed)) * 2
    real = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    real[0, 4:] = False
    return x, real


class Base(nn.Module):
    """Projections; the subclasses attend, each in its own style, and keep their weights."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.num_heads = HEADS
        self.drop = nn.Dropout(0.1)

    def split(self, x):
        return (t.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def forward(self, x, real):
        q, k, v = self.split(x)
        return self.attend(q, k, v, real[:, None, None, :]).transpose(1, 2).flatten(2)


class Fused(Base):
    def attend(self, q, k, v, mask):
        self.w = ((q @ k.mT) / math.sqrt(DIM)).masked_fill(~mask, -torch.inf).softmax(-1)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Softmax(Base):
    def attend(self, q, k, v, mask):
        scores = (q @ k.transpose(-2, -1)) * DIM**-0.5
        scores = scores.masked_fill(mask == 0, -1e9)
        self.w = F.softmax(scores, dim=-1)
        return self.drop(self.w) @ v


class Causal(Base):
    def attend(self, q, k, v, mask):
        allowed = mask & torch.ones(LENGTH, LENGTH).tril().bool()
        scores = torch.where(allowed, torch.matmul(q, k.mT) / math.sqrt(DIM), torch.finfo(q.dtype).min)
        self.w = torch.softmax(scores, -1)
        return torch.matmul(self.w, v)


class Additive(Base):
    def attend(self, q, k, v, mask):
        scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * DIM**-0.5
        scores += (1.0 - mask.float()) * -10000.0
        self.w = nn.Softmax(dim=-1)(scores)
        return torch.einsum("bhqk,bhkd->bhqd", self.w, v)


class Folded(Base):
    def attend(self, q, k, v, mask):
        q, k, v = (t.reshape(BATCH * HEADS, LENGTH, DIM) for t in (q, k, v))
        scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(DIM)
        scores = scores.masked_fill(~mask.expand(-1, HEADS, LENGTH, -1).reshape(scores.shape), -torch.inf)
        w = scores.softmax(dim=-1)
        self.w = w.view(BATCH, HEADS, LENGTH, LENGTH)
        return torch.bmm(w, v).view(BATCH, HEADS, LENGTH, DIM)


class HugeLogits(Base):
    """Real logits far below every mask value in use."""

    def attend(self, q, k, v, mask):
        scores = (q @ k.mT) * 1e4 - 1e6
        self.w = scores.masked_fill(~mask, -1e15).softmax(-1)
        return self.w @ v


class SoftCapped(Base):
    def attend(self, q, k, v, mask):
        scores = torch.tanh((q @ k.mT) / 5.0) * 5.0
        self.w = (scores + torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)).softmax(-1)
        return self.w @ v


class Attend(Base):
    def attend(self, q, k, v, mask):
        kept = probes.TopK(2).keep((q @ k.mT) * 0.3, mask.expand(-1, HEADS, LENGTH, -1))
        self.w = ((q @ k.mT) * 0.3).masked_fill(~kept, -torch.inf).softmax(-1)
        return probes.attend(q, k, v, probes.TopK(2), allowed=mask, scale=0.3)


STYLES = [Fused, Softmax, Causal, Additive, Folded, HugeLogits, SoftCapped, Attend]


@pytest.mark.parametrize("style", STYLES)
def test_hand_written_attention_is_read_exactly(style):
    model = style().eval()
    x, real = inputs()
    plain = model(x, real)
    with probes.capture(model) as calls:
        watched = model(x, real)
    assert torch.equal(plain, watched)
    (call,) = calls
    assert call.shape == (BATCH, HEADS, LENGTH, LENGTH)
    assert (call.weights() - model.w).abs().max() < 1e-5
    expected = real[:, None, None, :].expand(call.shape)
    if style is Causal:
        expected = expected & torch.ones(LENGTH, LENGTH).tril().bool()
    assert torch.equal(call.allowed(), expected)
    for rows in (slice(2, 5), range(2, 5), [2, 3, 4], torch.tensor([2, 3, 4])):
        assert torch.equal(call.logits(rows), call.logits()[:, :, 2:5])
    assert torch.equal(call.logits(-1), call.logits()[:, :, -1:])
    assert torch.equal(call.allowed(slice(2, 5)), call.allowed()[:, :, 2:5])


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("training", [True, False])
def test_outputs_gradients_and_modes_are_the_same_with_and_without(style, training):
    x, real = inputs()
    results = []
    for watched in (False, True):
        model = style().train(training)
        given = x.clone().requires_grad_()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            if watched:
                with probes.watch(model, [probes.Full(), probes.TopK(2)]):
                    output = model(given, real)
            else:
                output = model(given, real)
        output.square().sum().backward()
        assert model.training is training
        results.append([output, given.grad, *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_half_precision_is_upcast_before_the_product(dtype):
    model = Fused().to(dtype).eval()
    x, real = inputs()
    with torch.no_grad(), probes.capture(model) as calls:
        model(x.to(dtype), real)
    (call,) = calls
    logits = call.logits()
    assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    exact = (call.query.double() @ call.key.double().mT) * call.scale
    torch.testing.assert_close(logits.double(), exact, atol=1e-5, rtol=1e-5)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Softmax() for _ in range(2))

    def forward(self, x, real):
        for layer in self.layers:
            x = x + layer(x, real)
        return x


def snapshot(model):
    modules = list(model.modules())
    return [
        (len(m._forward_hooks), len(m._forward_pre_hooks), m.training, "forward" in m.__dict__, m.forward.__func__)
        for m in modules
    ] + [F.scaled_dot_product_attention, F.softmax, torch.backends.mha.get_fastpath_enabled()]


def test_everything_is_restored_after_an_exception_and_the_model_can_be_watched_again():
    model = Pair()
    x, real = inputs()
    before = snapshot(model)

    def fail():
        with probes.watch(model) as watch:
            watches.append(watch)
            model(x, real)
            raise RuntimeError("on purpose")

    watches = []
    with pytest.raises(RuntimeError, match="on purpose"):
        fail()
    assert snapshot(model) == before
    with pytest.raises(RuntimeError), probes.capture(model):
        model(x[:, :, :3], real)
    assert snapshot(model) == before
    assert watches[0].calls == 2
    with probes.capture(model) as calls:
        model(x, real)
    assert [call.module_name for call in calls] == ["layers.0", "layers.1"]
    assert [call.layer for call in calls] == [0, 1]


def test_a_failed_forward_inside_does_not_confuse_the_next():
    model = Pair()
    x, real = inputs()
    with probes.capture(model) as calls:
        with pytest.raises(RuntimeError):
            model(x[:, :, :3], real)
        model(x, real)
    assert [call.module_name for call in calls] == ["layers.0", "layers.1"]


def test_nested_captures_both_see_every_call():
    model = Pair()
    x, real = inputs()
    with probes.capture(model) as outer, probes.watch(model.layers[1]) as inner, probes.capture(model) as third:
        model(x, real)
    assert len(outer) == len(third) == 2
    assert inner.calls >= 1
    assert torch.equal(outer[0].weights(), third[0].weights())


def test_two_threads_each_see_their_own_calls():
    model = Pair().eval()
    x, real = inputs()
    plain = model(x, real)
    seen, barrier = {}, threading.Barrier(3)

    def work(name, watching):
        barrier.wait()
        for _ in range(5):
            if watching:
                with probes.capture(model) as calls:
                    output = model(x, real)
                seen.setdefault(name, []).append((len(calls), torch.equal(output, plain)))
            else:
                seen.setdefault(name, []).append((2, torch.equal(model(x, real), plain)))

    threads = [threading.Thread(target=work, args=(n, n < 2)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(seen[n] == [(2, True)] * 5 for n in range(3))
    assert snapshot(model) == snapshot(Pair().eval())[: len(snapshot(model))]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", ["encoder", "layer", "attention"])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_torch_modules_keep_their_fast_path_and_their_outputs(kind, training):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 32, batch_first=True)
        model = {
            "encoder": nn.TransformerEncoder(layer, 2),
            "layer": layer,
            "attention": nn.MultiheadAttention(WIDTH, HEADS, batch_first=True),
        }[kind].train(training)
    x, real = inputs()
    args = (x, x, x) if kind == "attention" else (x,)
    padding = {"key_padding_mask" if kind == "attention" else "src_key_padding_mask": ~real}
    outputs = []
    for watched in (False, True):
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(1)
            if watched:
                with probes.capture(model) as calls:
                    output = model(*args, **padding)
            else:
                output = model(*args, **padding)
        outputs.append(output[0] if isinstance(output, tuple) else output)
    assert torch.equal(*outputs)
    assert "forward" not in model.__dict__
    assert len(calls) == (2 if kind == "encoder" else 1)
    for call in calls:
        assert torch.equal(call.allowed(), real[:, None, None].expand(call.shape))
        assert torch.equal(call.queries, real)


def test_multi_head_attention_weights():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x, _ = inputs()
    causal = torch.ones(LENGTH, LENGTH).triu(1).bool()
    for need in (True, False):
        with probes.capture(model) as calls:
            model(x, x, x, attn_mask=causal, need_weights=need, average_attn_weights=False)
        weights = model(x, x, x, attn_mask=causal, average_attn_weights=False)[1]
        assert (calls[0].weights() - weights).abs().max() < 1e-6
        assert torch.equal(calls[0].allowed(), ~causal.expand(calls[0].shape))
    with probes.capture(model) as calls:
        model(x, x[:, :3], x[:, :3])
    assert calls[0].kind == "cross"


def test_a_shared_module_is_named_by_its_calls():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Softmax()

        def forward(self, x, real):
            return self.layer(self.layer(x, real), real)

    with probes.capture(Shared()) as calls:
        pass
    model = Shared()
    with probes.capture(model) as calls:
        for _ in range(2):
            model(*inputs())
    assert [call.module_name for call in calls] == ["layer", "layer#1"] * 2


# What can't be read must be named.


class ByHand(Base):
    def attend(self, q, k, v, mask):
        powers = torch.exp((q @ k.mT) / math.sqrt(DIM))
        return (powers / powers.sum(-1, keepdim=True)) @ v


class OtherDimension(Base):
    def attend(self, q, k, v, mask):
        return ((k @ q.mT) / math.sqrt(DIM)).softmax(-2).mT @ v


class TalkingHeads(Base):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(HEADS, HEADS)

    def attend(self, q, k, v, mask):
        w = ((q @ k.mT) / math.sqrt(DIM)).softmax(-1)
        return self.mix(w.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) @ v


class ChannelAttention(Base):
    def attend(self, q, k, v, mask):
        w = ((q.mT @ k) / math.sqrt(LENGTH)).softmax(-1)
        return (w @ v.mT).mT


class Traced(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.jit.trace(Plain(), inputs()[0])

    def forward(self, x, real):
        return self.inner(x)


class Plain(nn.Module):
    def forward(self, x):
        return (x @ x.mT).softmax(-1) @ x


@pytest.mark.parametrize("style", [ByHand, OtherDimension, TalkingHeads, ChannelAttention, Traced])
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_what_cannot_be_read_is_named(style):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.good = Softmax()
            self.odd = style()

        def forward(self, x, real):
            return self.odd(self.good(x, real), real)

    model, batch = Model(), inputs()
    with pytest.raises(probes.MissedAttention, match="odd"):
        probes.measure(model, [batch])
    with pytest.warns(UserWarning, match="odd"):
        table = probes.measure(model, [batch], on_missing="warn")
    assert set(table["module"]) == {"good", ""}
    assert any(name.startswith("odd") for name in table.attrs["missing"])
    with pytest.raises(probes.MissedAttention), probes.watch(model):
        model(*batch)


class LinearAttention(Base):
    def attend(self, q, k, v, mask):
        q, k = F.elu(q) + 1, F.elu(k) + 1
        return q @ (k.mT @ v) / (q @ k.sum(-2, keepdim=True).mT)


class MambaMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        state, out = torch.zeros(BATCH, WIDTH), []
        for step in x.unbind(1):
            state = state * torch.exp(-self.decay) + step
            out.append(state)
        return torch.stack(out, 1)


def test_other_token_mixers_are_named_and_no_error():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.linear, self.state = Softmax(), LinearAttention(), MambaMixer()
            self.conv = nn.Conv1d(LENGTH, LENGTH, 3, padding=1)

        def forward(self, x, real):
            return self.conv(self.state(self.linear(self.attention(x, real), real)))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        table = probes.measure(Model(), [inputs()])
    other = table.attrs["not_softmax_attention"]
    assert set(other) == {"linear", "state", "conv"}
    assert "linear attention" in other["linear"]
    assert "state-space" in other["state"]
    assert "convolution" in other["conv"]
    assert not table.attrs["missing"]


def test_a_router_is_not_taken_for_attention():
    class SoftMoE(nn.Module):
        """Slots of experts, dispatched and combined by softmax gates."""

        def __init__(self):
            super().__init__()
            self.slots = nn.Parameter(torch.randn(4, 2, WIDTH))
            self.gate = nn.Linear(WIDTH, LENGTH)

        def forward(self, x):
            logits = torch.einsum("bnd,esd->bnes", x, F.normalize(self.slots, dim=-1)).flatten(2)
            inside = logits.softmax(1).mT @ x
            x = logits.softmax(-1) @ inside
            return self.gate(x).softmax(-1) @ x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.experts = Softmax(), SoftMoE()

        def forward(self, x, real):
            return self.experts(self.attention(x, real))

    with probes.capture(Model()) as calls:
        model = Model()
    with probes.capture(model) as calls:
        model(*inputs())
    assert [call.module_name for call in calls] == ["attention"]


def test_checkpointed_layers_are_seen_once():
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = Softmax()

        def forward(self, x, real):
            return checkpoint(self.layer, x, real, use_reentrant=False)

    model = Model()
    x, real = inputs()
    with probes.capture(model) as calls:
        model(x.requires_grad_(), real).sum().backward()
    assert len(calls) == 1


def test_wrong_arguments():
    with pytest.raises(ValueError, match=r"torch\.nn\.Module"), probes.capture(lambda x: x):
        pass
    with pytest.raises(ValueError, match="on_missing"):
        probes.measure(Pair(), [inputs()], on_missing="ignore")
