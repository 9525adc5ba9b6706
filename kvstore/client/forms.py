"""How a caller's arrays are laid into slots: one shape and one type of numbers for all blocks.

A form enters the namespace, so bytes that were stored as one are never read as another. Arrays of
numpy and tensors of torch with equal shapes and numbers have equal forms: what one process stores
as tensors another one may load as arrays. Torch is not loaded here: `tensor_form.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from kvass.common.errors import Invalid
from kvass.common.keys import Canonical

if TYPE_CHECKING:
    import torch

Slot = NDArray[np.uint8]  # one slot's bytes
Array = TypeVar("Array", bound="NDArray[Any] | torch.Tensor")


class Form(Protocol[Array]):
    """What every block of a store looks like."""

    @property
    def size_bytes(self) -> int: ...

    def identity(self) -> dict[str, Canonical]:
        """Return what enters the namespace."""

    def write(self, block: Array, slot: Slot) -> None:
        """Copy a block into a slot; raises Invalid when it has not this form."""

    def read(self, slot: Slot) -> Array:
        """Return a slot's content as a block that is the caller's own."""


class ArrayForm:
    """Blocks as arrays of numpy. Immutable."""

    def __init__(self, like: NDArray[Any]) -> None:
        if like.dtype.hasobject or not like.dtype.isnative:
            raise Invalid(f"blocks of {like.dtype} have no bytes that others could read")
        self._shape = like.shape
        self._dtype = like.dtype
        self.size_bytes = like.nbytes

    def identity(self) -> dict[str, Canonical]:
        return identity_of(self._shape, self._dtype.name)

    def write(self, block: NDArray[Any], slot: Slot) -> None:
        if not isinstance(block, np.ndarray):
            raise Invalid(f"a block is {type(block).__name__}; this store's are arrays of numpy")
        check_form(self._shape, self._dtype.name, block.shape, block.dtype.name)
        slot.view(self._dtype).reshape(self._shape)[...] = block

    def read(self, slot: Slot) -> NDArray[Any]:
        return slot.copy().view(self._dtype).reshape(self._shape)


def form_of(like: Array) -> Form[Array]:
    """Return the form of blocks that look as `like` does; raises Invalid when none can."""
    form: Any
    if isinstance(like, np.ndarray):
        form = ArrayForm(like)
    else:
        # Late: it loads torch, which whoever has a tensor has loaded.
        from kvass.kvstore.client.tensor_form import TensorForm

        form = TensorForm(like)
    if not form.size_bytes:
        raise Invalid(f"blocks of shape {tuple(like.shape)} are empty")
    made: Form[Array] = form
    return made


def identity_of(shape: Sequence[int], numbers: str) -> dict[str, Canonical]:
    """Return a form as the namespace has it."""
    return {"shape": [int(size) for size in shape], "numbers": numbers}


def check_form(
    shape: Sequence[int], numbers: str, found_shape: Sequence[int], found_numbers: str
) -> None:
    """Raise Invalid unless a block has the store's form."""
    if tuple(shape) != tuple(found_shape) or numbers != found_numbers:
        raise Invalid(
            f"a block has shape {tuple(found_shape)} of {found_numbers}; this store's have "
            f"{tuple(shape)} of {numbers}"
        )
