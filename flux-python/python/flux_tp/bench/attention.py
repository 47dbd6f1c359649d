"""Attention of one rank's heads: the same code for every mode, so that only the linear layers differ."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .models import Model

__all__ = ["KV_LENGTH", "SEQUENCE", "Attend", "causal", "decoding"]

SEQUENCE = 2048
"""Tokens of a sequence in prefill and training, where the rows are whole sequences."""
KV_LENGTH = 1024
"""Tokens that a decoded token attends to."""
CACHE_BYTES = 16 << 30
"""Most bytes of KV caches: layers share caches where one for each takes more."""

Attend = Callable[[int, Tensor], Tensor]
"""Takes a layer's number and its ``[m, (heads + 2 * kv_heads) * head_dim]``, of this rank."""


def _heads(model: Model, world: int, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, ``[..., heads, head_dim]``."""
    heads, kv = model.heads // world, model.kv_heads // world
    return qkv.unflatten(-1, (heads + 2 * kv, model.head_dim)).split((heads, kv, kv), dim=-2)


def causal(model: Model, world: int, m: int) -> Attend:
    """Attention within sequences of ``SEQUENCE`` rows, or of all rows where ``m`` is not a multiple of it."""
    length = SEQUENCE if m % SEQUENCE == 0 else m
    grouped = model.kv_heads != model.heads

    def attend(_layer: int, qkv: Tensor) -> Tensor:
        # The fp32 reference rounds here, too: what is compared are the linear layers and their sums.
        parts = _heads(model, world, qkv.to(torch.bfloat16).view(m // length, length, -1))
        q, k, v = (part.transpose(1, 2) for part in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return y.transpose(1, 2).reshape(m, -1).to(qkv.dtype)

    return attend


def decoding(model: Model, world: int, m: int, layers: int, device: torch.device) -> Attend:
    """Attention of ``m`` new tokens, each to its own cache, whose last token it is."""
    shape = (2, m, model.kv_heads // world, KV_LENGTH, model.head_dim)
    size = 2 * torch.Size(shape).numel()
    caches = [
        torch.empty(shape, dtype=torch.bfloat16, device=device).normal_() for _ in range(min(layers, max(1, CACHE_BYTES // size)))
    ]
    grouped = model.kv_heads != model.heads

    def attend(layer: int, qkv: Tensor) -> Tensor:
        q, k, v = _heads(model, world, qkv.to(torch.bfloat16))
        keys, values = caches[layer % len(caches)]
        keys[:, :, -1].copy_(k)
        values[:, :, -1].copy_(v)
        y = F.scaled_dot_product_attention(q.unsqueeze(2), keys, values, enable_gqa=grouped)
        return y.reshape(m, -1).to(qkv.dtype)

    return attend
