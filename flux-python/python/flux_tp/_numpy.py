"""Calls with arrays of NumPy, over the host transport."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np

from . import _native
from ._comm import Communicator
from .errors import OperandError


def run(
    op: str,
    x: Any,
    weight: Any,
    bias: Any,
    comm: Communicator,
    out: Any,
    *,
    activation: int = 0,
    m: int | None = None,
    residual: Any = None,
    norm: tuple[Any, float] | None = None,
) -> Any:
    """Makes a call; see the ops in ``_ops``."""
    from ._ops import as_rows, shard_rows

    if comm.device is not None:
        raise OperandError(
            f"x is in host memory, but this rank's communicator works on CUDA device {comm.device}: give torch tensors of that "
            "device, or a communicator with transport='host'"
        )
    gain, eps = norm or (None, None)
    y, y_norm = (out, None) if norm is None else out or (None, None)
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual, "gain": gain, "out": y, "y_norm": y_norm}
    for name, array in given.items():
        if array is not None and not isinstance(array, np.ndarray):
            raise OperandError(f"{name} is a {type(array).__name__}, and x is a numpy.ndarray: give arrays of one library")
    lead = x.shape[:-1]
    if x.ndim > 2:
        x = x.reshape(prod(lead), x.shape[-1])
        residual = as_rows(residual, lead)
    rows = x.shape[0] if x.ndim else 0
    gathers = op == "all_gather_matmul"
    if m is None:
        m = rows * comm.world_size if gathers else rows
    shape = (shard_rows(comm, m) if op == "matmul_reduce_scatter" else m, weight.shape[0] if weight.ndim else 0)
    y = np.empty(shape, x.dtype) if y is None else y
    y_norm = np.empty(shape, x.dtype) if y_norm is None and norm is not None else y_norm
    for name, array in (("out", y), ("y_norm", y_norm)):
        if array is not None and not array.flags.writeable:
            raise OperandError(f"{name} is not writeable")
    described = [None if array is None else _describe(array) for array in (x, weight, bias, residual, gain, y, y_norm)]
    _native.call_host(comm.id, op, activation, m, tuple(described), eps)
    if out is not None:
        return out
    if len(lead) > 1:
        y, y_norm = (None if array is None else array.reshape(-1, *lead[1:], shape[1]) for array in (y, y_norm))
    return y if norm is None else (y, y_norm)


def _describe(array: np.ndarray) -> tuple[int, str, int, int, int, tuple[int, int]]:
    """Address, dtype, dimensions, rows, columns and strides in elements."""
    shape, strides = ((1,) + array.shape)[-2:], ((0,) + array.strides)[-2:]
    size = array.itemsize
    rows, cols = shape if array.ndim else (1, 1)
    row_stride, col_stride = strides if array.ndim else (0, size)
    return array.ctypes.data, array.dtype.name, array.ndim, rows, cols, (row_stride // size, col_stride // size)
