"""Gradients of the ops. A forward pass saves its shard, and the backward pass gathers again; or the gathered rows are kept.

Weights are read as they are stored: what multiplies by ``weight`` and not by its transpose takes the view ``weight.t()``.
What an op splits, the op of its gradient splits likewise: ``n`` of the one is ``k`` of the other.
A context holds its communicator, so that it lives until the backward pass.

Invariant: a backward pass is no part of a graph. The ops inside it have no gradients, so a second derivative is refused.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from ._comm import known
from ._kernels import call, calls, gather_for_several, pair_calls
from ._rows import Rows

__all__ = ["AllGatherMatmul", "AllGatherMatmulSeveral", "CopiedInputLinear", "MatmulAllReduce", "MatmulReduceScatter"]


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``once_differentiable``, which looks at ``dy`` alone: saved operands may need a second derivative, too."""
    refusing = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *dys: Tensor) -> Any:
        return refusing(ctx, *(dy.detach().requires_grad_() for dy in dys) if torch.is_grad_enabled() else dys)

    return run


def _readable(dy: Tensor) -> Tensor:
    """A gradient as the ops read it: autograd hands out views that may begin off a 16-byte border."""
    dy = dy.contiguous()
    if torch.compiler.is_compiling() or dy.storage_offset() * dy.element_size() % 16 == 0:
        return dy
    return dy.clone()


class AllGatherMatmul(torch.autograd.Function):
    """``y = gather(x) @ weight.T + bias``.

    With ``keep`` the gathered rows are saved in place of ``x`` where the gradient of ``weight`` needs them, and the backward
    pass has no collective of torch.distributed.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, m, n, comm, keep):
        ctx.n, ctx.comm = n, known(comm)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        # A single rank's rows are all rows: the gathered ones would be a copy.
        ctx.kept = keep and needs_weight and ctx.comm.world_size > 1
        if ctx.kept:
            y, x = pair_calls["all_gather_matmul"](x, weight, bias, 0, m, n, comm)
        else:
            y = calls["all_gather_matmul"](x, weight, bias, 0, m, n, comm)
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return y

    @staticmethod
    @_once
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        dy = _readable(dy)
        dx, dweight = _column_parallel(ctx, x, weight, dy, ctx.n, needs_x, needs_weight)
        return dx, dweight, dy.sum(0) if needs_bias else None, None, None, None, None


class AllGatherMatmulSeveral(torch.autograd.Function):
    """``y = gather(x) @ weight.T + bias`` of several weights, by one gather.

    The backward pass is that of one weight with the rows of all: copies of the weights beside each other, for one collective.
    Where one weight needs a gradient, those of all are computed.
    """

    @staticmethod
    def forward(ctx, x, m, columns, comm, keep, *operands):
        count = len(columns)
        weights, biases = list(operands[:count]), list(operands[count:])
        ctx.columns, ctx.comm = columns, known(comm)
        needs_x, needs_weight = ctx.needs_input_grad[0], any(ctx.needs_input_grad[5 : 5 + count])
        ctx.kept = keep and needs_weight and ctx.comm.world_size > 1
        x_full = x.new_empty(m, x.shape[1]) if ctx.kept else None
        results = gather_for_several(x, weights, biases, 0, m, columns, comm, x_full=x_full)
        saved = x_full if ctx.kept else x
        ctx.save_for_backward(saved if needs_weight else None, *(weights if needs_x else [None] * count))
        return tuple(results)

    @staticmethod
    @_once
    def backward(ctx, *parts):
        x, *weights = ctx.saved_tensors
        count, needs = len(parts), ctx.needs_input_grad
        needs_x, needs_weights, needs_biases = needs[0], needs[5 : 5 + count], needs[5 + count :]
        sizes = [part.shape[1] for part in parts]
        dy = torch.cat(parts, 1)
        weight = torch.cat(weights) if needs_x else None
        # Of ranks with unequal parts GEMM-ReduceScatter takes as many columns as the first rank has.
        said = zip(ctx.columns, sizes, strict=True)
        most = sum(size if n == -1 else ctx.comm.features(n, 0).stop for n, size in said)
        dx, dweight = _column_parallel(ctx, x, weight, dy, most * ctx.comm.world_size, needs_x, any(needs_weights), most - sum(sizes))
        dweights = [None] * count if dweight is None else dweight.split(sizes)
        dbiases = [part.sum(0) if need else None for part, need in zip(parts, needs_biases, strict=True)]
        dweights = [part if need else None for part, need in zip(dweights, needs_weights, strict=True)]
        return dx, None, None, None, None, *dweights, *dbiases


def _column_parallel(ctx, x, weight, dy, n, needs_x, needs_weight, padding=0):
    """Gradients of ``x`` and ``weight``; GEMM-ReduceScatter takes ``n`` columns, with ``padding`` zeros behind this rank's."""
    if needs_weight and not ctx.kept:
        # Each collective runs beside the GEMM that does not need it, as in Megatron-LM. A fused
        # op beside NCCL's gather would hold the SMs that NCCL waits for.
        rows = Rows(dy.shape[0], ctx.comm)
        gathered = rows.gather(x)
        sums = dy @ weight if needs_x else None
        full = gathered()
        scattered = rows.scatter(sums) if needs_x else None
        dweight = dy.t() @ full
        return scattered() if needs_x else None, dweight
    dx = None
    if needs_x:
        part, weight = (F.pad(dy, (0, padding)), F.pad(weight, (0, 0, 0, padding))) if padding else (dy, weight)
        dx = call(calls["matmul_reduce_scatter"], part, weight.t(), None, None, n, 0, ctx.comm.id)
    return dx, dy.t() @ x if needs_weight else None


class MatmulReduceScatter(torch.autograd.Function):
    """``y = scatter(sum over ranks of x @ weight.T) + bias + residual``."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, k, partials, comm):
        ctx.save_for_backward(x, weight)
        ctx.k, ctx.comm = k, known(comm)
        return calls["matmul_reduce_scatter"](x, weight, bias, residual, k, partials, comm)

    @staticmethod
    @_once
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
        dresidual = dy if needs_residual else None
        dy, m = _readable(dy), x.shape[0]
        dx = full = None
        if needs_x and (needs_weight or needs_bias):
            dx, full = call(pair_calls["all_gather_matmul"], dy, weight.t(), None, 0, m, ctx.k, ctx.comm.id)
        elif needs_x:
            dx = call(calls["all_gather_matmul"], dy, weight.t(), None, 0, m, ctx.k, ctx.comm.id)
        elif needs_weight or needs_bias:
            full = Rows(m, ctx.comm).gather(dy)()
        dweight = full.t() @ x if needs_weight else None
        return dx, dweight, full.sum(0) if needs_bias else None, dresidual, None, None, None


class MatmulAllReduce(torch.autograd.Function):
    """``y = sum over ranks of x @ weight.T, + bias + residual``. Every rank has the same ``dy``, so nothing is sent back."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, k, partials, comm):
        ctx.save_for_backward(x, weight)
        return calls["matmul_all_reduce"](x, weight, bias, residual, k, partials, comm)

    @staticmethod
    @_once
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
        dx, dweight = dy @ weight if needs_x else None, dy.t() @ x if needs_weight else None
        return dx, dweight, dy.sum(0) if needs_bias else None, dy if needs_residual else None, None, None, None


class CopiedInputLinear(torch.autograd.Function):
    """``y = x @ weight.T + bias`` of an ``x`` that every rank has whole; the gradient of ``x`` is summed over the ranks."""

    @staticmethod
    def forward(ctx, x, weight, bias, n, comm):
        ctx.save_for_backward(x, weight)
        ctx.n, ctx.comm = n, known(comm)
        return F.linear(x, weight, bias)

    @staticmethod
    @_once
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = dy.reshape(-1, dy.shape[-1])
        dx = None
        if needs_x:
            dx = call(calls["matmul_all_reduce"], _readable(rows), weight.t(), None, None, ctx.n, 0, ctx.comm.id).reshape(x.shape)
        dweight = rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None
        return dx, dweight, rows.sum(0) if needs_bias else None, None, None
