"""Linear layers in 8 bits: rows and weights of E4M3 with scales, and their product by torch.

Invariant: every mode quantises by the same kernel, with the norm before a column-parallel layer in it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .._arguments import BLOCK
from .._comm import Communicator
from .._scales import E4M3, dequantised, quantize_rows, quantized_weight, scale_of, scaled_product
from ..errors import OperandError
from .ranks import Ranks
from .weights import Layer

__all__ = ["Rows", "Weight", "product", "quantized", "quantized_layer", "with_scales_of_inputs"]


@dataclass(frozen=True)
class Weight:
    """``[out, in]`` of one rank."""

    codes: Tensor
    scale: Tensor
    form: str
    of_input: Tensor | None = None
    """The static scale of the layer's input, with scales of tensors."""

    @property
    def scales_of_input(self) -> str | Tensor:
        """How the layer's input is quantised."""
        return self.form if self.of_input is None else self.of_input

    @property
    def shape(self) -> torch.Size:
        return self.codes.shape

    def wide(self) -> Tensor:
        """In fp32."""
        return dequantised(self.codes, self.scale, self.form, True)


@dataclass(frozen=True)
class Rows:
    """``[rows, in]``, with scales of rows and blocks behind each row, or in memory of their own."""

    codes: Tensor
    scale: Tensor
    form: str

    def wide(self) -> Tensor:
        """In fp32."""
        return dequantised(self.codes, self.scale, self.form)

    def carried(self) -> Tensor:
        """Codes and the scales behind them, as bytes."""
        if self.form == "tensor":
            return self.codes.view(torch.uint8)
        rows, step = self.codes.shape[0], self.codes.stride(0)
        return self.codes.as_strided((rows, step), (step, 1)).view(torch.uint8)

    def gathered(self, carried: Tensor) -> Rows:
        """What such bytes of all ranks hold."""
        k = self.codes.shape[1]
        scale = self.scale
        if self.form != "tensor":
            scale = carried.view(torch.float32)[:, k // 4 : k // 4 + scale.shape[1]]
        return Rows(carried.view(E4M3)[:, :k], scale, self.form)


def quantized(comm: Communicator, x: Tensor, weight: Weight, carried: bool, norm: tuple[Tensor, float] | None = None) -> Rows:
    """The input of a layer; ``carried``: whether scales lie behind each row; ``norm``: gain and epsilon of an RMSNorm before."""
    return Rows(*quantize_rows(x, weight.scales_of_input, norm=norm, carried=carried, group=comm), weight.form)


def product(x: Rows, weight: Weight, out: Tensor | None = None) -> Tensor:
    """``x @ weight.T`` in bf16 by torch."""
    return scaled_product(x.codes, weight.codes, x.scale, weight.scale, x.form, out=out)


def quantized_layer(layer: Layer, form: str) -> Layer:
    """A layer's weights, quantised."""

    def convert(weight: Tensor) -> Weight:
        multiple = BLOCK if form == "block" else 16
        if any(extent % multiple for extent in weight.shape):
            shape = " x ".join(map(str, weight.shape))
            raise OperandError(f"a rank's weight is {shape}, and {form} scales need multiples of {multiple}: give other --scales, --models or --tp")
        codes, scale = quantized_weight(weight, form)
        return Weight(nn.Parameter(codes, requires_grad=False), scale, form)

    return layer.map(convert)


def with_scales_of_inputs(layers: list[Layer], largest: list[float], ranks: Ranks) -> list[Layer]:
    """The layers with static scales, of the ``largest`` magnitudes that the inputs of their weights have on any rank."""
    scales = iter([scale_of(torch.tensor([[of]], device=ranks.device)) for of in ranks.largest(largest)])
    return [layer.map(lambda weight: replace(weight, of_input=next(scales))) for layer in layers]
