"""Settings that every test shares."""

from __future__ import annotations

import os

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

# The shapes in the signatures of the numerical core are checked while the tests run.
SHAPED = (
    "probes.attend",
    "probes.attention",
    "probes.leading",
    "probes.scan",
    "stability.attention",
    "stability.dropout",
    "stability.evaluation",
    "stability.model",
)
install_import_hook(SHAPED, "beartype.beartype")

# The suite runs in parallel processes; one thread each keeps them from fighting over the cores.
torch.set_num_threads(1)

settings.register_profile("project", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("project")
