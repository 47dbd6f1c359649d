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

from ._kernels import call
from ._rows import Rows

__all__ = ["AllGatherMatmul", "CopiedInputLinear", "MatmulAllReduce", "MatmulReduceScatter"]


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
    """``y = gather(x) @ weight.T + bias`` of each of ``count`` weights, by one gather.

    With ``keep`` the gathered rows are saved in place of ``x`` where the gradient of a weight needs them, and the backward
    pass has no collective of torch.distributed. The backward pass of several weights is that of one with the rows of all: copies
    of the weights beside each other, for one collective. Where one of them needs a gradient, those of all are computed.
    """

    @staticmethod
    def forward(ctx, x, m, split, comm, keep, count, *operands):
        weights, biases = list(operands[:count]), list(operands[count:])
        added = {"bias": biases} if biases else {}
        ctx.split, ctx.comm, ctx.count = split, comm, count
        needs_x, needs_weight = ctx.needs_input_grad[0], any(ctx.needs_input_grad[6 : 6 + count])
        # A single rank's rows are all rows: the gathered ones would be a copy.
        ctx.kept = keep and needs_weight and comm.world_size > 1
        *ys, last = call("all_gather_matmul", comm, x, weights, added, m=m, split=split, second="x_full" if ctx.kept else None)
        ys, saved = (ys, last) if ctx.kept else ([*ys, last], x)
        ctx.save_for_backward(saved if needs_weight else None, *(weights if needs_x else ()))
        return tuple(ys)

    @staticmethod
    @_once
    def backward(ctx, *parts):
        (x, *weights), count, needs = ctx.saved_tensors, ctx.count, ctx.needs_input_grad
        needs_x, needs_weights, needs_biases = needs[0], needs[6 : 6 + count], needs[6 + count :]
        sizes = [part.shape[1] for part in parts]
        weight = _beside(weights, 0) if needs_x else None
        dy, n, padding = _readable(_beside(parts, 1)), ctx.split, 0
        if n is not None and count > 1:
            # With unequal parts GEMM-ReduceScatter takes as many columns as the first rank has.
            most = sum(ctx.comm.features(of, 0).stop for of in n)
            n, padding = [most * ctx.comm.world_size], most - sum(sizes)
        dx, dweight = _column_parallel(ctx, x, weight, dy, n, needs_x, any(needs_weights), padding)
        dweights = [None] * count if dweight is None else dweight.split(sizes)
        dweights = [part if need else None for part, need in zip(dweights, needs_weights, strict=True)]
        dbiases = [part.sum(0) if need else None for part, need in zip(parts, needs_biases)]
        return dx, None, None, None, None, None, *dweights, *dbiases


def _beside(parts, dim):
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _column_parallel(ctx, x, weight, dy, n, needs_x, needs_weight, padding=0):
    """Gradients of ``x`` and ``weight``; GEMM-ReduceScatter takes columns of ``n``, with ``padding`` zeros behind this rank's."""
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
        dx = call("matmul_reduce_scatter", ctx.comm, part, [weight.t()], {}, split=n)[0]
    return dx, dy.t() @ x if needs_weight else None


class MatmulReduceScatter(torch.autograd.Function):
    """``y = scatter(sum over ranks of x @ weight.T) + bias + residual``."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, k, partials, comm):
        ctx.save_for_backward(x, weight)
        ctx.k, ctx.comm = k, comm
        return _row_parallel("matmul_reduce_scatter", x, weight, bias, residual, k, partials, comm)

    @staticmethod
    @_once
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
        dresidual = dy if needs_residual else None
        dy, m, gathered = _readable(dy), x.shape[0], needs_weight or needs_bias
        dx = full = None
        if needs_x:
            split, second = ctx.k and [ctx.k], "x_full" if gathered else None
            dx, *others = call("all_gather_matmul", ctx.comm, dy, [weight.t()], {}, m=m, split=split, second=second)
            full = others[0] if gathered else None
        elif gathered:
            full = Rows(m, ctx.comm).gather(dy)()
        dweight = full.t() @ x if needs_weight else None
        return dx, dweight, full.sum(0) if needs_bias else None, dresidual, None, None, None


class MatmulAllReduce(torch.autograd.Function):
    """``y = sum over ranks of x @ weight.T, + bias + residual``. Every rank has the same ``dy``, so nothing is sent back."""

    @staticmethod
    def forward(ctx, x, weight, bias, residual, k, partials, comm):
        ctx.save_for_backward(x, weight)
        return _row_parallel("matmul_all_reduce", x, weight, bias, residual, k, partials, comm)

    @staticmethod
    @_once
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, needs_residual = ctx.needs_input_grad[:4]
        dx, dweight = dy @ weight if needs_x else None, dy.t() @ x if needs_weight else None
        return dx, dweight, dy.sum(0) if needs_bias else None, dy if needs_residual else None, None, None, None


def _row_parallel(op, x, weight, bias, residual, k, partials, comm):
    added = {} if bias is None else {"bias": [bias]}
    if residual is not None:
        added["residual"] = residual
    return call(op, comm, x, [weight], added, split=k and [k], partials=partials)[0]


class CopiedInputLinear(torch.autograd.Function):
    """``y = x @ weight.T + bias`` of an ``x`` that every rank has whole; the gradient of ``x`` is summed over the ranks."""

    @staticmethod
    def forward(ctx, x, weight, bias, n, comm):
        ctx.save_for_backward(x, weight)
        ctx.n, ctx.comm = n, comm
        return F.linear(x, weight, bias)

    @staticmethod
    @_once
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        rows = dy.reshape(-1, dy.shape[-1])
        dx = None
        if needs_x:
            dx = call("matmul_all_reduce", ctx.comm, _readable(rows), [weight.t()], {}, split=[ctx.n])[0].reshape(x.shape)
        dweight = rows.t() @ x.reshape(-1, x.shape[-1]) if needs_weight else None
        return dx, dweight, rows.sum(0) if needs_bias else None, None, None
