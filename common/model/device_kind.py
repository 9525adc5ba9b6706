"""What a worker's machine and libraries make of the arithmetic: a name for the bits that come out.

Workers whose names differ must not share blocks, so the name enters the namespace. It holds what an
operator can act on (which instructions torch uses, torch's version, which instructions the compiled
library uses) and a hash of results: of the model's own products, which tell every order of
summation apart (`products`), of the kernels that store and attend, and of every other operation
that rounds as its library likes. Only a worker can know it: the gateway has no torch, and may run
on another kind of machine.
"""

from __future__ import annotations

from hashlib import blake2b

import torch
import torch.nn.functional as F

from kvass.common.model.layers import add_norm, gated_silu, rms_norm
from kvass.common.model.products import Products
from kvass.common.native import library


@torch.inference_mode()
def device_kind(products: Products, kernels: str) -> str:
    """Name this process's arithmetic; to be called once the model's products were searched.

    `kernels` names the bits of the paged pool's kernels (their `bits`).
    """
    digest = blake2b(f"{products.digest} {kernels}".encode(), digest_size=8)
    for values in _probes():
        digest.update(values.contiguous().view(torch.uint8).numpy().data)
    instructions = torch.backends.cpu.get_cpu_capability()
    version = torch.__version__.split("+")[0]  # without what it was built for, such as "+cpu"
    native = library.level() or "none"
    return f"cpu {instructions}, torch {version}, native {native}, bits {digest.hexdigest()}"


def _probes() -> list[torch.Tensor]:
    """Compute what the model and attention do, on numbers that exact operations made."""
    steps = torch.arange(1, 40_001, dtype=torch.float32)
    small = (steps * 7919 % 10_007 - 5_003) / 512
    rows = small.view(100, 400)
    tiles = small[:32_768].view(2, 64, 256)
    halves = rows.to(torch.bfloat16)
    summed = rows.clone()
    return [
        torch.exp(small),
        torch.cos(steps),
        torch.sin(steps),
        torch.rsqrt(steps),
        F.silu(small.to(torch.bfloat16)),
        rms_norm(rows, halves[1], 1e-5),
        add_norm(summed, halves, halves[1], 1e-5),
        summed,
        gated_silu(halves),
        torch.softmax(rows, -1),
        rows.square().mean(-1),
        rows.sum(-1),
        torch.bmm(tiles, tiles.transpose(1, 2)),
    ]
