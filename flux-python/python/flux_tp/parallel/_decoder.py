"""Decoder layers whose row-parallel ops add the residual and normalise, for inference.

Invariant: hidden states between layers are those of the unchanged model; a norm computes anew what it was not given for them.
Between layers in 8 bits it is given as their operands.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor, nn

from ._modules import ColwiseLinear, QuantizedRows, RowwiseLinear

__all__ = ["fuse_residuals", "is_known"]

_FAMILIES = [f"transformers.models.{name}" for name in ("llama", "mistral", "qwen2", "qwen3")]


def is_known(layer: nn.Module) -> bool:
    """Whether a layer is ``y = x + attention(norm(x))``, ``y + mlp(norm(y))`` with RMSNorms, by its class in transformers."""
    package = type(layer).__module__.rpartition(".")[0]
    return package in _FAMILIES and type(layer).__name__.endswith("DecoderLayer")


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


@cache
def _taking(kind: type) -> type:
    """A norm that takes what the op before has computed."""

    def forward(self: nn.Module, x: Tensor) -> Tensor | QuantizedRows:
        given, self.given = self.given, None
        return given[1] if given is not None and given[0] is x else kind.forward(self, x)

    return type(kind.__name__, (kind,), {"forward": forward, "given": None, "__module__": kind.__module__})


@cache
def _adding(kind: type) -> type:
    """A decoder layer whose row-parallel ops add the residual."""

    def forward(self: nn.Module, hidden_states: Tensor, **named: Any) -> Tensor:
        attended: RowwiseLinear = self.self_attn.o_proj
        try:
            attended.residual = hidden_states
            y = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **named)[0]
            self.mlp.down_proj.residual = y
            return self.mlp(self.post_attention_layernorm(y))
        except BaseException:
            # What the layers did not come to take is not for a later call.
            attended.residual = self.mlp.down_proj.residual = self.post_attention_layernorm.given = None
            raise

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
