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
    split: int | None = None,
    residual: Any = None,
    norm: tuple[Any, float] | None = None,
    partials: int = 0,
    gathered: bool = False,
) -> Any:
    """Makes a call; see the ops in ``_ops``."""
    from ._ops import as_rows, columns, shard_rows

    if comm.device is not None:
        raise OperandError(
            f"x is in host memory, but this rank's communicator works on CUDA device {comm.device}: give torch tensors of that "
            "device, or a communicator with transport='host'"
        )
    gain, eps = norm or (None, None)
    is_pair, second_name = gathered or norm is not None, "x_full" if gathered else "y_norm"
    y, second = out or (None, None) if is_pair else (out, None)
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual, "gain": gain, "out": y, second_name: second}
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
    shape = (shard_rows(comm, m) if op == "matmul_reduce_scatter" else m, columns(activation, weight.shape[0]) if weight.ndim else 0)
    y = np.empty(shape, x.dtype) if y is None else y
    if second is None and is_pair:
        second = np.empty((m, x.shape[1] if x.ndim > 1 else 0) if gathered else shape, x.dtype)
    for name, array in (("out", y), (second_name, second)):
        if array is not None and not array.flags.writeable:
            raise OperandError(f"{name} is not writeable")
    operands = {"x": x, "weight": weight, "bias": bias, "residual": residual, "gain": gain, "out": y, second_name: second}
    described = [None if array is None else _describe(name, array) for name, array in operands.items()]
    _native.call_host(comm.id, op, (activation, m, split), tuple(described), eps, partials != 0)
    if out is not None:
        return out
    if len(lead) > 1:
        y, second = (None if array is None else array.reshape(-1, *lead[1:], array.shape[1]) for array in (y, second))
    return (y, second) if is_pair else y


def _describe(name: str, array: np.ndarray) -> tuple[int, str, int, int, int, tuple[int, int]]:
    """Address, dtype, dimensions, rows, columns and strides in elements."""
    size = max(1, array.itemsize)
    if not array.dtype.isnative:
        raise OperandError(f"{name}: dtype {array.dtype.str} is not in this machine's byte order: convert it")
    if any(stride % size for extent, stride in zip(array.shape, array.strides) if extent > 1):
        raise OperandError(f"{name} has strides of {array.strides} bytes, and multiples of {size} are needed: call numpy.ascontiguousarray")
    shape, strides = ((1,) + array.shape)[-2:], ((0,) + array.strides)[-2:]
    rows, cols = shape if array.ndim else (1, 1)
    row_stride, col_stride = strides if array.ndim else (0, size)
    return array.ctypes.data, array.dtype.name, array.ndim, rows, cols, (row_stride // size, col_stride // size)
