"""Classes of modules that a style has placed on a mesh: a module keeps its hooks, its names and its identity, and changes its class."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement, Replicate, Shard

from .._comm import Communicator
from .._ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from .._rows import all_reduce
from .._torch import copied_input_linear
from ..errors import OperandError
from ._mesh import arrange, local, present, summed

__all__ = ["ColwiseLinear", "Gathered", "Layout", "RowwiseLinear", "VocabularyEmbedding", "gathered", "replicated"]


class Layout(NamedTuple):
    """What a style says of a module."""

    comm: Communicator
    input: Placement
    output: Placement
    use_local_output: bool
    keep_gathered: bool = False
    partials: str | None = None
    features: slice | None = None
    """This rank's output features, of a weight that every rank has whole."""


class Gathered:
    """The gathered input of a module that only hands it to its column-parallel layers: its shape, and their results.

    The rows of all ranks are nowhere in memory: they went through one op.
    """

    def __init__(self, shape: torch.Size, results: Sequence[Tensor]) -> None:
        self.shape, self.results = shape, results

    def __getattr__(self, name: str) -> Any:
        raise OperandError(f"a module under flux_tp.Fused reads .{name} of its input, which only the named layers may read: name all layers that do")


class ColwiseLinear(nn.Linear):
    """A linear layer whose output features are split over the ranks."""

    layout: Layout
    column: int
    """Its number among the layers of a module under ``Fused``."""

    def forward(self, x: Tensor | Gathered) -> Tensor:
        layout = self.layout
        if isinstance(x, Gathered):
            return self._presented(x.results[self.column])
        whole = not isinstance(layout.input, Shard) or layout.input.dim in (-1, x.ndim - 1)
        x = arrange(x, self.weight.device_mesh, layout.input, Replicate() if whole else layout.input)
        weight, bias = self.own()
        if whole:
            y = copied_input_linear(x, weight, bias, weight.shape[0] * layout.comm.world_size, layout.comm)
        else:
            y = all_gather_matmul(x, weight, bias, group=layout.comm, sequence_dim=layout.input.dim, keep_gathered=layout.keep_gathered)
        return self._presented(y)

    def own(self) -> tuple[Tensor, Tensor | None]:
        """The weight and bias that this rank multiplies by."""
        weight, bias, layout = local(self.weight), local(self.bias), self.layout
        if layout.features is None:
            return weight, bias
        weight = summed(weight, layout.comm)[layout.features]
        return weight, None if bias is None else summed(bias, layout.comm)[layout.features]

    def _presented(self, y: Tensor) -> Tensor:
        return present(y, self.weight.device_mesh, Shard(-1), self.layout.output, self.layout.use_local_output)


class RowwiseLinear(nn.Linear):
    """A linear layer whose input features are split over the ranks."""

    layout: Layout
    residual: Tensor | None = None
    """What the next call adds."""
    following: Sequence[nn.Module] = ()
    """The RMSNorm of a sum with a residual, which is given what the op has computed."""

    def forward(self, x: Tensor) -> Tensor:
        layout, mesh = self.layout, self.weight.device_mesh
        x = arrange(x, mesh, layout.input, Shard(-1))
        options = {"group": layout.comm, "partials": layout.partials}
        if isinstance(layout.output, Shard) and layout.output.dim not in (-1, x.ndim - 1):
            y = matmul_reduce_scatter(x, local(self.weight), local(self.bias), sequence_dim=layout.output.dim, **options)
            return present(y, mesh, layout.output, layout.output, layout.use_local_output)
        residual, self.residual = self.residual, None
        operands = x, local(self.weight), local(self.bias), residual
        if residual is None or not self.following:
            y = matmul_all_reduce(*operands, **options)
        else:
            (norm,) = self.following
            y, _ = norm.given = matmul_all_reduce(*operands, norm=(local(norm.weight), norm.variance_epsilon), **options)
        return present(y, mesh, Replicate(), layout.output, layout.use_local_output)


class VocabularyEmbedding(nn.Embedding):
    """An embedding whose rows are split over the ranks; its output is the same on every rank."""

    layout: Layout

    def forward(self, ids: Tensor) -> Tensor:
        layout, mesh, weight = self.layout, self.weight.device_mesh, local(self.weight)
        rows, first = weight.shape[0], layout.comm.rank * weight.shape[0]
        ids = arrange(ids, mesh, Replicate(), Replicate()) - first
        others = (ids < 0) | (ids >= rows)
        padding = None if self.padding_idx is None else self.padding_idx - first
        padding = padding if padding is not None and 0 <= padding < rows else None
        y = F.embedding(ids.masked_fill(others, 0), weight, padding).masked_fill(others.unsqueeze(-1), 0)
        y = _SumOfRanks.apply(y, layout.comm) if layout.comm.world_size > 1 else y
        return present(y, mesh, Replicate(), layout.output, layout.use_local_output)


class _SumOfRanks(torch.autograd.Function):
    """A sum that every rank has whole, with a gradient that every rank has whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        return all_reduce(x, "sum", comm)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy, None


def gathered(layers: Sequence[ColwiseLinear], x: Tensor) -> Gathered:
    """Computes all layers of a module by one op, with one gather of their input."""
    layout = layers[0].layout
    x = arrange(x, layers[0].weight.device_mesh, layout.input, layout.input)
    weights, biases = zip(*(layer.own() for layer in layers), strict=True)
    if not isinstance(layout.input, Shard):
        x = summed(x, layout.comm)
        return Gathered(x.shape, [F.linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)])
    options = {"group": layout.comm, "sequence_dim": layout.input.dim, "keep_gathered": layout.keep_gathered}
    if len(layers) == 1:
        results = [all_gather_matmul(x, weights[0], biases[0], **options)]
    else:
        if any(bias is not None for bias in biases):
            biases = [weight.new_zeros(weight.shape[0]) if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
        else:
            biases = None
        results = all_gather_matmul(x, list(weights), biases, **options)
    return Gathered(results[0].shape[:-1] + x.shape[-1:], results)


def replicated(module: nn.Module, comm: Communicator | None) -> None:
    """Has a module compute with the local tensors of its own parameters, whose gradients are summed over the ranks of ``comm``."""
    module.__class__ = _reading_local(type(module))
    module.summing = comm


class _View:
    """A module as its ``forward`` sees it, with other tensors in place of parameters."""

    def __init__(self, module: nn.Module, tensors: dict[str, Tensor]) -> None:
        self.module, self.tensors = module, tensors

    def __getattr__(self, name: str) -> Any:
        return self.tensors[name] if name in self.tensors else getattr(self.module, name)


@cache
def _reading_local(kind: type) -> type:
    def forward(self: nn.Module, *args: Any, **named: Any) -> Any:
        tensors = {name: local(parameter) for name, parameter in self.named_parameters(recurse=False)}
        if self.summing is not None:
            tensors = {name: summed(tensor, self.summing) for name, tensor in tensors.items()}
        return kind.forward(_View(self, tensors), *args, **named)

    return type(kind.__name__, (kind,), {"forward": forward})
