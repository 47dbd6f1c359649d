"""8-bit linear layers of vLLM, as flux_tp's ops take them.

Invariant: weights and scales are used where vLLM holds them once it has loaded a model. A layer that holds them otherwise
stays vLLM's.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from .._arguments import BLOCK

__all__ = ["MULTIPLES", "computes", "held", "kernel_of", "scales_of", "widen"]

# Linear methods, and a scheme of compressed tensors, that leave 8-bit weights to `fp8_linear`.
_METHODS = {
    "CompressedTensorsW8A8Fp8",
    "Fp8LinearMethod",
    "Fp8OnlineLinearMethod",
    "Fp8PerBlockOnlineLinearMethod",
    "Fp8PerTensorOnlineLinearMethod",
    "ModelOptFp8LinearMethod",
}
# By whether the input's scale is static, and the extents of groups of input and weight; -1 is all.
_FORMS = {
    (True, (-1, -1), (-1, -1)): "tensor",
    (False, (1, -1), (-1, -1)): "row",
    (False, (1, -1), (-1, 1)): "row",
    (False, (1, BLOCK), (BLOCK, BLOCK)): "block",
}
MULTIPLES = {"none": 8, "tensor": 16, "row": 16, "block": BLOCK}
"""By the form of scales, what the features of a rank are multiples of."""


def scales_of(layer: Any) -> str | None:
    """The form of a layer's scales, ``none`` of 16-bit weights; ``None`` where flux_tp has no such form."""
    if type(layer.quant_method).__name__ == "UnquantizedLinearMethod":
        return "none"
    kernel = kernel_of(layer)
    if kernel is None:
        return None
    config = kernel.config
    x, weight = config.activation_quant_key.scale, config.weight_quant_key.scale
    return _FORMS.get((x.static, tuple(x.group_shape), tuple(weight.group_shape)))


def kernel_of(layer: Any) -> Any:
    """vLLM's kernel for an 8-bit layer of a form that is looked for here; ``None`` of others."""
    method = layer.quant_method
    if type(method).__name__ == "CompressedTensorsLinearMethod":
        method = layer.scheme
    return method.fp8_linear if type(method).__name__ in _METHODS else None


def computes(scales: str) -> bool:
    """Whether this GPU and the settings let the op take operands with such scales."""
    if scales == "none":
        return True
    from vllm import envs

    # Batch-invariant vLLM dequantises weights, but those with scales of blocks.
    return torch.cuda.get_device_capability() == (9, 0) and (scales == "block" or not envs.VLLM_BATCH_INVARIANT)


def widen(layer: Any) -> None:
    """Has the one scale of a weight stand for each of its rows, whenever vLLM has processed what it loaded.

    vLLM quantises the input by rows, for which flux_tp takes a scale of each row of the weight. So do vLLM's kernels.
    """
    process = layer.quant_method.process_weights_after_loading

    @functools.wraps(process)
    def run(layer: Any) -> None:
        process(layer)
        scale = layer.weight_scale
        if scale.numel() == 1:
            layer.weight_scale = Parameter(scale.detach().reshape(1, 1).repeat(layer.output_size_per_partition, 1), requires_grad=False)

    layer.quant_method.process_weights_after_loading = run


def held(layer: Any, form: str) -> tuple[Tensor, Tensor | None] | None:
    """The weight ``[n, k_r]`` and its scales, views of what the layer holds; ``None`` where a kernel of vLLM has repacked them.

    16-bit weights have no scales.
    """
    if form == "none":
        return layer.weight, None
    # With scales other than those of blocks, vLLM holds `[k_r, n]`: a view of rows as loaded.
    weight = layer.weight if form == "block" else layer.weight.t()
    scale = getattr(layer, "weight_scale_inv", None)
    scale = layer.weight_scale if scale is None else scale
    n, k = layer.output_size_per_partition, layer.input_size_per_partition
    shape = {"tensor": (1, 1), "row": (1, n), "block": (n // BLOCK, k // BLOCK)}[form]
    if weight.dtype != torch.float8_e4m3fn or tuple(weight.shape) != (n, k) or tuple(weight.stride()) != (k, 1):
        return None
    if scale.dtype != torch.float32 or scale.numel() != shape[0] * shape[1] or not scale.is_contiguous():
        return None
    return weight, scale.reshape(shape)
