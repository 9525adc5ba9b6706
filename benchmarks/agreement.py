"""How far is the default model's forward pass from `transformers`, teacher-forced?

Texts of 512 tokens from Python's own documentation, every position's best token compared with that
of `transformers` in float32 (the weights are exact in it). Rows: our two ways of executing weights,
KV stored as bf16 in the paged pool, and for reference `transformers` itself in bf16. Differences
are listed with the reference's margin in nats: near-ties, where rounding decides.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

import rig
from kvass.common.config import DEFAULT_MODEL
from kvass.common.model.fetch import resolve_model
from kvass.common.model.load import load_model
from kvass.common.model.products import Products
from kvass.common.model.runner import uses
from kvass.common.model.spec import load_spec
from kvass.common.model.tokenizer import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
import teacher

OURS = "agreement, weights in bf16"
OURS_FLOAT32 = "agreement, weights in float32"
THEIRS = "agreement, transformers in bf16"


def measure(count: int) -> dict[str, list[teacher.Disagreement]]:
    """Return each way's disagreements with `transformers` in float32 over `count` texts."""
    theirs = rig.required("transformers").AutoModelForCausalLM
    directory = resolve_model(DEFAULT_MODEL, progress=True)
    spec, tokenizer = load_spec(directory), Tokenizer.load(directory)
    reference = theirs.from_pretrained(directory, dtype=torch.float32)
    half = theirs.from_pretrained(directory, dtype=torch.bfloat16)
    ours = load_model(directory, spec, projection_of=Products(uses()).projection)
    ours_float32 = load_model(directory, spec, dtype=torch.float32)
    ways: dict[str, Callable[[list[int]], torch.Tensor]] = {
        OURS: lambda ids: teacher.logits_of(ours, ids),
        OURS_FLOAT32: lambda ids: teacher.logits_of(ours_float32, ids),
        THEIRS: lambda ids: half(torch.tensor([ids])).logits[0].float(),
    }
    found: dict[str, list[teacher.Disagreement]] = {name: [] for name in ways}
    for index, ids in enumerate(teacher.texts(tokenizer, count)):
        with torch.inference_mode():
            expected = reference(torch.tensor([ids])).logits[0]
            for name, way in ways.items():
                found[name] += teacher.disagreements(index, way(ids), expected)
        print(f"text {index + 1} of {count}", file=sys.stderr)
    for item in found[OURS]:
        pair = tokenizer.decode([item.theirs]), tokenizer.decode([item.ours])
        print(f"text {item.text} position {item.position}: {pair}, {item.margin:.3f} nats")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    parser.add_argument("--quick", action="store_true", help="4 texts instead of 20")
    arguments = parser.parse_args()
    count = 4 if arguments.quick else 20
    found = measure(count)
    positions = count * teacher.TEXT_TOKENS
    rows: list[dict[str, object]] = []
    print(f"\n{'':34}{'agree':>9}{'differ':>8}{'largest margin, nats':>22}")
    bound = 0.99
    for name, items in found.items():
        share = 1 - len(items) / positions
        largest = max((item.margin for item in items), default=0.0)
        print(f"{name:34}{share:9.2%}{len(items):8}{largest:22.3f}")
        row = {"name": name, "value": share, "unit": "share", "reference": "asked for"}
        rows.append({**row, "reference_value": bound, "ratio": share / bound})
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
