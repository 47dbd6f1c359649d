"""The ops in torch's dispatcher: their kernels, and fake kernels for torch.compile.

Invariant: a kernel writes where its arguments say. New results come from torch's allocator on torch's current stream. The ops
exist once a process.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from . import _native
from ._arguments import named, result_shapes
from ._comm import Communicator
from .errors import FluxError, OperandError

__all__ = ["call"]

_NEEDED = (2, 10)


def _register() -> None:
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < _NEEDED:
        raise FluxError(f"torch is {torch.__version__}: flux_tp needs torch {_NEEDED[0]}.{_NEEDED[1]} or later")
    libraries = Path(torch.__file__).parent / "lib"
    cuda = libraries / "libtorch_cuda.so"
    _native.register_torch(str(libraries / "libtorch_cpu.so"), str(cuda) if cuda.exists() else None)


_register()
_ops = {name: getattr(torch.ops.flux_tp, name).default for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")}


def call(
    op: str,
    comm: Communicator,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor] | None = None,
    out: list[Tensor] | None = None,
    *,
    residual: Tensor | None = None,
    norm: tuple[Tensor, float] | None = None,
    m: int | None = None,
    split: list[int] | None = None,
    second: str | None = None,
    activation: int = 0,
    partials: int = 0,
) -> list[Tensor]:
    """Makes a call without gradients: its results, in the order of ``out``."""
    m, shapes = result_shapes(op, comm, x, weights, activation, m, second)
    out = [x.new_empty(shape) for shape in shapes] if out is None else out
    count, (gain, eps) = len(weights), norm or (None, 0.0)
    # In inference frozen parameters are there before a step. Others may come from the kernel ahead.
    constant = not torch.is_grad_enabled() and all(isinstance(weight, Parameter) and not weight.requires_grad for weight in weights)
    other = out[count] if second else None
    try:
        _ops[op](x, weights, biases, residual, gain, eps, activation, m, split, partials, constant, comm.id, out[:count], other)
    except RuntimeError as error:
        # torch's exception has the message alone.
        raise error if isinstance(error, FluxError) else _native.take_error(str(error)) or error from None
    return out


def _fake(x, weight, bias, residual, gain, eps, activation, m, split, partials, constant_weights, comm, out, second):
    # Also the kernel of the meta device, which torch calls if one operand is there.
    lists = {"weight": weight, "bias": bias or (), "out": out}
    of_weights = {named(name, index, len(weight)): tensor for name, of in lists.items() for index, tensor in enumerate(of)}
    for name, tensor in {**of_weights, "residual": residual, "gain": gain, "x_full" if gain is None else "y_norm": second}.items():
        if tensor is not None and tensor.device != x.device:
            raise OperandError(f"{name} is on {tensor.device}, and x on {x.device}: move it there")


for _name in _ops:
    torch.library.register_fake(f"flux_tp::{_name}", _fake)
