"""The ops in torch's dispatcher: their kernels, and fake kernels for torch.compile.

Invariant: a kernel writes where its arguments say. New results come from torch's allocator on torch's current stream. The ops
exist once a process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _native
from ._arguments import INPUTS, named, result_shapes
from ._comm import Communicator
from .errors import FluxError, OperandError

__all__ = ["call", "quantized"]

_NEEDED = (2, 10)


def _register() -> None:
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < _NEEDED:
        raise FluxError(f"torch is {torch.__version__}: flux_tp needs torch {_NEEDED[0]}.{_NEEDED[1]} or later")
    libraries = Path(torch.__file__).parent / "lib"
    cuda = libraries / "libtorch_cuda.so"
    _native.register_torch(str(libraries / "libtorch_cpu.so"), str(cuda) if cuda.exists() else None)


_register()
_ARGUMENTS = [argument.name for argument in torch.ops.flux_tp.matmul_all_reduce.default._schema.arguments]
_ops = {name: getattr(torch.ops.flux_tp, name).default for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")}


def call(
    op: str,
    comm: Communicator,
    x: Tensor,
    weights: list[Tensor],
    operands: Mapping[str, Any],
    out: list[Tensor] | None = None,
    *,
    eps: float = 0.0,
    m: int | None = None,
    split: list[int] | None = None,
    second: str | None = None,
    activation: int = 0,
    partials: int = 0,
    scales: int = 0,
    out_dtype: torch.dtype | None = None,
    normalised: tuple[int, Tensor, Tensor | None] | None = None,
    constant: bool | None = None,
) -> list[Tensor]:
    """Makes a call without gradients: its results, in the order of ``out``. ``operands``: the others by name, as of ``INPUTS``.

    ``normalised``: the form of quantised normalised rows, and where they go. ``constant``: whether weights are frozen parameters
    or views of such; ``None``: where they are such parameters.
    """
    m, shapes = result_shapes(op, comm, x, weights, activation, m, second)
    out = [x.new_empty(shape, dtype=out_dtype) for shape in shapes] if out is None else out
    count, further = len(weights), [operands.get(name) for name in INPUTS]
    # In inference frozen parameters are there before a step. Others may come from the kernel ahead.
    if constant is None:
        constant = all(isinstance(weight, Parameter) and not weight.requires_grad for weight in weights)
    constant = constant and not torch.is_grad_enabled()
    norm_scales, *others = (0, out[count] if second else None, None) if normalised is None else normalised
    try:
        _ops[op](x, weights, *further, eps, activation, m, split, partials, scales, norm_scales, constant, comm.id, out[:count], *others)
    except RuntimeError as error:
        raise _raised(error) from None
    return out


def quantized(
    comm: Communicator, x: Tensor, gain: Tensor | None, scale: Tensor | None, eps: float, scales: int, out: Tensor, out_scale: Tensor | None
) -> None:
    """Writes rows of ``x`` as 8-bit operands, with scales in ``out_scale``, ``[groups, rows]``, or behind each row."""
    try:
        torch.ops.flux_tp.quantize_rows.default(x, gain, scale, eps, scales, comm.id, out, out_scale)
    except RuntimeError as error:
        raise _raised(error) from None


def _raised(error: RuntimeError) -> BaseException:
    # torch's exception has the message alone.
    return error if isinstance(error, FluxError) else _native.take_error(str(error)) or error


def _fake(*given, **by_name):
    # Also the kernel of the meta device, which torch calls if one operand is there.
    arguments = {**dict(zip(_ARGUMENTS, given)), **by_name}
    x, count = arguments["x"], len(arguments["weight"])
    second = "x_full" if arguments["gain"] is None else "y_norm"
    for name, operand in arguments.items():
        for index, tensor in enumerate(operand if isinstance(operand, (list, tuple)) else [operand]):
            if isinstance(tensor, Tensor) and tensor.device != x.device:
                called = named(name, index, count) if isinstance(operand, (list, tuple)) else second if name == "second" else name
                raise OperandError(f"{called} is on {tensor.device}, and x on {x.device}: move it there")


torch.library.register_fake("flux_tp::quantize_rows", lambda *given, **by_name: None)
for _name in _ops:
    torch.library.register_fake(f"flux_tp::{_name}", _fake)
