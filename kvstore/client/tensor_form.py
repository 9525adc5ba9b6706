"""Blocks as tensors of torch; on any device, with any strides. See `forms.py`."""

from __future__ import annotations

import torch

from kvass.common.errors import Invalid
from kvass.common.keys import Canonical
from kvass.kvstore.client.forms import Slot, check_form, identity_of


class TensorForm:
    """Immutable. What is read is on the CPU."""

    def __init__(self, like: torch.Tensor) -> None:
        if not isinstance(like, torch.Tensor):
            raise Invalid(
                f"blocks are to look as a {type(like).__name__}; expected an array of numpy or a "
                "tensor of torch"
            )
        self._shape = like.shape
        self._dtype = like.dtype
        self.size_bytes = like.numel() * like.element_size()

    def identity(self) -> dict[str, Canonical]:
        return identity_of(self._shape, _name(self._dtype))

    def write(self, block: torch.Tensor, slot: Slot) -> None:
        if not isinstance(block, torch.Tensor):
            raise Invalid(f"a block is {type(block).__name__}; this store's are tensors of torch")
        check_form(self._shape, _name(self._dtype), block.shape, _name(block.dtype))
        self._view(slot).copy_(block.detach())

    def read(self, slot: Slot) -> torch.Tensor:
        return self._view(slot.copy())

    def _view(self, slot: Slot) -> torch.Tensor:
        return torch.from_numpy(slot).view(self._dtype).reshape(self._shape)


def _name(dtype: torch.dtype) -> str:
    """Return a type's name as numpy has it, where that has one."""
    return str(dtype).removeprefix("torch.")
