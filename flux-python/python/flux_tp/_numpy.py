"""Calls with arrays of NumPy, over the host transport."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from . import _native
from ._comm import Communicator
from .errors import OperandError


def run(op: str, x: Any, weight: Any, bias: Any, activation: int, comm: Communicator, m: int | None, out: Any) -> Any:
    """Makes a call; see the ops in ``_ops``."""
    from ._ops import shard_rows

    if comm.device is not None:
        raise OperandError(
            f"x is in host memory, but this rank's communicator works on CUDA device {comm.device}: give torch tensors of that "
            "device, or a communicator with transport='host'"
        )
    for name, array in [("x", x), ("weight", weight), ("bias", bias), ("out", out)]:
        if array is not None and not isinstance(array, np.ndarray):
            raise OperandError(f"{name} is a {type(array).__name__}, and x is a numpy.ndarray: give arrays of one library")
    lead = x.shape[:-1]
    if x.ndim > 2:
        x = x.reshape(prod(lead), x.shape[-1])
    rows = x.shape[0] if x.ndim else 0
    gathers = op == "all_gather_matmul"
    if m is None:
        m = rows * comm.world_size if gathers else rows
    shape = (shard_rows(comm, m) if op == "matmul_reduce_scatter" else m, weight.shape[0] if weight.ndim else 0)
    y = np.empty(shape, x.dtype) if out is None else out
    described = [None if array is None else _describe(array) for array in (x, weight, bias, y)]
    if not y.flags.writeable:
        raise OperandError("out is not writeable")
    _native.call_host(comm.id, op, activation, m, tuple(described))
    return y.reshape(-1, *lead[1:], shape[1]) if out is None and len(lead) > 1 else y


def _describe(array: np.ndarray) -> tuple[int, str, int, int, int, tuple[int, int]]:
    """Address, dtype, dimensions, rows, columns and strides in elements."""
    shape, strides = ((1,) + array.shape)[-2:], ((0,) + array.strides)[-2:]
    size = array.itemsize
    rows, cols = shape if array.ndim else (1, 1)
    row_stride, col_stride = strides if array.ndim else (0, size)
    return array.ctypes.data, array.dtype.name, array.ndim, rows, cols, (row_stride // size, col_stride // size)
