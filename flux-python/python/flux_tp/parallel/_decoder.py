"""Decoder layers whose row-parallel ops add the residual and normalise, for inference.

Invariant: hidden states between layers are those of the unchanged model, or in calls of many rows this rank's part of them;
a norm computes anew what it was not given for them. Between layers in 8 bits it is given as their operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from .. import _native
from .._arguments import dtype_name
from .._comm import Communicator
from .._rows import all_reduce
from ._mesh import local
from ._modules import ColwiseLinear, OwnRows, QuantizedRows, RowwiseLinear

__all__ = ["fuse_residuals", "is_known", "is_known_stack", "least_rows", "split_rows"]

_FAMILIES = [f"transformers.models.{name}" for name in ("llama", "mistral", "qwen2", "qwen3")]


def is_known(layer: nn.Module) -> bool:
    """Whether a layer is ``y = x + attention(norm(x))``, ``y + mlp(norm(y))`` with RMSNorms, by its class in transformers."""
    return _is_of_families(layer) and type(layer).__name__.endswith("DecoderLayer")


def _is_of_families(module: nn.Module) -> bool:
    return type(module).__module__.rpartition(".")[0] in _FAMILIES


def fuse_residuals(layers: Sequence[nn.Module], final_norm: nn.Module) -> list[nn.Module]:
    """Has each known layer compute residuals and norms by its row-parallel ops; the row-parallel layers that now do."""
    rows: list[nn.Module] = []
    for layer, after in zip(layers, [*layers[1:], None], strict=True):
        if not is_known(layer):
            continue
        following, reader = (final_norm, None) if after is None else (after.input_layernorm, after.self_attn) if is_known(after) else (None, None)
        of_norms = (layer.self_attn.o_proj, layer.post_attention_layernorm, layer.mlp), (layer.mlp.down_proj, following, reader)
        for row, norm, reader in of_norms:
            # In lists: modules stay in their own places alone.
            row.following = [] if norm is None else [norm]
            row.readers = [] if reader is None else [child for child in reader.children() if isinstance(child, ColwiseLinear)]
            if norm is not None:
                norm.__class__ = _taking(type(norm))
            rows.append(row)
    for layer in layers:
        if is_known(layer):
            layer.__class__ = _adding(type(layer))
    return rows


def least_rows(layer: nn.Module, comm: Communicator) -> int:
    """From how many rows of a call a known layer is faster with its rows split over the ranks, by the cost model; a power of two.

    More than ``comm.max_m`` where it never is. The same on every rank.
    """
    weight = local(layer.mlp.down_proj.weight)
    world, hidden = comm.world_size, weight.shape[0]
    # Under autocast weights may be wider than what is multiplied.
    dtype = dtype_name(weight.dtype if weight.dtype.itemsize == 2 else torch.bfloat16)
    columns = [
        sum(child.own()[0].shape[0] for child in of.children() if isinstance(child, ColwiseLinear)) for of in (layer.self_attn, layer.mlp)
    ]
    inner = [world * local(row.weight).shape[1] for row in (layer.self_attn.o_proj, layer.mlp.down_proj)]

    def is_faster(m: int) -> bool:
        of = lambda op, n, k, alone=False: _native.modelled_ns(comm.id, op, (m, n, k), dtype, alone)
        split = sum(of("all_gather_matmul", world * n, hidden) for n in columns) + sum(of("matmul_reduce_scatter", hidden, k) for k in inner)
        whole = sum(of("all_gather_matmul", n, hidden, True) for n in columns) + sum(of("matmul_all_reduce", hidden, k) for k in inner)
        return split < whole

    # The gain grows with the rows.
    least, most = 0, comm.max_m.bit_length()
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if is_faster(1 << middle) else (middle + 1, most)
    device = "cpu" if comm.device is None else f"cuda:{comm.device}"
    return int(all_reduce(torch.tensor([1 << least], device=device), "max", comm)) if world > 1 else 1 << least


def is_known_stack(stack: nn.Module, layers: Sequence[nn.Module]) -> bool:
    """Whether all layers of a stack are known, and it only hands hidden states from one to the next, by its class in transformers."""
    return _is_of_families(stack) and all(is_known(layer) for layer in layers)


def split_rows(stack: nn.Module, layers: Sequence[nn.Module], final_norm: nn.Module, comm: Communicator, least: int) -> None:
    """Has the ranks split the rows of hidden states between known layers, all of ``stack``, in calls of ``least`` rows or more."""

    def decide(stack: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        # A caller that asks for hidden states gets those of all ranks.
        # Collectives on rows have no gradients.
        asked = named.get("output_hidden_states", stack.config.output_hidden_states)
        layers[0].splits = None if asked or torch.is_grad_enabled() else (least, comm)

    stack.register_forward_pre_hook(decide, with_kwargs=True)
    # It follows no op, and takes a rank's own rows.
    first = layers[0].input_layernorm
    first.__class__ = _taking(type(first))
    final_norm.whole_over = comm


@cache
def _taking(kind: type) -> type:
    """A norm that takes what the op before has computed."""

    def forward(self: nn.Module, x: Tensor | OwnRows) -> Tensor | QuantizedRows | OwnRows:
        given, self.given = self.given, None
        rows = x.rows if isinstance(x, OwnRows) else x
        normed = given[1] if given is not None and given[0] is rows else kind.forward(self, rows)
        if not isinstance(x, OwnRows):
            return normed
        own = OwnRows(normed, x.shape)
        return own if self.whole_over is None else own.whole(self.whole_over)

    # `whole_over`: of the last norm the communicator whose ranks' rows it returns.
    return type(kind.__name__, (kind,), {"forward": forward, "given": None, "whole_over": None, "__module__": kind.__module__})


def _are_split(hidden_states: Tensor, least: int, comm: Communicator) -> bool:
    m = hidden_states.shape[:-1].numel()
    # A graph of any number of rows has one part for all ranks.
    return m >= least and (m % comm.world_size == 0 or not torch.compiler.is_compiling())


@cache
def _adding(kind: type) -> type:
    """A decoder layer whose row-parallel ops add the residual."""

    def forward(self: nn.Module, hidden_states: Tensor | OwnRows, **named: Any) -> Tensor | OwnRows:
        attended: RowwiseLinear = self.self_attn.o_proj
        if self.splits is not None and _are_split(hidden_states, *self.splits):
            hidden_states = OwnRows.of(hidden_states, self.splits[1])
        try:
            attended.residual = hidden_states
            y = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)[0]
            self.mlp.down_proj.residual = y
            return self.mlp(self.post_attention_layernorm(y))
        except BaseException:
            # What the layers did not come to take is not for a later call.
            attended.residual = self.mlp.down_proj.residual = self.post_attention_layernorm.given = None
            raise

    return type(kind.__name__, (kind,), {"forward": forward, "splits": None, "__module__": kind.__module__})
