"""While the tests run, the shapes in the signatures of the numerical core are enforced."""

from __future__ import annotations

import pytest
import torch
from jaxtyping import TypeCheckError

import probes


def test_a_wrong_shape_does_not_pass_unnoticed() -> None:
    query, key = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5, 4)
    probes.attend(query, key, key, probes.Full())
    with pytest.raises(TypeCheckError, match="value"):
        probes.attend(query, key, key[:, :, :4], probes.Full())
