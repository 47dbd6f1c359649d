"""What a run holds at least, so that one that cannot fit is refused before it begins.

Invariant: an estimate counts only what a rank surely holds at once, so nothing that fits is refused.
"""

from __future__ import annotations

from pathlib import Path

from .attention import CACHE_BYTES, KV_LENGTH
from .models import MODELS, Model
from .options import Options

__all__ = ["free_on_host", "least_bytes", "refusal"]


def least_bytes(model: Model, world: int, layers: int, phase: str, m: int, form: str | None = None) -> int:
    """Bytes of a rank: weights in bf16 and 8 bits, fp32 copies for the reference, gradients, rows in fp32, and KV caches."""
    qkv = (model.heads + 2 * model.kv_heads) * model.head_dim
    up = model.inner * (2 if model.gated else 1)
    weights = model.hidden * (qkv + model.heads * model.head_dim + up + model.inner) // world
    if phase == "train":
        # The rows between all linear layers are kept for the backward pass.
        rows = m * (4 * model.hidden + (qkv + up) // world)
        return layers * (weights * (2 + 4 + 4) + 4 * rows)
    rows = m * (2 * model.hidden + max(qkv, up) // world)
    # One layer at a time is copied.
    held = (3 if form else 2) * layers * weights + 4 * weights + 4 * rows
    if phase == "decode":
        cache = 4 * m * (model.kv_heads // world) * KV_LENGTH * model.head_dim
        held += min(layers, max(1, CACHE_BYTES // max(cache, 1))) * cache
    return held


def refusal(options: Options, world: int, free: int, sharing: int) -> str | None:
    """Why the run cannot fit into ``free`` bytes that so many ranks share, or ``None``."""
    rows = [(name, phase, m) for name in options.models for phase in options.phases for m in options.rows(phase)]
    of_row = lambda row: least_bytes(MODELS[row[0]], world, options.layers, *row[1:], options.scales)
    name, phase, m = max(rows, key=of_row)
    needed = of_row((name, phase, m))
    if needed * sharing <= free:
        return None
    ranks = f"each of the {sharing} ranks" if sharing > 1 else "a rank"
    return (
        f"{name} {phase} at m = {m} takes {needed / 1e9:.1f} GB or more in {ranks}, and {free / 1e9:.1f} GB of memory are free: "
        "give fewer --layers or --ms, other --phases, or --models tiny"
    )


def free_on_host() -> int:
    """Bytes of memory that this host, or the container, has left."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
    try:
        most, used = (int(Path("/sys/fs/cgroup", name).read_text(encoding="ascii")) for name in ("memory.max", "memory.current"))
        free = min(free, most - used)
    except (OSError, ValueError):
        # No container's limit.
        pass
    return free
