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
    from ._ops import as_rows, columns, results_lead, shard_rows

    _check_place(comm)
    gain, eps = norm or (None, None)
    is_pair, second_name = gathered or norm is not None, "x_full" if gathered else "y_norm"
    y, second = out or (None, None) if is_pair else (out, None)
    given = {"x": x, "weight": weight, "bias": bias, "residual": residual, "gain": gain, "out": y, second_name: second}
    _check_types(given)
    lead = x.shape[:-1]
    leads = results_lead(op, lead, m, comm)
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
    _check_writeable({"out": y, second_name: second})
    named = {"x": x, "weight": weight, "bias": bias, "residual": residual, "gain": gain, "out": y, second_name: second}
    x, weight, bias, residual, gain, described, second_described = (_describe(name, array) for name, array in named.items())
    operands = x, [(weight, bias, described, split)], residual, gain, second_described
    _native.call_host(comm.id, op, (activation, m), operands, eps, partials != 0)
    if out is not None:
        return out
    if len(lead) > 1:
        y, second = (None if array is None else array.reshape(*leads, array.shape[1]) for array in (y, second))
    return (y, second) if is_pair else y


def run_several(
    x: Any,
    weights: list[Any],
    biases: list[Any],
    comm: Communicator,
    out: Any,
    *,
    activation: int,
    m: int | None,
    columns: list[int | None],
    gathered: bool,
) -> Any:
    """Makes a call with several weights; see ``all_gather_matmul`` in ``_ops``."""
    from ._ops import results_lead

    _check_place(comm)
    indices = range(len(weights))
    *ys, x_full = [None] * (len(weights) + 1) if out is None else out if gathered else (*out, None)
    lists = {"weight": weights, "bias": biases, "out": ys}
    _check_types({"x": x, "x_full": x_full} | {f"{name}[{index}]": of[index] for name, of in lists.items() for index in indices})
    lead = x.shape[:-1]
    leads = results_lead("all_gather_matmul", lead, m, comm)
    if x.ndim > 2:
        x = x.reshape(prod(lead), x.shape[-1])
    if m is None:
        m = (x.shape[0] if x.ndim else 0) * comm.world_size
    if out is None:
        ys = [np.empty((m, weight.shape[0] if weight.ndim else 0), x.dtype) for weight in weights]
        x_full = np.empty((m, x.shape[1] if x.ndim > 1 else 0), x.dtype) if gathered else None
    _check_writeable({"x_full": x_full} | {f"out[{index}]": y for index, y in enumerate(ys)})
    lists["out"] = ys
    described = _describe("x", x)
    of_weights = [(*(_describe(f"{name}[{index}]", of[index]) for name, of in lists.items()), columns[index]) for index in indices]
    operands = described, of_weights, None, None, _describe("x_full", x_full)
    _native.call_host(comm.id, "all_gather_matmul", (activation, m), operands, None, False)
    if out is not None:
        return out
    results = [*ys, x_full] if gathered else ys
    return tuple(y.reshape(*leads, y.shape[1]) if len(lead) > 1 else y for y in results)


def _check_place(comm: Communicator) -> None:
    if comm.device is not None:
        raise OperandError(
            f"x is in host memory, but this rank's communicator works on CUDA device {comm.device}: give torch tensors of that "
            "device, or a communicator with transport='host'"
        )


def _check_types(given: dict[str, Any]) -> None:
    for name, array in given.items():
        if array is not None and not isinstance(array, np.ndarray):
            raise OperandError(f"{name} is a {type(array).__name__}, and x is a numpy.ndarray: give arrays of one library")


def _check_writeable(results: dict[str, Any]) -> None:
    for name, array in results.items():
        if array is not None and not array.flags.writeable:
            raise OperandError(f"{name} is not writeable")


def _describe(name: str, array: np.ndarray | None) -> tuple[int, str, int, int, int, tuple[int, int]] | None:
    """Address, dtype, dimensions, rows, columns and strides in elements."""
    if array is None:
        return None
    size = max(1, array.itemsize)
    if not array.dtype.isnative:
        raise OperandError(f"{name}: dtype {array.dtype.str} is not in this machine's byte order: convert it")
    if any(stride % size for extent, stride in zip(array.shape, array.strides) if extent > 1):
        raise OperandError(f"{name} has strides of {array.strides} bytes, and multiples of {size} are needed: call numpy.ascontiguousarray")
    shape, strides = ((1,) + array.shape)[-2:], ((0,) + array.strides)[-2:]
    rows, cols = shape if array.ndim else (1, 1)
    row_stride, col_stride = strides if array.ndim else (0, size)
    return array.ctypes.data, array.dtype.name, array.ndim, rows, cols, (row_stride // size, col_stride // size)
