"""Classes of modules that a style has placed on a mesh: a module keeps its hooks, its names and its identity, and changes its class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .._comm import Communicator
from .._ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from .._rows import Rows, all_reduce
from .._scales import Quantisable, check_groups, quantize_rows, quantized_weight, scaled_product
from .._torch import copied_input_linear
from ..errors import OperandError
from ._mesh import arrange, local, present, summed

__all__ = ["ColwiseLinear", "Gathered", "Layout", "OwnRows", "QuantizedRows", "RowwiseLinear", "VocabularyEmbedding", "gathered", "replicated"]


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


class QuantizedRows(NamedTuple):
    """The quantised input of a module that only hands it to its column-parallel layers."""

    codes: Tensor
    scale: Tensor


class OwnRows(NamedTuple):
    """This rank's rows of hidden states, as ``torch.tensor_split`` cuts the tokens of all sequences."""

    rows: Tensor | QuantizedRows
    shape: torch.Size
    """That of the hidden states of all ranks."""

    @classmethod
    def of(cls, x: Tensor, comm: Communicator) -> OwnRows:
        """Those of a tensor that every rank has whole."""
        rows = x.flatten(0, -2)
        # Not by divmod, which torch.compile does not trace.
        each, more = rows.shape[0] // comm.world_size, rows.shape[0] % comm.world_size
        return cls(rows.narrow(0, comm.rank * each + min(comm.rank, more), each + (comm.rank < more)), x.shape)

    def whole(self, comm: Communicator) -> Tensor:
        """The tensor of all ranks' rows."""
        return Rows(self.shape[:-1].numel(), comm).gather(self.rows)().view(self.shape)


class _Linear(Quantisable, nn.Linear):
    layout: Layout

    def _replace(self, codes: Tensor, scale: Tensor, of_scale: Placement, form: str) -> None:
        """Holds this rank's part of a quantised weight, with the placement of its scales."""
        mesh, (of_codes,) = self.weight.device_mesh, self.weight.placements
        self.out_dtype, self.scales = self.weight.dtype, form
        for name, part, placement in (("weight", codes, of_codes), ("weight_scale", scale, of_scale)):
            part = DTensor.from_local(part, mesh, [placement], run_check=False)
            self.register_parameter(name, nn.Parameter(part, requires_grad=False))
        if self.bias is not None:
            self.bias.requires_grad_(False)

    def quantised(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The input of a layer, and what the op takes with it."""
        if self.scales is None:
            return x, {}
        codes, scale = quantize_rows(x, self.scales, group=self.layout.comm)
        return codes, {"scale_a": scale, "scale_b": local(self.weight_scale), "out_dtype": self.out_dtype}


class ColwiseLinear(_Linear):
    """A linear layer whose output features are split over the ranks."""

    column: int
    """Its number among the layers of a module under ``Fused``."""

    def forward(self, x: Tensor | Gathered) -> Tensor:
        layout = self.layout
        if isinstance(x, Gathered):
            return self._presented(x.results[self.column])
        whole = not isinstance(layout.input, Shard) or layout.input.dim in (-1, x.ndim - 1)
        x = arrange(x, self.weight.device_mesh, layout.input, Replicate() if whole else layout.input)
        weight, bias = self.own()
        if self.scales is not None:
            y = self.scaled(*quantize_rows(x, self.scales, carried=False, group=layout.comm))
        elif whole:
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

    def own_scale(self) -> Tensor:
        """The scales of the weight that this rank multiplies by."""
        scale, features = local(self.weight_scale), self.layout.features
        if features is None:
            return scale
        return scale[:, features] if self.scales == "row" else scale[features.start // 128 : features.stop // 128]

    def scaled(self, codes: Tensor, scale: Tensor) -> Tensor:
        """The product with a quantised input."""
        weight, bias = self.own()
        return scaled_product(codes, weight, scale, self.own_scale(), self.scales, bias, self.out_dtype)

    def check_quantisable(self, form: str, name: str) -> None:
        """Refuses scales of a form that do not fit the layer of this name."""
        if isinstance(self.layout.input, Shard):
            raise OperandError(f"{name}: its input is split over the ranks, as in training: parallelize with mode='inference', or leave it out by keep=")
        features = self.layout.features
        parts = self.layout.comm.world_size if features is None else 1
        extents = {"out_features": (self.out_features, parts), "in_features": (self.in_features, 1)}
        if features is not None:
            extents["features of this rank"] = (features.stop - features.start, 1)
        check_groups(name, form, extents)

    def hold_quantised(self, form: str) -> None:
        """Holds the weight as ``weight`` and ``weight_scale``."""
        (placement,) = self.weight.placements
        of_scale = Shard(1) if form == "row" and placement.is_shard() else placement
        self._replace(*quantized_weight(local(self.weight), form), of_scale, form)

    def _presented(self, y: Tensor) -> Tensor:
        return present(y, self.weight.device_mesh, Shard(-1), self.layout.output, self.layout.use_local_output)


class RowwiseLinear(_Linear):
    """A linear layer whose input features are split over the ranks."""

    residual: Tensor | OwnRows | None = None
    """What the next call adds. With a rank's own rows of it the result is this rank's rows, too."""
    following: Sequence[nn.Module] = ()
    """The RMSNorm of a sum with a residual, which is given what the op has computed."""
    readers: Sequence[ColwiseLinear] = ()
    """All layers that read the norm, where they are of one module under ``Fused``."""

    def forward(self, x: Tensor) -> Tensor:
        layout, mesh = self.layout, self.weight.device_mesh
        x = arrange(x, mesh, layout.input, Shard(-1))
        residual, self.residual = self.residual, None
        x, scales = self.quantised(x.flatten(0, -2) if isinstance(residual, OwnRows) else x)
        options = {"group": layout.comm, "partials": layout.partials, **scales}
        if isinstance(layout.output, Shard) and layout.output.dim not in (-1, x.ndim - 1):
            y = matmul_reduce_scatter(x, local(self.weight), local(self.bias), sequence_dim=layout.output.dim, **options)
            return present(y, mesh, layout.output, layout.output, layout.use_local_output)
        if isinstance(residual, OwnRows):
            # Not by `_replace`: torch.compile cannot return what that makes.
            return OwnRows(self._reduced(matmul_reduce_scatter, x, residual.rows, True, options), residual.shape)
        y = self._reduced(matmul_all_reduce, x, residual, False, options)
        return present(y, mesh, Replicate(), layout.output, layout.use_local_output)

    def _reduced(self, op: Callable[..., Any], x: Tensor, residual: Tensor | None, gathered: bool, options: dict[str, Any]) -> Tensor:
        """The op's result, whose norm goes to the module behind; ``gathered``: whether an op gathers the norm."""
        operands = x, local(self.weight), local(self.bias), residual
        if residual is None or not self.following:
            return op(*operands, **options)
        (norm,) = self.following
        options["norm"] = local(norm.weight), norm.variance_epsilon
        forms = {layer.scales for layer in self.readers}
        if len(forms) == 1 and None not in forms:
            y, *rows = op(*operands, norm_scales=forms.pop(), norm_carried=gathered, **options)
            norm.given = y, QuantizedRows(*rows)
        else:
            y, _ = norm.given = op(*operands, **options)
        return y

    def check_quantisable(self, form: str, name: str) -> None:
        """Refuses scales of a form that do not fit the layer of this name."""
        check_groups(name, form, {"out_features": (self.out_features, 1), "in_features": (self.in_features, self.layout.comm.world_size)})

    def hold_quantised(self, form: str) -> None:
        """Holds the weight as ``weight`` and ``weight_scale``; a row's scale is that of the row over all ranks."""
        comm = self.layout.comm
        of_ranks = lambda most: all_reduce(most, "max", comm) if comm.world_size > 1 else most
        self._replace(*quantized_weight(local(self.weight), form, of_ranks), Replicate() if form == "row" else Shard(1), form)


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


def gathered(layers: Sequence[ColwiseLinear], x: Tensor | QuantizedRows | OwnRows) -> Gathered:
    """Computes all layers of a module by one op, with one gather of their input."""
    if isinstance(x, QuantizedRows):
        return Gathered(x.codes.shape, [layer.scaled(*x) for layer in layers])
    layout = layers[0].layout
    if isinstance(x, OwnRows):
        forms = {layer.scales for layer in layers}
        if len(forms) == 1:
            results = _multiplied(layers, x.rows, forms.pop(), {"group": layout.comm, "m": x.shape[:-1].numel()})
            return Gathered(x.shape, [y.view(*x.shape[:-1], y.shape[-1]) for y in results])
        # Some layers read 8 bits and others do not.
        x = x.whole(layout.comm)
    x = arrange(x, layers[0].weight.device_mesh, layout.input, layout.input)
    if not isinstance(layout.input, Shard):
        x = summed(x, layout.comm)
        forms = {layer.scales for layer in layers} - {None}
        once = {form: quantize_rows(x, form, carried=False, group=layout.comm) for form in forms}
        return Gathered(x.shape, [layer.scaled(*once[layer.scales]) if layer.scales else F.linear(x, *layer.own()) for layer in layers])
    options = {"group": layout.comm, "sequence_dim": layout.input.dim, "keep_gathered": layout.keep_gathered}
    results = _multiplied(layers, x, None, options)
    return Gathered(results[0].shape[:-1] + x.shape[-1:], results)


def _multiplied(layers: Sequence[ColwiseLinear], x: Tensor | QuantizedRows, form: str | None, options: dict[str, Any]) -> Sequence[Tensor]:
    """The results of layers by one op. With scales of a ``form`` the input is quantised before it is gathered."""
    weights, biases = map(list, zip(*(layer.own() for layer in layers), strict=True))
    if form is not None:
        x, scale = x if isinstance(x, QuantizedRows) else quantize_rows(x, form, group=layers[0].layout.comm)
        scales = [layer.own_scale() for layer in layers]
        options |= {"scale_a": scale, "scale_b": scales if len(layers) > 1 else scales[0], "out_dtype": layers[0].out_dtype}
    if len(layers) == 1:
        return [all_gather_matmul(x, weights[0], biases[0], **options)]
    if any(bias is not None for bias in biases):
        dtype = x.dtype if form is None else layers[0].out_dtype
        biases = [weight.new_zeros(weight.shape[0], dtype=dtype) if bias is None else bias for weight, bias in zip(weights, biases, strict=True)]
    else:
        biases = None
    return all_gather_matmul(x, weights, biases, **options)


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
