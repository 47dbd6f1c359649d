"""Calls with tensors of PyTorch: kernels in torch's dispatcher, fake kernels, gradients.

Invariant: an op's result is allocated by torch on torch's current stream, and the ops exist once a process.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from . import _native, _ops
from ._comm import Communicator, _known
from .errors import FluxError, OperandError

_NEEDED = (2, 10)


def _register() -> None:
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < _NEEDED:
        raise FluxError(f"torch is {torch.__version__}: flux_tp needs torch {_NEEDED[0]}.{_NEEDED[1]} or later")
    libraries = Path(torch.__file__).parent / "lib"
    cuda = libraries / "libtorch_cuda.so"
    _native.register_torch(str(libraries / "libtorch_cpu.so"), str(cuda) if cuda.exists() else None)


_register()
_packets = {name: getattr(torch.ops.flux_tp, name) for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")}
_calls = {name: packet.default for name, packet in _packets.items()}
_out_calls = {name: packet.out for name, packet in _packets.items()}


def _one_device(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    # The fake kernels are also those of the meta device: torch calls them if one operand is there.
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.device != x.device:
            raise OperandError(f"{name} is on {tensor.device}, and x on {x.device}: move it there")


@torch.library.register_fake("flux_tp::all_gather_matmul")
def _(x, weight, bias, activation, m, comm):
    _one_device(x, weight, bias)
    rows = x.shape[0] * _known[comm].world_size if isinstance(m, int) and m < 0 else m
    return x.new_empty(rows, weight.shape[0])


@torch.library.register_fake("flux_tp::matmul_reduce_scatter")
def _(x, weight, bias, activation, m, comm):
    _one_device(x, weight, bias)
    return x.new_empty(_ops.shard_rows(_known[comm], x.shape[0]), weight.shape[0])


@torch.library.register_fake("flux_tp::matmul_all_reduce")
def _(x, weight, bias, activation, m, comm):
    _one_device(x, weight, bias)
    return x.new_empty(x.shape[0], weight.shape[0])


for _name in _packets:
    torch.library.register_fake(f"flux_tp::{_name}.out", lambda x, weight, bias, activation, m, comm, *, out: _one_device(x, weight, bias))


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
            raise _own(error) from None
    return y.reshape(-1, *lead[1:], y.shape[-1]) if out is None and len(lead) > 1 else y


def _run(op, x, weight, bias, activation, comm, m, out, needs_grad):
    if out is not None:
        if needs_grad:
            raise OperandError("out= takes no part in autograd: leave it out, or call the op under torch.no_grad()")
        _out_calls[op](x, weight, bias, activation, m, comm.id, out=out)
        return out
    if not needs_grad:
        return _calls[op](x, weight, bias, activation, m, comm.id)
    if op == "all_gather_matmul":
        # The derivative of an activation needs its input, which the fused op does not keep.
        return ACTIVATIONS[activation](_AllGatherMatmul.apply(x, weight, bias, m, comm.id))
    return (_MatmulReduceScatter if op == "matmul_reduce_scatter" else _MatmulAllReduce).apply(x, weight, bias, comm.id)


ACTIVATIONS = {
    _ops.ACTIVATIONS["none"]: lambda y: y,
    _ops.ACTIVATIONS["gelu"]: lambda y: F.gelu(y, approximate="tanh"),
    _ops.ACTIVATIONS["silu"]: F.silu,
    _ops.ACTIVATIONS["relu"]: F.relu,
}


def _own(error: RuntimeError) -> RuntimeError:
    """The exception of flux_tp behind one of torch's, which has its message alone."""
    return error if isinstance(error, FluxError) else _native.take_error(str(error)) or error


def _call(op: str, x: Tensor, weight: Tensor, m: int, comm: int) -> Tensor:
    """A call inside a backward pass."""
    try:
        return _calls[op](x, weight, None, 0, m, comm)
    except RuntimeError as error:
        raise _own(error) from None


class _AllGatherMatmul(torch.autograd.Function):
    """``y = gather(x) @ weight.T + bias``."""

    @staticmethod
    def forward(ctx, x, weight, bias, m, comm):
        ctx.save_for_backward(x, weight)
        ctx.comm = comm
        return _calls["all_gather_matmul"](x, weight, bias, 0, m, comm)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy = dy.contiguous()
        # The kernels read both operands along rows, so the weight is transposed by a copy.
        dx = _call("matmul_reduce_scatter", dy, weight.t().contiguous(), -1, ctx.comm) if needs_x else None
        dweight = dy.t() @ gather_rows(x, dy.shape[0], _known[ctx.comm]) if needs_weight else None
        return dx, dweight, dy.sum(0) if needs_bias else None, None, None


class _MatmulReduceScatter(torch.autograd.Function):
    """``y = scatter(sum over ranks of x @ weight.T) + bias``."""

    @staticmethod
    def forward(ctx, x, weight, bias, comm):
        ctx.save_for_backward(x, weight)
        ctx.comm = comm
        return _calls["matmul_reduce_scatter"](x, weight, bias, 0, -1, comm)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy = dy.contiguous()
        m = x.shape[0]
        dx = _call("all_gather_matmul", dy, weight.t().contiguous(), m, ctx.comm) if needs_x else None
        gathered = gather_rows(dy, m, _known[ctx.comm]) if needs_weight or needs_bias else None
        dweight = gathered.t() @ x if needs_weight else None
        return dx, dweight, gathered.sum(0) if needs_bias else None, None


class _MatmulAllReduce(torch.autograd.Function):
    """``y = sum over ranks of x @ weight.T, + bias``. Every rank has the same ``dy``, so nothing is sent back."""

    @staticmethod
    def forward(ctx, x, weight, bias, comm):
        ctx.save_for_backward(x, weight)
        return _calls["matmul_all_reduce"](x, weight, bias, 0, -1, comm)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        return dy @ weight if needs_x else None, dy.t() @ x if needs_weight else None, dy.sum(0) if needs_bias else None, None


class CopiedInputLinear(torch.autograd.Function):
    """``y = x @ weight.T + bias`` of an ``x`` that every rank has whole; the gradient of ``x`` is summed over the ranks."""

    @staticmethod
    def forward(ctx, x, weight, bias, comm):
        ctx.save_for_backward(x, weight)
        ctx.comm = comm
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = dy.reshape(-1, dy.shape[-1])
        dx = _call("matmul_all_reduce", rows.contiguous(), weight.t().contiguous(), -1, ctx.comm).reshape(x.shape) if needs_x else None
        dweight = rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None
        return dx, dweight, rows.sum(0) if needs_bias else None, None


def gather_rows(x: Tensor, m: int, comm: Communicator) -> Tensor:
    """All ``m`` rows of the ranks' shards, by torch.distributed."""
    if comm.world_size == 1:
        return x
    group = _process_group(comm)
    most = -(-m // comm.world_size)
    # Shards may differ by one row, and the collective takes equal ones.
    own = x.contiguous() if x.shape[0] == most else F.pad(x, (0, 0, 0, most - x.shape[0]))
    gathered = own.new_empty(most * comm.world_size, x.shape[1])
    dist.all_gather_into_tensor(gathered, own, group=group)
    if m == gathered.shape[0]:
        return gathered
    rows = [m // comm.world_size + (rank < m % comm.world_size) for rank in range(comm.world_size)]
    return torch.cat([gathered[rank * most : rank * most + count] for rank, count in enumerate(rows)])


def _process_group(comm: Communicator) -> Any:
    """The ProcessGroup of the communicator's ranks."""
    if comm.group is not None:
        return comm.group
    if dist.is_initialized() and (dist.get_world_size(), dist.get_rank()) == (comm.world_size, comm.rank):
        return dist.group.WORLD
    raise FluxError(
        "gradients of weights gather rows by torch.distributed, which does not know these ranks: call "
        "torch.distributed.init_process_group before the first step, or flux_tp.init with a ProcessGroup"
    )


_ops._torch = __import__("sys").modules[__name__]
_ops._Tensor = Tensor
