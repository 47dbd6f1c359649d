"""Calls with tensors of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import increment_version

from . import _native
from ._arguments import INPUTS, check_gain, check_gates, result_shapes
from ._autograd import AllGatherMatmul, CopiedInputLinear, MatmulAllReduce, MatmulReduceScatter
from ._comm import Communicator
from ._kernels import call
from ._scales import FORMS, norm_form, places_of_rows, rows_in, scaled
from .errors import OperandError

__all__ = ["FUNCTIONS", "check_result", "copied_input_linear", "norm_form", "run", "scaled", "taking"]

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


# By number, of the product.
FUNCTIONS = [
    _Gated(_PLAIN[plain], interleaved) if gated else _PLAIN[plain] for _, plain, gated, interleaved in _native.activations()
]


def taking(x: Tensor, comm: Communicator) -> Callable[[str, Any], Tensor]:
    """Takes the operands of a call with this ``x`` by their names: checked, and as autocast has them."""
    device = "cuda" if x.is_cuda else "cpu"
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        return lambda name, tensor: _cast(_untransformed(name, tensor), dtype)
    # Looked at once: most calls are in no transform.
    transforms = not torch.compiler.is_compiling() and (forward_ad._current_level >= 0 or torch._C._functorch.peek_interpreter_stack() is not None)
    return _untransformed if transforms else _tensor


def _tensor(name: str, tensor: Any) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise OperandError(f"{name} is a {type(tensor).__name__}, and x is a torch.Tensor: give tensors alone")
    return tensor


check_result = _tensor


def _untransformed(name: str, tensor: Any) -> Tensor:
    _tensor(name, tensor)
    wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    if not torch.compiler.is_compiling() and (wrapped(tensor) or forward_ad.unpack_dual(tensor).tangent is not None):
        raise OperandError(
            f"{name} is a tensor of torch.func or of forward-mode AD, and flux_tp's ops have neither: "
            "call them outside, or differentiate by torch.autograd's backward pass"
        )
    return tensor


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype) if tensor.dtype in _CAST else tensor


# What autocast casts, as for torch's own linear.
_CAST = (torch.float32, torch.bfloat16, torch.float16)


def copied_input_linear(x: Any, weight: Tensor, bias: Tensor | None, n: int, comm: Communicator) -> Tensor:
    """A column-parallel linear of an ``x`` that every rank has whole. ``n``: columns of all ranks together."""
    check_result("x", x)
    take, given = taking(x, comm), {"x": x, "weight": weight, "bias": bias}
    operands = {name: take(name, tensor) for name, tensor in given.items() if tensor is not None}
    dtype = operands["x"].dtype
    for name, tensor in operands.items():
        if tensor.dtype not in (torch.bfloat16, torch.float16):
            raise OperandError(f"{name}: its dtype is {tensor.dtype}: convert it to torch.bfloat16 or torch.float16, or call under autocast")
        if tensor.dtype != dtype:
            raise OperandError(f"{name} is {tensor.dtype}, and x {dtype}: convert one of them")
    return CopiedInputLinear.apply(operands["x"], operands["weight"], operands.get("bias"), n, comm)


# Operands that the functions of _autograd take, and the gain of the norm behind them.
_WITH_GRADIENTS = ("bias", "residual", "gain")


def run(
    op: str,
    comm: Communicator,
    x: Tensor,
    weights: list[Tensor],
    operands: Mapping[str, Any],
    out: list[Tensor] | None,
    *,
    eps: float | None,
    m: int | None,
    split: list[int] | None,
    second: str | None,
    activation: int = 0,
    partials: int = 0,
    keep: bool = False,
    scales: int = 0,
    out_dtype: torch.dtype | None = None,
    quantised: tuple[str, bool] | None = None,
) -> list[Tensor]:
    """Makes a call: its results in the order of ``out``, with gradients where an operand needs one.

    ``quantised``: the form of the scales of normalised rows, and whether they carry these. Codes and scales are further results.
    """
    others = [tensor for name, of in operands.items() for tensor in (of if INPUTS[name].of_weight else [of])]
    if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *weights, *others))):
        if out is not None and not torch.compiler.is_compiling():
            # A backward pass that needs the old values then refuses.
            increment_version(out)
        options = {"eps": eps or 0.0, "m": m, "split": split, "second": second, "activation": activation, "scales": scales, "out_dtype": out_dtype}
        if quantised is None:
            return call(op, comm, x, weights, operands, out, partials=partials, **options)
        form, carried = quantised
        _, [(rows, n)] = result_shapes(op, comm, x, weights, activation, m, None)
        places = places_of_rows(rows, n, form, carried, x.device)
        results = call(op, comm, x, weights, operands, out, partials=partials, normalised=(FORMS[form], *places), **options)
        return [*results, *rows_in(places, n, form)]
    given = {"out": out is not None, "return_gathered": second == "x_full", "norm_scales": quantised is not None}
    given |= {name: True for name in operands if name not in _WITH_GRADIENTS}
    for name, is_given in given.items():
        if is_given:
            raise OperandError(f"{name}= takes no part in autograd: leave it out, or call the op under torch.no_grad()")
    if op != "all_gather_matmul":
        biases, residual = operands.get("bias"), operands.get("residual")
        function = MatmulReduceScatter if op == "matmul_reduce_scatter" else MatmulAllReduce
        gain = operands.get("gain")
        check_gain(gain, eps, weights[0].shape[0])
        y = function.apply(x, weights[0], biases and biases[0], residual, split and split[0], partials, comm)
        # A kernel behind the op, as without gradients, and torch has its derivative.
        return [y] if gain is None else [y, F.rms_norm(y, y.shape[1:], gain, eps).to(y.dtype)]
    biases = operands.get("bias")
    # The derivative of an activation needs its input, which the fused op does not keep.
    function = FUNCTIONS[activation]
    if isinstance(function, _Gated) and split is not None and split[0] % (16 * comm.world_size):
        check_gates("n", split[0], comm.world_size)
        # Ranks with unequal numbers of gates: one product would split its columns otherwise.
        weights = function.halves(weights[0], 0)
        biases = biases and [half.contiguous() for half in function.halves(biases[0], 0)]
        gate, up = AllGatherMatmul.apply(x, m, [split[0] // 2] * 2, comm, keep, 2, *weights, *(biases or ()))
        return [function.activate(gate) * up]
    ys = AllGatherMatmul.apply(x, m, split, comm, keep, len(weights), *weights, *(biases or ()))
    return [function(y) for y in ys]
