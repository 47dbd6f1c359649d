"""A Llama of transformers split by PyTorch's own parallel styles."""

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel, parallelize_module

import flux_tp

__all__ = ["enable_overlap", "parallelize"]


def parallelize(model: nn.Module, mesh: DeviceMesh, mode: str = "training", **_: Any) -> nn.Module:
    """As ``flux_tp.parallelize``."""
    training = mode == "training"
    rows, whole = Shard(1), Replicate()
    plan: dict[str, Any] = {"model.embed_tokens": RowwiseParallel(input_layouts=whole)}
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.o_proj"
    for columns, row in (attention, (("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")):
        plan |= {f"model.layers.*.{name}": ColwiseParallel() for name in columns}
        plan[f"model.layers.*.{row}"] = RowwiseParallel(output_layouts=rows if training else whole)
    plan["lm_head"] = ColwiseParallel(input_layouts=rows, use_local_output=False) if training else ColwiseParallel(output_layouts=whole)
    if training:
        for norm in ("layers.*.input_layernorm", "layers.*.post_attention_layernorm", "norm"):
            plan[f"model.{norm}"] = SequenceParallel(use_local_output=True)
        named = {"input_kwarg_layouts": {"hidden_states": rows}, "desired_input_kwarg_layouts": {"hidden_states": whole}}
        plan["model.layers.*.self_attn"] = PrepareModuleInput(**named)
        plan["model.layers.*.mlp"] = PrepareModuleInput(input_layouts=rows, desired_input_layouts=whole)
        model.loss_function = partial(flux_tp.causal_lm_loss, mesh=mesh)
    parallelize_module(model, mesh, plan)
    if training:

        def split(layer: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return DTensor.from_local(args[0], mesh, [whole], run_check=False).redistribute(placements=[rows]).to_local(), *args[1:]

        model.model.layers[0].register_forward_pre_hook(split)
    return model


def enable_overlap(mesh: DeviceMesh) -> None:
    """Has the mesh's ranks reach each other's memory, so that torch.compile can overlap GEMMs and collectives (async-TP)."""
    from torch.distributed._symmetric_memory import enable_symm_mem_for_group

    enable_symm_mem_for_group(mesh.get_group().group_name)
