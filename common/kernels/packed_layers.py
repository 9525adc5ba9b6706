"""A model's layers one after the other in one call of the compiled library.

For models whose weights are packed (`packed.py`), over a pool that the library reads
(`native_paged.py`), and steps that store all their rows. It calls what `model/llama.py` would call
layer by layer, and gives the same bits.

Measured, default model, contexts of 512 tokens: a step of one row takes 6.9 ms, and 8.3 with nine
calls a layer; one of eight rows 9.4, and 11.2.

It refuses to know how rows come to the first layer and what becomes of them after the last.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kvass.common.kernels.native_paged import NativePagedKv, NativePlan
from kvass.common.kernels.packed import LEVEL, PackedWeight
from kvass.common.kernels.turn import Turn
from kvass.common.native import library

_I64, _P = ctypes.c_int64, ctypes.c_void_p


class _Weight(ctypes.Structure):
    _fields_ = [
        ("panels", _P),
        ("bias", _P),
        ("outputs", _I64),
        ("inputs", _I64),
        ("format", _I64),
    ]


class _Layer(ctypes.Structure):
    _fields_ = [
        ("qkv", _Weight * 3),
        ("output", _Weight),
        ("gate_up", _Weight),
        ("down", _Weight),
        ("mlp_norm", _P),
        ("next_norm", _P),
    ]


class _Run(ctypes.Structure):
    _fields_ = [
        ("layers", _P),
        ("layer_count", _I64),
        ("kv_size", _I64),
        ("pool", _P),
        ("step", _P),
        ("cosine", _P),
        ("sine", _P),
        ("slots", _P),
        ("offsets", _P),
        ("rows", _P),
        ("normed", _P),
        ("count", _I64),
        ("epsilon", ctypes.c_double),
        ("threads", _I64),
        ("room", _P),
    ]


@dataclass(frozen=True, slots=True)
class PackedLayer:
    """One layer's weights. Norms bf16 [hidden]; `next_norm` is the next layer's first.

    `qkv`: q‖k‖v as one weight, or q, k and v where a GGUF file has them in several ways.
    """

    qkv: tuple[PackedWeight, ...]
    output: PackedWeight
    gate_up: PackedWeight
    down: PackedWeight
    mlp_norm: torch.Tensor
    next_norm: torch.Tensor


class PackedLayers:
    """The leading layers of a model, which all have the same widths.

    One thread at a time may use it. Mutable field: `_room`, of the rows on their way.
    """

    def __init__(self, layers: Sequence[PackedLayer], kv_size: int, epsilon: float) -> None:
        """`kv_size`: numbers of a row's keys."""
        self._held = tuple(layers)  # the addresses below are of these
        self._layers = (_Layer * len(layers))(*map(_layer, layers))
        self._kv_size = kv_size
        self._epsilon = epsilon
        self._threads = layers[0].output.threads
        self._room = torch.empty(0, dtype=torch.uint8)
        self._room_size, self._run = _functions()

    def run(
        self,
        rows: torch.Tensor,
        normed: torch.Tensor,
        kv: NativePagedKv,
        plan: NativePlan,
        turn: Turn,
        slots: torch.Tensor,
        offsets: torch.Tensor,
    ) -> None:
        """Add what the layers make of float32 `rows` [N, hidden] to them, in place.

        bf16 `normed` [N, hidden] goes in as the first layer wants it, and comes out as the layer
        after the last does. K and V of all rows go to token `offsets` of `slots`, int64 [N].
        """
        count = rows.shape[0]
        assert rows.dtype == torch.float32 and normed.dtype == torch.bfloat16
        assert rows.shape == normed.shape == (count, self._held[0].output.outputs)
        assert slots.shape == offsets.shape == (count,) and plan.rows == count
        each: tuple[torch.Tensor, ...] = (rows, normed, slots, offsets, *turn)
        assert all(tensor.is_contiguous() for tensor in each)
        size = self._room_size(self._layers, count)
        if self._room.numel() < size:
            self._room = torch.empty(size, dtype=torch.uint8)
        run = _Run(
            layers=ctypes.addressof(self._layers),
            layer_count=len(self._held),
            kv_size=self._kv_size,
            pool=kv.pool_address,
            step=ctypes.addressof(plan.step),
            cosine=turn.cosine.data_ptr(),
            sine=turn.sine.data_ptr(),
            slots=slots.data_ptr(),
            offsets=offsets.data_ptr(),
            rows=rows.data_ptr(),
            normed=normed.data_ptr(),
            count=count,
            epsilon=self._epsilon,
            threads=self._threads,
            room=self._room.data_ptr(),
        )
        self._run(ctypes.byref(run))


def _layer(layer: PackedLayer) -> _Layer:
    hidden = layer.output.outputs
    assert layer.mlp_norm.shape == layer.next_norm.shape == (hidden,)
    assert layer.gate_up.outputs == 2 * layer.down.inputs and layer.down.outputs == hidden
    assert len(layer.qkv) in (1, 3)
    return _Layer(
        qkv=(_Weight * 3)(*map(_weight, layer.qkv)),
        output=_weight(layer.output),
        gate_up=_weight(layer.gate_up),
        down=_weight(layer.down),
        mlp_norm=_norm(layer.mlp_norm),
        next_norm=_norm(layer.next_norm),
    )


def _weight(weight: PackedWeight) -> _Weight:
    bias = None if weight.bias is None else weight.bias.data_ptr()
    return _Weight(weight.panels.data_ptr(), bias, weight.outputs, weight.inputs, weight.number)


def _norm(weight: torch.Tensor) -> int:
    assert weight.dtype == torch.bfloat16 and weight.is_contiguous()
    return weight.data_ptr()


@functools.cache
def _functions() -> tuple[Callable[..., int], Callable[..., None]]:
    library.check_sizes("kvass_layers_sizes", LEVEL, _Weight, _Layer, _Run)
    room = library.function_at("kvass_layers_room", LEVEL, _I64, _P, _I64)
    return room, library.function_at("kvass_layers", LEVEL, None, _P)
