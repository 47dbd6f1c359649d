"""One rank's random weights, and what a layer computes beside its linear layers and attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import Model

__all__ = ["EPS", "Layer", "activate", "norm", "random_layer"]

EPS = 1e-5
"""What a norm adds to the mean square; Llama-3's."""


def norm(model: Model, x: Tensor) -> Tensor:
    """The norm before a column-parallel layer."""
    return F.rms_norm(x, (model.hidden,), eps=EPS) if model.gated else F.layer_norm(x, (model.hidden,), eps=EPS)


def activate(model: Model, x: Tensor) -> Tensor:
    """The activation between the MLP's linear layers."""
    if not model.gated:
        return F.gelu(x, approximate="tanh")
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class Layer:
    """One rank's weights, ``[out, in]``: two column-parallel ones, each before a row-parallel one; of bf16 or 8 bits."""

    qkv: Tensor
    out: Tensor
    up: Tensor
    down: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.qkv, self.out, self.up, self.down

    def map(self, convert: Callable[[Any], Any]) -> Layer:
        return Layer(*(convert(tensor) for tensor in self.tensors()))


def random_layer(model: Model, world: int, device: torch.device) -> Layer:
    """Frozen weights with which values keep their size. The generator of the device differs from rank to rank."""
    heads = (model.heads + 2 * model.kv_heads) * model.head_dim
    inner = model.inner * (2 if model.gated else 1)

    def draw(rows: int, cols: int, fan_in: int) -> Tensor:
        weight = torch.empty(rows, cols, dtype=torch.bfloat16, device=device)
        return nn.Parameter(weight.normal_(std=fan_in**-0.5), requires_grad=False)

    attended = model.heads * model.head_dim
    return Layer(
        qkv=draw(heads // world, model.hidden, model.hidden),
        out=draw(model.hidden, attended // world, attended),
        up=draw(inner // world, model.hidden, model.hidden),
        down=draw(model.hidden, model.inner // world, model.inner),
    )
