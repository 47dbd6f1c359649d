"""Fused tensor-parallel linear layers for PyTorch and NumPy.

::

    import flux_tp
    comm = flux_tp.init()                          # torchrun's ranks
    y = flux_tp.all_gather_matmul(x, weight)       # [m_r, k], [n_r, k] -> [m, n_r]
    z = flux_tp.matmul_reduce_scatter(y, weight2)  # [m, k_r], [n, k_r] -> [m_r, n]
    z = flux_tp.matmul_all_reduce(y, weight2)      # [m, k_r], [n, k_r] -> [m, n]

``docs/python.md`` has the shapes, errors and limits of all of it.
"""

from __future__ import annotations

import os
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

# The program that proves peer access, which travels in the wheel: a Python program cannot be its own.
if (_probe := Path(__file__).parent / "flux-probe").exists():
    os.environ.setdefault("FLUX_PROBE", str(_probe))

from ._comm import Communicator, Heads, check, default
from ._init import init
from ._ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter, prepare
from .errors import (
    AbortedError,
    BuildError,
    ConnectError,
    DisagreedError,
    FluxError,
    OperandError,
    PeerLeftError,
    PeerLostError,
    TimeoutError,
)

if TYPE_CHECKING:
    from ._rows import sum_gradients
    from ._scales import quantize_rows
    from .nn import ColumnParallelLinear, RowParallelLinear, quantize
    from .parallel import ColwiseParallel, Fused, RowwiseParallel, SequenceParallel, causal_lm_loss, parallelize

__all__ = [
    "AbortedError",
    "BuildError",
    "ColumnParallelLinear",
    "ColwiseParallel",
    "Communicator",
    "ConnectError",
    "DisagreedError",
    "FluxError",
    "Fused",
    "Heads",
    "OperandError",
    "PeerLeftError",
    "PeerLostError",
    "RowParallelLinear",
    "RowwiseParallel",
    "SequenceParallel",
    "TimeoutError",
    "all_gather_matmul",
    "causal_lm_loss",
    "check",
    "default",
    "init",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "parallelize",
    "prepare",
    "quantize",
    "quantize_rows",
    "sum_gradients",
]

try:
    __version__ = metadata.version("flux-tp")
except metadata.PackageNotFoundError:
    __version__ = "unknown"


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


# Where the names are that need torch, which is imported on their first use.
_OF_TORCH = {
    "sum_gradients": "._rows",
    "quantize": ".nn",
    "quantize_rows": "._scales",
    "ColumnParallelLinear": ".nn",
    "RowParallelLinear": ".nn",
    "ColwiseParallel": ".parallel",
    "Fused": ".parallel",
    "RowwiseParallel": ".parallel",
    "SequenceParallel": ".parallel",
    "causal_lm_loss": ".parallel",
    "parallelize": ".parallel",
}


def __getattr__(name: str) -> Any:
    if name in _OF_TORCH:
        return getattr(import_module(_OF_TORCH[name], __name__), name)
    raise AttributeError(f"module 'flux_tp' has no attribute {name!r}")
