"""Calls with tensors of PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from . import _ops
from ._autograd import AllGatherMatmul, AllGatherMatmulSeveral, CopiedInputLinear, MatmulAllReduce, MatmulReduceScatter
from ._comm import Communicator, known
from ._kernels import calls, gather_for_several, out_calls, own_error, pair_calls, pair_out_calls
from .errors import OperandError

_PLAIN = {"none": lambda y: y, "gelu": lambda y: F.gelu(y, approximate="tanh"), "silu": F.silu, "relu": F.relu}


class _Gated:
    """Activated gates times their ups, of a product."""

    def __init__(self, activate: Callable[[Tensor], Tensor], interleaved: bool) -> None:
        self.activate, self._interleaved = activate, interleaved

    def halves(self, of: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        """Gates and ups along a dimension."""
        if not self._interleaved:
            return of.chunk(2, dim)
        return of.unflatten(dim, (-1, 2)).unbind(dim + 1 if dim >= 0 else -1)

    def __call__(self, y: Tensor) -> Tensor:
        gate, up = self.halves(y, -1)
        return self.activate(gate) * up


_GATED = {"geglu": "gelu", "swiglu": "silu", "reglu": "relu"}
# By number, of the product.
FUNCTIONS = {_ops.ACTIVATIONS[name]: function for name, function in _PLAIN.items()}
FUNCTIONS |= {_ops.ACTIVATIONS[name]: _Gated(_PLAIN[of], False) for name, of in _GATED.items()}
FUNCTIONS |= {_ops.ACTIVATIONS[f"{name}_interleaved"]: _Gated(_PLAIN[of], True) for name, of in _GATED.items()}


def _operands(given: dict[str, Any]) -> list[Tensor | None]:
    """Operands by name, ``x`` first, checked and as autocast has them."""
    for name, operand in given.items():
        if operand is None:
            continue
        if not isinstance(operand, Tensor):
            raise OperandError(f"{name} is a {type(operand).__name__}, and x is a torch.Tensor: give tensors alone")
        if not torch.compiler.is_compiling() and _is_transformed(operand):
            raise OperandError(
                f"{name} is a tensor of torch.func or of forward-mode AD, and flux_tp's ops have neither: "
                "call them outside, or differentiate by torch.autograd's backward pass"
            )
    device = given["x"].device.type
    if not torch.is_autocast_enabled(device):
        return list(given.values())
    dtype = torch.get_autocast_dtype(device)
    return [operand.to(dtype) if operand is not None and operand.dtype in _CAST else operand for operand in given.values()]


# What autocast casts, as for torch's own linear.
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def _is_transformed(tensor: Tensor) -> bool:
    return torch._C._functorch.is_functorch_wrapped_tensor(tensor) or forward_ad.unpack_dual(tensor).tangent is not None


def copied_input_linear(x: Any, weight: Tensor, bias: Tensor | None, n: int, comm: Communicator) -> Tensor:
    """A column-parallel linear of an ``x`` that every rank has whole. ``n``: columns of all ranks together."""
    named = {"x": x, "weight": weight, "bias": bias}
    operands = _operands(named)
    for name, operand in zip(named, operands, strict=True):
        if operand is not None and operand.dtype not in (torch.bfloat16, torch.float16):
            raise OperandError(f"{name}: its dtype is {operand.dtype}: convert it to torch.bfloat16 or torch.float16, or call under autocast")
        if operand is not None and operand.dtype != operands[0].dtype:
            raise OperandError(f"{name} is {operand.dtype}, and x {operands[0].dtype}: convert one of them")
    return CopiedInputLinear.apply(*operands, n, comm.id)


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
    keep: bool = False,
) -> Any:
    """Makes a call; see the ops in ``_ops``."""
    lead = x.shape[:-1]
    gain, eps = norm or (None, None)
    x, weight, bias, residual, gain = _operands({"x": x, "weight": weight, "bias": bias, "residual": residual, "gain": gain})
    results_lead = _ops.results_lead(op, lead, m, comm)
    if len(lead) > 1:
        x = x.reshape(prod(lead), x.shape[-1])
        residual = _ops.as_rows(residual, lead)
    operands = (x, weight, bias, residual, gain)
    needs_grad = torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)
    split = -1 if split is None else split
    if op == "all_gather_matmul":
        arguments = (x, weight, bias, activation, -1 if m is None else m, split, comm.id)
    elif norm is None:
        arguments = (x, weight, bias, residual, split, partials, comm.id)
    else:
        arguments = (x, weight, bias, residual, gain, eps, split, partials, comm.id)
    second = "return_gathered=" if gathered else None if norm is None else "norm="
    y = _with_own_errors(_run, op, arguments, second, out, needs_grad, keep)
    if out is not None or len(lead) == 1:
        return y
    if second is not None:
        return tuple(part.reshape(*results_lead, part.shape[1]) for part in y)
    return y.reshape(*results_lead, y.shape[1])


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
    keep: bool,
) -> Any:
    """Makes a call with several weights; see ``all_gather_matmul`` in ``_ops``."""
    lead, count = x.shape[:-1], len(weights)
    results_lead = _ops.results_lead("all_gather_matmul", lead, m, comm)
    named = {f"weight[{index}]": weight for index, weight in enumerate(weights)}
    x, *operands = _operands({"x": x, **named, **{f"bias[{index}]": bias for index, bias in enumerate(biases)}})
    weights, biases = operands[:count], operands[count:]
    for index, result in enumerate(out or ()):
        if not isinstance(result, Tensor):
            raise OperandError(f"out[{index}] is a {type(result).__name__}, and x is a torch.Tensor: give tensors alone")
    if len(lead) > 1:
        x = x.reshape(prod(lead), x.shape[-1])
    # What shapes of results are taken from.
    for name, operand in {"x": x, **dict(zip(named, weights, strict=True))}.items():
        if operand.dim() != 2:
            raise OperandError(f"{name} has {operand.dim()} dimensions, and 2 are needed")
    operands = (x, *weights, *biases)
    needs_grad = torch.is_grad_enabled() and any(operand is not None and operand.requires_grad for operand in operands)
    m = x.shape[0] * comm.world_size if m is None else m
    columns = [-1 if n is None else n for n in columns]
    _check_autograd(needs_grad, "return_gathered=" if gathered else None, out)
    if out is not None:
        *outs, x_full = out if gathered else (*out, None)
    elif gathered:
        outs, x_full = None, x.new_empty(m, x.shape[1])
    else:
        outs = x_full = None
    if needs_grad:
        ys = _with_own_errors(AllGatherMatmulSeveral.apply, x, m, columns, comm.id, keep, *weights, *biases)
        # The derivative of an activation needs its input, which the fused op does not keep.
        ys = [FUNCTIONS[activation](y) for y in ys]
    else:
        ys = _with_own_errors(gather_for_several, x, weights, biases, activation, m, columns, comm.id, outs, x_full)
    if out is not None:
        return out
    results = [*ys, x_full] if gathered else ys
    return tuple(results if len(lead) == 1 else [part.reshape(*results_lead, part.shape[1]) for part in results])


def _with_own_errors(call: Callable[..., Any], *arguments: Any) -> Any:
    if torch.compiler.is_compiling():
        return call(*arguments)
    try:
        return call(*arguments)
    except RuntimeError as error:
        raise own_error(error) from None


def _check_autograd(needs_grad: bool, second: str | None, out: Any) -> None:
    # ``second``: the argument that brings a second result.
    if needs_grad and (out is not None or second is not None):
        name = second or "out="
        raise OperandError(f"{name} takes no part in autograd: leave it out, or call the op under torch.no_grad()")


def _run(op, arguments, second, out, needs_grad, keep):
    _check_autograd(needs_grad, second, out)
    if out is not None:
        if second is not None:
            name = "x_full" if op == "all_gather_matmul" else "out_norm"
            pair_out_calls[op](*arguments, out=out[0], **{name: out[1]})
        else:
            out_calls[op](*arguments, out=out)
        return out
    if second is not None:
        return pair_calls[op](*arguments)
    if not needs_grad:
        return calls[op](*arguments)
    if op == "all_gather_matmul":
        x, weight, bias, activation, m, n, comm = arguments
        # The derivative of an activation needs its input, which the fused op does not keep.
        function = FUNCTIONS[activation]
        if isinstance(function, _Gated) and n > 0 and n % (16 * known(comm).world_size):
            _ops.check_gates("n", n, known(comm).world_size)
            # Ranks with unequal numbers of gates: one product would split its columns otherwise.
            weights = function.halves(weight, 0)
            biases = (None, None) if bias is None else [half.contiguous() for half in function.halves(bias, 0)]
            gate, up = (AllGatherMatmul.apply(x, w, b, m, n // 2, comm, keep) for w, b in zip(weights, biases, strict=True))
            return function.activate(gate) * up
        return function(AllGatherMatmul.apply(x, weight, bias, m, n, comm, keep))
    return (MatmulReduceScatter if op == "matmul_reduce_scatter" else MatmulAllReduce).apply(*arguments)


_ops._torch = sys.modules[__name__]
_ops._Tensor = Tensor
