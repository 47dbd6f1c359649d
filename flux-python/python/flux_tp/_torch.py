"""Calls with tensors of PyTorch."""

from __future__ import annotations

import sys
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _ops
from ._autograd import AllGatherMatmul, MatmulAllReduce, MatmulReduceScatter
from ._comm import Communicator
from ._kernels import calls, out_calls, own_error
from .errors import OperandError

FUNCTIONS = {
    _ops.ACTIVATIONS["none"]: lambda y: y,
    _ops.ACTIVATIONS["gelu"]: lambda y: F.gelu(y, approximate="tanh"),
    _ops.ACTIVATIONS["silu"]: F.silu,
    _ops.ACTIVATIONS["relu"]: F.relu,
}


def run(op: str, x: Any, weight: Any, bias: Any, activation: int, comm: Communicator, m: int | None, out: Any) -> Any:
    """Makes a call; see the ops in ``_ops``."""
    lead = x.shape[:-1]
    if len(lead) > 1:
        x = x.reshape(prod(lead), x.shape[-1])
    rows = -1 if m is None else m
    needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad))
    if torch.compiler.is_compiling():
        y = _run(op, x, weight, bias, activation, comm, rows, out, needs_grad)
    else:
        try:
            y = _run(op, x, weight, bias, activation, comm, rows, out, needs_grad)
        except RuntimeError as error:
            raise own_error(error) from None
    return y.reshape(-1, *lead[1:], y.shape[-1]) if out is None and len(lead) > 1 else y


def _run(op, x, weight, bias, activation, comm, m, out, needs_grad):
    if out is not None:
        if needs_grad:
            raise OperandError("out= takes no part in autograd: leave it out, or call the op under torch.no_grad()")
        out_calls[op](x, weight, bias, activation, m, comm.id, out=out)
        return out
    if not needs_grad:
        return calls[op](x, weight, bias, activation, m, comm.id)
    if op == "all_gather_matmul":
        # The derivative of an activation needs its input, which the fused op does not keep.
        return FUNCTIONS[activation](AllGatherMatmul.apply(x, weight, bias, m, comm.id))
    return (MatmulReduceScatter if op == "matmul_reduce_scatter" else MatmulAllReduce).apply(x, weight, bias, comm.id)


_ops._torch = sys.modules[__name__]
_ops._Tensor = Tensor
