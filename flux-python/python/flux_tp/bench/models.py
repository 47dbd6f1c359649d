"""Models whose layers are measured, by their extents. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MODELS", "Model"]


@dataclass(frozen=True)
class Model:
    """Extents of one layer. Norms have no parameters, linear layers no bias, and positions no embedding."""

    title: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    gated: bool
    """``silu(gate) * up`` after an RMSNorm; otherwise GELU after a LayerNorm."""


MODELS = {
    "llama3-8b": Model("Llama-3 8B", 4096, 32, 8, 128, 14336, True),
    "gpt3": Model("GPT-3 175B", 12288, 96, 96, 128, 49152, False),
    "llama3-70b": Model("Llama-3 70B", 8192, 64, 8, 128, 28672, True),
    "qwen3-32b": Model("Qwen3-32B", 5120, 64, 8, 128, 25600, True),
    "tiny": Model("tiny", 256, 8, 4, 32, 512, True),
}
