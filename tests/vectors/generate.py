"""Print or write the published test vectors of keys and block layouts.

    python tests/vectors/generate.py            # prints both
    python tests/vectors/generate.py --write    # writes keys.json and block.json beside this file

Another implementation of Kvass's names and layouts is right when it gives these values. They change
only with `LAYOUT_VERSION` or a new hash; the worker's own check of them is `keys.self_check`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from kvass.common import keys
from kvass.common.block import LAYOUT_VERSION, BlockLayout

IDENTITY: dict[str, keys.Canonical] = {"model": "vector", "kv_dtype": "fp8", "block_tokens": 4}
TOKENS = [0, 1, 2, 3, 49_151, 65_536, 4_294_967_295, 7, 8, 9, 10, 11, 12]
LAYOUTS = {
    "default model, fp8": BlockLayout(30, 3, 64, 16, "fp8"),
    "default model, int8": BlockLayout(30, 3, 64, 16, "int8"),
    "default model, int4": BlockLayout(30, 3, 64, 16, "int4"),
    "default model, bf16": BlockLayout(30, 3, 64, 16, "bf16"),
    "8 heads of 128, 4 groups, fp8": BlockLayout(32, 8, 128, 16, "fp8", 4),
    "5x16 heads, odd block, int8": BlockLayout(2, 4, 80, 5, "int8", 2),
    "5x16 heads, odd block, int4": BlockLayout(2, 4, 80, 5, "int4", 2),
}


def key_vectors() -> dict[str, object]:
    """Return chains of one token sequence: public, private, and private after a public prefix."""
    namespace = keys.namespace_of(IDENTITY)
    salt = keys.salt_of(b"vector secret", "tenant-a", "own salt")
    chains = {
        "public": keys.Chain(namespace, 4),
        "private": keys.Chain(namespace, 4, salt=salt),
        "private after one public block": keys.Chain(namespace, 4, salt=salt, public_blocks=1),
    }
    for chain in chains.values():
        chain.extend(TOKENS)
    return {
        "identity": IDENTITY,
        "namespace": namespace.hex(),
        "block_tokens": 4,
        "tokens": TOKENS,
        "salt": {
            "secret": b"vector secret".hex(),
            "tenant": "tenant-a",
            "cache_salt": "own salt",
            "value": salt.hex(),
        },
        "chains": {name: [key.hex() for key in chain.keys] for name, chain in chains.items()},
        "with extra": {
            "parent": namespace.hex(),
            "tokens": TOKENS[:4],
            "extra": "00ff",
            "key": keys.block_key(namespace, TOKENS[:4], extra=b"\x00\xff").hex(),
        },
    }


def block_vectors() -> dict[str, object]:
    """Return sizes and some offsets of a few layouts, in bytes."""
    return {
        "layout_version": LAYOUT_VERSION,
        "layouts": [_layout(name, layout) for name, layout in LAYOUTS.items()],
    }


def _layout(name: str, layout: BlockLayout) -> dict[str, object]:
    head, layer, token = layout.kv_heads - 1, layout.layers - 1, layout.block_tokens - 1
    last = {"head": head, "layer": layer, "value": True, "token": token}
    return {
        "name": name,
        **layout.identity(),
        "codes_size": layout.codes_size,
        "scales_size": layout.scales_size,
        "record_size": layout.record_size,
        "layer_size": layout.layer_size,
        "group_size": layout.group_size,
        "block_size": layout.block_size,
        "last_row": last,
        "last_row_code_offset": layout.code_offset(head, layer, True, token),
        "last_row_scale_offset": (
            layout.scale_offset(head, layer, True, token, layout.scale_parts - 1)
            if layout.has_scales
            else None
        ),
    }


def main() -> None:
    """Print both files, or write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="replace the files beside this one")
    write = bool(parser.parse_args().write)
    for name, vectors in (("keys.json", key_vectors()), ("block.json", block_vectors())):
        text = json.dumps(vectors, indent=2) + "\n"
        if write:
            (Path(__file__).parent / name).write_text(text)
        else:
            print(f"--- {name}\n{text}")


if __name__ == "__main__":
    main()
