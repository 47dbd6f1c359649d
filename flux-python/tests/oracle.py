"""What the ops must compute, in fp64, and how far rounding may lead from it."""

from __future__ import annotations

import numpy as np

UNIT = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Half the distance from 1 to the next value."""
TINY = {"float16": 2.0**-25, "bfloat16": 0.0}
"""Half the smallest value: what rounding loses at most below the normal range."""


def rows(world: int, rank: int, m: int) -> slice:
    """The rows of a rank's shard."""
    counts = [m // world + (other < m % world) for other in range(world)]
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def operand(seed: int, *shape: int) -> np.ndarray:
    """Values of order one that fp16 and bf16 both have: multiples of 1/8."""
    return np.random.default_rng(seed).integers(-8, 9, shape).astype(np.float64) / 8


def activate(name: str | None, y: np.ndarray) -> np.ndarray:
    if name is not None and "glu" in name:
        gate, up = (y[:, 0::2], y[:, 1::2]) if name.endswith("_interleaved") else np.split(y, 2, axis=1)
        return activate({"ge": "gelu", "sw": "silu", "re": "relu"}[name[:2]], gate) * up
    if name == "relu":
        return np.maximum(y, 0)
    if name == "silu":
        return y / (1 + np.exp(-y))
    if name == "gelu":
        return 0.5 * y * (1 + np.tanh(np.sqrt(2 / np.pi) * (y + 0.044715 * y**3)))
    return y


def rms_norm(y: np.ndarray, gain: np.ndarray, eps: float) -> np.ndarray:
    """Normalised rows of a result, which is rounded before."""
    y = y.astype(np.float64)
    return y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + eps) * gain.astype(np.float64)


def close(found: np.ndarray, expected: np.ndarray, dtype: str, partials: np.ndarray | None = None, slope: float = 1.0) -> None:
    """Compares a result with its definition.

    ``partials``: sums of the absolute values of what the ranks add, each rounded to ``dtype`` once. The sums of
    these operands are exact in fp32; ``slope`` bounds an activation's error in fp32 and its derivative.
    """
    unit = UNIT[dtype]
    bound = unit * np.abs(expected) + TINY[dtype] + 2.0**-18 * slope
    if partials is not None:
        bound = bound * (1 + unit) + unit * (1 + unit) * partials
    error = np.abs(found.astype(np.float64) - expected)
    assert found.shape == expected.shape, (found.shape, expected.shape)
    assert (error <= bound).all(), f"{error.max()} is above {bound.flat[error.argmax()]}"
