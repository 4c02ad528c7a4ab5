"""Power iteration against the singular values of the whole Jacobian, and beside theory's bounds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from stability import lipschitz
from stability.errors import UserError
from stability.model import Encoder, EncoderConfig

TOKENS = torch.randint(0, 2, (3, 7), generator=torch.Generator().manual_seed(0))


def encoder(attention: str = "full") -> Encoder:
    return Encoder(EncoderConfig(tokens=3, classes=2, blocks=2, width=8, hidden=8, attention=attention), seed=3)


def jacobian(model: Encoder, tokens: Tensor) -> Tensor:
    def function(embedded: Tensor) -> Tensor:
        handle = model.embedding.register_forward_hook(lambda *_: embedded)
        try:
            return model(tokens[None])[0]
        finally:
            handle.remove()

    found: Tensor = torch.func.jacrev(function)(model.embedding(tokens[None]).detach())
    return found[:, 0]  # (class, token, width)


@pytest.mark.parametrize("attention", ["full", "topk:3"])
def test_equals_the_singular_values_of_the_jacobian(attention: str) -> None:
    model = encoder(attention).double().eval()
    whole = lipschitz.local_input(model, TOKENS, tolerance=1e-10, iterations=3000)
    single = lipschitz.local_input(model, TOKENS, norm="token", tolerance=1e-10, iterations=3000)
    assert whole["converged"].all()
    for number, tokens in enumerate(TOKENS):
        exact = jacobian(model, tokens)
        assert whole["value"][number] == pytest.approx(torch.linalg.matrix_norm(exact.flatten(1), 2).item(), rel=1e-6)
        assert whole["residual"][number] < 1e-3
        norms = torch.linalg.matrix_norm(exact.transpose(0, 1), 2)
        assert single["value"][number] == pytest.approx(norms.max().item(), rel=1e-6)
        assert single["token"][number] == norms.argmax().item()


def test_reports_that_it_has_not_converged_and_stays_below() -> None:
    model = encoder().double()
    found = lipschitz.local_input(model, TOKENS, iterations=2, tolerance=1e-12)
    exact = [torch.linalg.matrix_norm(jacobian(model.eval(), tokens).flatten(1), 2).item() for tokens in TOKENS]
    assert not found["converged"].any()
    assert (found["iterations"] == 2).all()
    assert (found["value"] <= np.array(exact) * (1 + 1e-12)).all()
    assert set(found["bound"]) == {"lower bound"}


def test_seeded_and_untouched() -> None:
    model = encoder().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    first, second = (lipschitz.local_input(model, TOKENS, seed=4) for _ in range(2))
    assert first.equals(second)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert not model.embedding._forward_hooks
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_mapping_inputs_and_logits() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = encoder().double()

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> object:
            return type("Output", (), {"logits": self.inner(input_ids, attention_mask)})()

    batch = {"input_ids": TOKENS, "attention_mask": torch.ones_like(TOKENS)}
    found = lipschitz.local_input(Wrapped(), batch, embedding="inner.embedding")
    plain = lipschitz.local_input(encoder().double(), TOKENS)
    np.testing.assert_allclose(found["value"], plain["value"], rtol=1e-9)


@pytest.mark.parametrize("attention", ["full", "topk:3"])
def test_theory_lies_above(attention: str) -> None:
    table = lipschitz.beside_theory(encoder(attention), TOKENS[:2])
    for _, rows in table.groupby("sequence"):
        measured, composed, sharp = rows["log10"]
        assert measured <= composed <= sharp + 1e-12
        assert rows["rung"].iloc[0] == "power iteration"
        assert rows["converged"].iloc[0] in (True, False)
        assert rows["value"].iloc[0] == pytest.approx(10**measured)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"norm": "max"}, "euclidean or token"),
        ({"iterations": 1}, "at least 2 `iterations`"),
        ({"embedding": "tokens"}, "whose embeddings are embedding"),
        ({"embedding": "linear"}, r"\(sequence, token, width\)"),
    ],
)
def test_mistakes(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        lipschitz.local_input(encoder(), TOKENS, **arguments)  # type: ignore[arg-type]
