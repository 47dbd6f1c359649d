"""Passes through a stack of layers, and how far rounding may lead from their fp32 results."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .attention import Attend
from .models import Model
from .modes import AllReduce, Mode
from .ranks import Ranks
from .weights import Layer

__all__ = ["TOLERANCE", "Inputs", "Step", "difference", "reference", "step", "worst_row"]

TOLERANCE = 2.0
"""Most times the error of ``ar`` that another mode may have, of the worst row.

Modes round at the same places but in the sums over ranks. There ``ar`` rounds ``W`` partial sums and ``W - 1`` sums,
which no mode exceeds. So the errors are alike, and twice as much leaves room for chance. One wrong tile makes the error
of its rows several times larger. With 8-bit operands products of ``ar`` are computed in fp32.
"""

Step = Callable[[], tuple[Tensor, ...]]
"""One pass. Inference returns the output; training also the gradients of the input and of all weights."""


class Inputs:
    """What enters the stack: the same rows on every rank, and in training the gradients of the outputs."""

    def __init__(self, model: Model, m: int, train: bool, ranks: Ranks) -> None:
        torch.manual_seed(0)
        shape = (m, model.hidden)
        self.x = torch.empty(shape, dtype=torch.bfloat16, device=ranks.device).normal_()
        self.dy = torch.empty_like(self.x).normal_() if train else None
        self.own = ranks.own(m)

    def of(self, mode: Mode) -> tuple[Tensor, Tensor | None]:
        """The rows of a mode's layout."""
        if not mode.sharded:
            return self.x, self.dy
        return self.x[self.own], None if self.dy is None else self.dy[self.own]


def _same(layer: Layer) -> Layer:
    return layer


def _forward(layers: Sequence[Layer], x: Tensor, mode: Mode, attend: Attend, convert: Callable[[Layer], Layer] = _same) -> Tensor:
    y = mode.normed(x)
    for index, layer in enumerate(layers):
        layer = convert(layer)
        x, y = mode.block_end(attend(index, mode.column(y, layer.qkv)), layer.out, x, layer.up)
        active = mode.mlp_column(y, layer.up)
        if index + 1 < len(layers):
            x, y = mode.block_end(active, layer.down, x, layers[index + 1].qkv)
        else:
            x = mode.row_residual(active, layer.down, x)
    return x


def _backward(layers: Sequence[Layer], x: Tensor, dy: Tensor, mode: Mode, attend: Attend) -> tuple[Tensor, ...]:
    layers = [layer.map(lambda weight: weight.detach().requires_grad_()) for layer in layers]
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = _forward(layers, x, mode, attend)
        weights = [weight for layer in layers for weight in layer.tensors()]
        return y.detach(), *torch.autograd.grad(y, [x, *weights], dy)


def step(layers: Sequence[Layer], inputs: Inputs, mode: Mode, attend: Attend) -> Step:
    """A pass of a mode."""
    x, dy = inputs.of(mode)
    if dy is not None:
        return lambda: _backward(layers, x, dy, mode, attend)

    def infer() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (_forward(layers, x, mode, attend),)

    return infer


def reference(layers: Sequence[Layer], inputs: Inputs, mode: AllReduce, attend: Attend) -> tuple[Tensor, ...]:
    """The results of a pass in fp32, but for attention, of all rows."""
    x = inputs.x.float()
    if inputs.dy is not None:
        return _backward([layer.map(Tensor.float) for layer in layers], x, inputs.dy.float(), mode, attend)
    with torch.no_grad():
        # One layer's weights at a time: all of them in fp32 may not fit.
        return (_forward(layers, x, mode, attend, lambda layer: layer.map(Tensor.float)),)


def worst_row(found: Sequence[Tensor], expected: Sequence[Tensor], mode: Mode, own: slice) -> float:
    """The largest error of a row, over the mean size of its tensor's rows; in Euclidean norms."""
    worst = 0.0
    for index, (result, exact) in enumerate(zip(found, expected, strict=True)):
        # The output and the input's gradient have the rows of the layout.
        exact = exact[own] if mode.sharded and index < 2 else exact
        if result.shape != exact.shape:
            return float("inf")
        if exact.numel():
            size = exact.norm(dim=1).square().mean().sqrt()
            error = ((result.float() - exact).norm(dim=1).max() / size).item()
            # Not a number is no small error.
            worst = max(worst, error if error == error else float("inf"))
    return worst


def difference(losses: Sequence[float], others: Sequence[float], least: float = 0.0) -> float:
    """The largest relative difference of two losses of a step; infinite where one is not finite.

    A loss counts at least as this part of the first one: what is learned by heart has a loss near zero.
    """
    sizes = [max(abs(one), least * abs(losses[0])) for one in losses]
    found = [abs(one - other) / size if size else math.inf for one, other, size in zip(losses, others, sizes, strict=True)]
    # `max` ignores NaN unless it comes first.
    return max(ratio if math.isfinite(ratio) else math.inf for ratio in found)
