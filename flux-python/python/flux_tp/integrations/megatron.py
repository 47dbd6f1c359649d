"""Megatron-Core's tensor-parallel linear layers computed by flux_tp.

::

    from flux_tp.integrations import megatron
    megatron.connect(max_m=sequence * batch)             # after initialize_model_parallel
    spec = megatron.fused(get_gpt_layer_local_spec())    # a layer spec of Megatron-Core's
    model = GPTModel(config, megatron.block(spec, config), ...)

Parameters, state dicts and distributed checkpoints are Megatron-Core's. Tested with megatron-core 0.16.1.
"""

from __future__ import annotations

import copy
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch import Tensor

from .._comm import Communicator
from .._init import init
from .._ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from ..errors import FluxError, OperandError

__all__ = ["ColumnParallelLinear", "Norm", "RowParallelLinear", "block", "connect", "fused"]

# By the name of a group, with `keep_gathered`.
_connections: dict[str, tuple[Communicator, bool]] = {}


def connect(group: Any = None, *, keep_gathered: bool = False, **options: Any) -> Communicator:
    """Connects the ranks of a tensor-parallel group; collective.

    Args:
        group: the ProcessGroup of the layers. ``None``: Megatron-Core's tensor-parallel group.
        keep_gathered: as of :class:`flux_tp.ColumnParallelLinear`, of all layers of the group.
        options: those of :func:`flux_tp.init`. ``max_m`` is the tokens of a micro-batch at least.
    """
    if group is None:
        group = parallel_state.get_tensor_model_parallel_group()
    comm = init(group, **options)
    _connections[group.group_name] = (comm, keep_gathered)
    return comm


def fused(spec: ModuleSpec) -> ModuleSpec:
    """A copy of a layer spec with the linear layers of this module in place of Megatron-Core's."""
    return _replaced(spec, {tensor_parallel.ColumnParallelLinear: ColumnParallelLinear, tensor_parallel.RowParallelLinear: RowParallelLinear})


def block(spec: ModuleSpec, config: TransformerConfig) -> TransformerBlockSubmodules:
    """Layers of a spec without Apex or Transformer Engine, which sequence parallelism may split: its norms are :class:`Norm`."""
    layer = _replaced(spec, {WrappedTorchNorm: Norm})
    return TransformerBlockSubmodules(layer_specs=[layer] * get_num_layers_to_build(config), layer_norm=Norm)


def _replaced(spec: ModuleSpec, classes: dict[type, type]) -> ModuleSpec:
    spec = copy.deepcopy(spec)

    def visit(part: Any) -> None:
        for field in fields(part):
            value = getattr(part, field.name)
            if isinstance(value, type):
                setattr(part, field.name, classes.get(value, value))
            elif is_dataclass(value):
                visit(value)

    visit(spec)
    return spec


def _connection(layer: Any) -> tuple[Communicator, bool]:
    connection = _connections.get(layer.tp_group.group_name)
    if connection is None:
        raise FluxError("the layer's tensor-parallel group has no communicator: call flux_tp.integrations.megatron.connect first")
    return connection


def _refuse_fusion(config: TransformerConfig) -> None:
    if config.gradient_accumulation_fusion:
        raise OperandError("gradient_accumulation_fusion=True: gradients of flux_tp come from autograd, set it to False")


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """Megatron-Core's layer. With sequence parallelism it is one ``all_gather_matmul``, otherwise it is as there."""

    def __init__(self, *args: Any, config: TransformerConfig, **options: Any) -> None:
        _refuse_fusion(config)
        super().__init__(*args, config=config, **options)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:  # noqa: A002 (its name there)
        if not options["sequence_parallel"]:
            return super()._forward_impl(input, weight, *args, **options)
        comm, keep_gathered = _connection(self)
        return all_gather_matmul(input, weight, options["bias"], group=comm, keep_gathered=keep_gathered)


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """Megatron-Core's layer as one ``matmul_reduce_scatter`` with sequence parallelism, otherwise as one ``matmul_all_reduce``."""

    def __init__(self, *args: Any, config: TransformerConfig, **options: Any) -> None:
        _refuse_fusion(config)
        super().__init__(*args, config=config, **options)

    def forward(self, input_: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.explicit_expert_comm or not self.input_is_parallel or self.tp_group.size() == 1:
            return super().forward(input_)
        op = matmul_reduce_scatter if self.sequence_parallel else matmul_all_reduce
        y = op(input_, self.weight, group=_connection(self)[0])
        # Outside the op: Megatron-Core sums the gradient of the rows' bias over the ranks itself.
        if self.bias is None or self.skip_bias_add:
            return y, self.bias
        return y + self.bias, None


class Norm:
    """torch's LayerNorm or RMSNorm, by the config; Megatron-Core sums the gradients of its parameters over the ranks.

    Megatron-Core refuses torch's norms with sequence parallelism, as it asks this mark of their parameters.
    """

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.Module:
        kinds = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
        if config.normalization not in kinds:
            raise OperandError(f"normalization = {config.normalization!r}: there are {', '.join(kinds)}")
        if config.layernorm_zero_centered_gamma:
            raise OperandError("layernorm_zero_centered_gamma=True: torch's norms have no such form")
        norm = kinds[config.normalization](hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
