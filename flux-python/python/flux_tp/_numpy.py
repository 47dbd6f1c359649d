"""Calls with arrays of NumPy, over the host transport."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from . import _native
from ._arguments import INPUTS, named, result_shapes
from ._comm import Communicator
from .errors import OperandError


def taking(x: Any, comm: Communicator) -> Callable[[str, Any], np.ndarray]:
    """Takes the operands of a call by their names, checked."""
    if comm.device is not None:
        raise OperandError(
            f"x is in host memory, but this rank's communicator works on CUDA device {comm.device}: give torch tensors of that "
            "device, or a communicator with transport='host'"
        )
    return _checked


def check_result(name: str, array: Any) -> None:
    if not _checked(name, array).flags.writeable:
        raise OperandError(f"{name} is not writeable: give an array that is, as numpy.empty makes")


def _checked(name: str, array: Any) -> np.ndarray:
    if not isinstance(array, np.ndarray):
        raise OperandError(f"{name} is a {type(array).__name__}, and x is a numpy.ndarray: give arrays of one library")
    return array


def scaled(*_: Any) -> Any:
    raise OperandError("scales are of torch.float8_e4m3fn operands, which NumPy has not: give tensors of PyTorch")


def norm_form(*_: Any) -> Any:
    raise OperandError("norm_scales= makes torch.float8_e4m3fn, which NumPy has not: give tensors of PyTorch, or leave it out")


def run(
    op: str,
    comm: Communicator,
    x: np.ndarray,
    weights: list[np.ndarray],
    operands: Mapping[str, Any],
    out: list[np.ndarray] | None,
    *,
    eps: float | None,
    m: int | None,
    split: list[int] | None,
    second: str | None,
    activation: int = 0,
    partials: int = 0,
    keep: bool = False,
) -> list[np.ndarray]:
    """Makes a call: its results in the order of ``out``. ``keep`` is for gradients, which arrays have not."""
    m, shapes = result_shapes(op, comm, x, weights, activation, m, second)
    out = [np.empty(shape, x.dtype) for shape in shapes] if out is None else out
    count, described = len(weights), _describe("x", x)
    pairs = {"weight": weights, "out": out}
    of_weights = [
        (*(_describe(named(name, index, count), of[index]) for name, of in pairs.items()), split and split[index]) for index in range(count)
    ]
    others = {name: of if INPUTS[name].of_weight else [of] for name, of in operands.items()}
    if second:
        others[second] = [out[count]]
    others = [
        (name, [_describe(named(name, index, len(of)), array) for index, array in enumerate(of)]) for name, of in others.items()
    ]
    _native.call_host(comm.id, op, (activation, m), (described, of_weights, others), eps, partials != 0)
    return out


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
