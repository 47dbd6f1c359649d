"""Parallel styles for ``torch.distributed.tensor.parallel.parallelize_module``, computed by the ops of this package.

They take the arguments of torch's styles of the same names, and stand beside these in a plan.
"""

from __future__ import annotations

from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle

from .._arguments import partials_number
from ..errors import OperandError
from ._mesh import arrange, check_divides, communicator, distribute, present
from ._modules import ColwiseLinear, Layout, RowwiseLinear, VocabularyEmbedding, gathered, replicated

__all__ = ["ColwiseParallel", "Fused", "RowwiseParallel", "SequenceParallel", "replicate"]


class ColwiseParallel(ParallelStyle):
    """A linear layer whose output features are split over the ranks.

    Args:
        input_layouts: ``Shard(d)``: each rank has its part of dimension ``d``, and the layer is one ``all_gather_matmul``. ``Replicate()``,
            the default: every rank has the whole input, whose gradient is summed by ``matmul_all_reduce``.
        output_layouts: ``Shard(-1)``, the default, or another placement, to which the output is then redistributed.
        use_local_output: whether the output is the local tensor, or a DTensor.
        keep_gathered: as of :class:`flux_tp.ColumnParallelLinear`.
        features: this rank's output features, where every rank is to have the whole weight and to use a part of it, such as a KV head that
            several ranks read. The gradient of the weight is summed over the ranks.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        keep_gathered: bool = False,
        features: slice | None = None,
    ) -> None:
        self.input_layouts, self.output_layouts = input_layouts or Replicate(), output_layouts or Shard(-1)
        self.use_local_output, self.keep_gathered, self.features = use_local_output, keep_gathered, features

    def check(self, module: nn.Module, world: int) -> None:
        """Refuses a module that ``world`` ranks cannot split so."""
        _check_linear(module, "ColwiseParallel")
        if self.features is None:
            check_divides("out_features", module.out_features, world)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = communicator(device_mesh)
        self.check(module, comm.world_size)
        for name in ("weight", "bias"):
            distribute(module, name, device_mesh, Shard(0) if self.features is None else Replicate(), self.src_data_rank)
        module.__class__ = ColwiseLinear
        module.layout = Layout(comm, self.input_layouts, self.output_layouts, self.use_local_output, self.keep_gathered, features=self.features)
        return module


class RowwiseParallel(ParallelStyle):
    """A linear layer whose input features are split over the ranks, or an embedding whose rows are.

    Args:
        input_layouts: ``Shard(-1)``, the default, or that of the input, which is then redistributed. An embedding takes whole ids.
        output_layouts: ``Shard(d)``: each rank gets its part of dimension ``d``, and the layer is one ``matmul_reduce_scatter``.
            ``Replicate()``, the default: every rank gets the whole output, by one ``matmul_all_reduce``.
        use_local_output: whether the output is the local tensor, or a DTensor.
        partials: as of :class:`flux_tp.RowParallelLinear`.
    """

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
        partials: str | None = None,
    ) -> None:
        partials_number(partials)
        self.input_layouts, self.output_layouts = input_layouts or Shard(-1), output_layouts or Replicate()
        self.use_local_output, self.partials = use_local_output, partials

    def check(self, module: nn.Module, world: int) -> None:
        """Refuses a module that ``world`` ranks cannot split so."""
        if not isinstance(module, nn.Embedding):
            _check_linear(module, "RowwiseParallel")
            check_divides("in_features", module.in_features, world)
            return
        for name, value in (("max_norm", None), ("scale_grad_by_freq", False), ("sparse", False)):
            if getattr(module, name) != value:
                raise OperandError(f"{name} = {getattr(module, name)}: an embedding whose rows are split has {value}")
        _check_forward(module, nn.Embedding, "RowwiseParallel")
        check_divides("num_embeddings", module.num_embeddings, world)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        comm = communicator(device_mesh)
        self.check(module, comm.world_size)
        if isinstance(module, nn.Embedding):
            distribute(module, "weight", device_mesh, Shard(0), self.src_data_rank)
            module.__class__ = VocabularyEmbedding
            module.layout = Layout(comm, Replicate(), self.output_layouts, self.use_local_output)
            return module
        distribute(module, "weight", device_mesh, Shard(1), self.src_data_rank)
        distribute(module, "bias", device_mesh, Replicate(), self.src_data_rank)
        module.__class__ = RowwiseLinear
        module.layout = Layout(comm, self.input_layouts, self.output_layouts, self.use_local_output, partials=self.partials)
        return module


class SequenceParallel(ParallelStyle):
    """A module that computes row by row, such as a norm, on this rank's part of the sequence; its parameters are replicated.

    Their gradients are summed over the ranks. So it also fits a norm of attention heads, of which each rank has its own.

    Args:
        sequence_dim: the dimension of the input that the ranks share.
        use_local_output: whether the output is the local tensor, or a DTensor.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = True) -> None:
        self.placement, self.use_local_output = Shard(sequence_dim), use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate(module, device_mesh, self.src_data_rank, summing=True)
        placement, use_local = self.placement, self.use_local_output

        def take(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return arrange(args[0], device_mesh, placement, placement), *args[1:]

        def give(_: nn.Module, args: tuple[Any, ...], y: Tensor) -> Tensor:
            return present(y, device_mesh, placement, placement, use_local)

        module.register_forward_pre_hook(take)
        if not use_local:
            module.register_forward_hook(give)
        return module


def replicate(module: nn.Module, mesh: DeviceMesh, source: int | None, summing: bool) -> None:
    """Makes a module's own parameters DTensors that every rank has whole; ``summing``: each rank's gradient is a part of theirs."""
    for name, _ in list(module.named_parameters(recurse=False)):
        distribute(module, name, mesh, Replicate(), source)
    replicated(module, communicator(mesh) if summing else None)


class Fused(ParallelStyle):
    """Column-parallel layers of one input, computed by one ``all_gather_matmul``: the style of the module that has them.

    The module's first input is the layers' input. Its ``forward`` hands it to the layers, and may read its shape: that of the gathered input. ::

        "model.layers.*.self_attn": Fused("q_proj", "k_proj", "v_proj")

    Args:
        layers: names of 1 to 4 linear layers in the module. Each keeps parameters of its own.
        input_layouts: ``Shard(1)``, the default, or another dimension that the ranks share. ``Replicate()``: every rank has the whole input.
        features: by a layer's name this rank's part of it, where every rank has the whole weight; as of :class:`ColwiseParallel`.
        keep_gathered: as of :class:`ColwiseParallel`.
    """

    def __init__(
        self, *layers: str, input_layouts: Placement | None = None, keep_gathered: bool = False, features: dict[str, slice] | None = None
    ) -> None:
        self.layers, self.input_layouts = layers, input_layouts or Shard(1)
        self.keep_gathered, self.features = keep_gathered, features or {}

    def check(self, module: nn.Module, world: int) -> None:
        """Refuses a module that ``world`` ranks cannot split so."""
        for name in self.layers:
            try:
                self._column(name).check(module.get_submodule(name), world)
            except OperandError as error:
                raise OperandError(f"{name}: {error}") from None

    def _column(self, name: str) -> ColwiseParallel:
        return ColwiseParallel(input_layouts=self.input_layouts, keep_gathered=self.keep_gathered, features=self.features.get(name))

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        self.check(module, communicator(device_mesh).world_size)
        layers = [module.get_submodule(name) for name in self.layers]
        for column, (name, layer) in enumerate(zip(self.layers, layers, strict=True)):
            style = self._column(name)
            style.src_data_rank = self.src_data_rank
            style._apply(layer, device_mesh).column = column
        first = next(iter(signature(module.forward).parameters))

        def take(_: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args:
                return (gathered(layers, args[0]), *args[1:]), named
            return args, named | {first: gathered(layers, named[first])}

        module.register_forward_pre_hook(take, with_kwargs=True)
        return module


def _check_linear(module: nn.Module, style: str) -> None:
    if not isinstance(module, nn.Linear):
        raise OperandError(f"{style} takes a torch.nn.Linear, and the module is a {type(module).__name__}")
    _check_forward(module, nn.Linear, style)
    if module.weight.dtype not in (torch.bfloat16, torch.float16) and not torch.is_autocast_enabled(module.weight.device.type):
        raise OperandError(f"the weight of {module} is {module.weight.dtype}: convert the model to torch.bfloat16 or torch.float16")


def _check_forward(module: nn.Module, kind: type, style: str) -> None:
    if type(module).forward is not kind.forward or "forward" in vars(module):
        raise OperandError(f"{style}: {type(module).__name__} computes otherwise than torch.nn.{kind.__name__}: leave it out of the plan")
