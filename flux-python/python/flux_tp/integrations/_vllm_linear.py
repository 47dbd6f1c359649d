"""A linear layer of vLLM as one op of a compiled graph, which a pass may give its collective.

Invariant: an op that no pass has replaced computes what vLLM's layer does. Layers have the same numbers on every rank.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor

from ._vllm_fp8 import held, kernel_of

__all__ = ["LINEAR", "count", "layer_of", "marked", "number"]

_layers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_count = 0


def _theirs(x: Tensor, weight: Tensor, scale_w: Tensor | None, scale_x: Tensor | None, bias: Tensor | None, layer: int) -> Tensor:
    of = _layers[layer]
    # Ranks add partial results: the first has the bias.
    first = of.flux_op == "all_gather_matmul" or of.tp_rank == 0
    return of.quant_method.apply(of, x, bias if first else None)


def _fake(x: Tensor, weight: Tensor, scale_w: Tensor | None, scale_x: Tensor | None, bias: Tensor | None, layer: int) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_library = torch.library.Library("flux_vllm", "DEF")
_library.define("linear(Tensor x, Tensor weight, Tensor? scale_w, Tensor? scale_x, Tensor? bias, int layer) -> Tensor")
for _device in ("CPU", "CUDA"):
    _library.impl("linear", _theirs, _device)
torch.library.register_fake("flux_vllm::linear", _fake, lib=_library)
LINEAR = torch.ops.flux_vllm.linear.default
"""Of ``x`` ``[m, k]`` in 16 bits, the weight ``[n, k]`` and its scales, the input's given scale, the bias, and the layer's number."""


def number(layer: Any) -> int:
    """Has graphs name the layer by a number, in the order of such calls."""
    global _count
    _count += 1
    _layers[_count] = layer
    # vLLM's own call runs outside of torch.compile, where its quantisation in torch is slow.
    quantise = getattr(kernel_of(layer), "quant_fp8", None)
    if quantise is not None:
        quantise._forward_method = quantise.forward_cuda
    return _count


def count() -> int:
    """The last number of a layer."""
    return _count


def layer_of(number: int) -> Any:
    return _layers[number]


def marked(layer: Any, x: Tensor) -> Tensor | None:
    """The layer's product as one op; ``None`` where the weight is not as flux_tp takes it."""
    found = held(layer, layer.flux_scales)
    if found is None:
        return None
    weight, scale = found
    rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    given = layer.input_scale.reshape(1, 1) if layer.flux_scales == "tensor" else None
    y = LINEAR(rows, weight, scale, given, None if layer.skip_bias_add else layer.bias, layer.flux_number)
    return y if x.dim() == 2 else y.reshape(*x.shape[:-1], y.shape[-1])
