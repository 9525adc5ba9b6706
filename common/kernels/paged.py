"""Which implementation of the kernels seam serves a pool: the compiled one where it can.

torch's serves where there is no compiled library, and models that the library does not. Both store
and attend by the same rules; their bits differ, and `bits` names them.
"""

from __future__ import annotations

import logging
from typing import Any, Protocol

import torch

from kvass.common.block import BlockLayout
from kvass.common.kernels.native_paged import NativePagedKv, unsupported
from kvass.common.kernels.seam import PagedKv
from kvass.common.kernels.torch_paged import TorchPagedKv
from kvass.common.native import library
from kvass.common.pool.memory import SlotMemory

_log = logging.getLogger(__name__)


class Kernels(PagedKv[Any], Protocol):
    """A pool's kernels, and what is known of their arithmetic.

    `deterministic`: a row's bits don't depend on its company; `reason` says why. `bits` names them.
    """

    @property
    def deterministic(self) -> bool: ...

    @property
    def reason(self) -> str: ...

    @property
    def bits(self) -> str: ...


def paged_kv(
    memory: SlotMemory,
    layout: BlockLayout,
    query_heads: int,
    key_offsets: torch.Tensor | None = None,
    key_carry: torch.Tensor | None = None,
) -> Kernels:
    """Return the kernels for a pool; raises Invalid where no implementation serves the model.

    `key_offsets` float32 [layers, H, D] are taken off K before it is stored, and its numbers are
    rounded in turn by `key_carry` [layers, H, D, D].
    """
    if library.level() is None:
        return TorchPagedKv(memory, layout, query_heads, key_offsets, key_carry)
    if why := unsupported(layout, query_heads):
        _log.warning("compiled attention does not serve this model (%s): torch's does", why)
        return TorchPagedKv(memory, layout, query_heads, key_offsets, key_carry)
    return NativePagedKv(memory, layout, query_heads, key_offsets, key_carry)
