"""The version of the arithmetic that decides the bits of stored KV. Torch-free: keys need it too.

It enters the namespace: workers whose arithmetic differs must not share blocks. What a machine and
its libraries make of the same version is `model/device_kind.py`'s to say.
"""

from __future__ import annotations

from typing import Literal

from kvass.common.block import KvDtype

# Bump it whenever an implementation changes a bit of what is stored.
NUMERICS = "paged-3"

# Which of K and V are stored rotated by the Hadamard matrix (`rotation.py`): both in the integer
# formats, whose error is that of the greatest number.
ROTATED: dict[KvDtype, str] = {"fp8": "k", "int8": "kv", "int4": "kv", "bf16": ""}

# What weights are executed as, and its name in the namespace: all that changes a value. `native`:
# as the model's file has them (`gguf_blocks.py`); what it has in 16 or 32 bits, as bf16. The others
# make something of their bf16 values (`weight_formats.py`).
WeightFormat = Literal["native", "bf16", "int8", "int4"]
WEIGHTS: dict[WeightFormat, str] = {
    "bf16": "bf16",
    "int8": "int8, groups of 32",
    "int4": "int4 and a minimum, groups of 32; logits int8",
    "native": "as the GGUF file has them",
}
