"""Cases of gradients; see ``ranks``."""

from __future__ import annotations

import gc

import numpy as np
import torch
import torch.distributed as dist

import flux_tp
from cases_numpy import gathered, raises, row_parallel
from cases_torch import BF16, F16, init_distributed, numbers, tensors
from oracle import UNIT, close, operand, rows


def near(found, expected, scale):
    """Gradients are rounded twice, and sums of rounded partials are; ``scale``: what is added, in absolute value."""
    error = np.abs(numbers(found) - expected)
    bound = 4 * UNIT["bfloat16"] * (scale + np.abs(expected)) + 2.0**-10
    assert (error <= bound).all(), f"{error.max()} is above {bound.flat[error.argmax()]}"


def weights_need_torch_distributed(comm):
    if comm.world_size == 1 or dist.is_initialized():
        return
    *operands, _ = gathered(comm, comm.world_size * 8, 16, 32, dtype=np.float64)
    x, w, _ = tensors(F16, *operands)
    y = flux_tp.all_gather_matmul(x, w.requires_grad_())
    raises(flux_tp.FluxError, lambda: y.sum().backward(), "init_process_group")


def gradients(comm):
    """Gradients of both ops on every rank, against fp64."""
    init_distributed()
    world, rank = comm.world_size, comm.rank
    for m, n, k in ((world * 8, 16, 24), (world * 8 + 1, 8, 32)):
        own = rows(world, rank, m)
        x, w = operand(1, m, k), operand(2, world, n, k)
        dy = operand(3, world, m, n)
        X, W, B = tensors(BF16, x[own], w[rank], operand(4 + rank, n))
        for leaf in (X, W, B):
            leaf.requires_grad_()
        y = flux_tp.all_gather_matmul(X, W, B, m=m)
        y.backward(*tensors(BF16, dy[rank]))
        near(X.grad, np.einsum("pmn,pnk->mk", dy, w)[own], np.einsum("pmn,pnk->mk", np.abs(dy), np.abs(w))[own])
        near(W.grad, dy[rank].T @ x, np.abs(dy[rank]).T @ np.abs(x))
        near(B.grad, dy[rank].sum(0), np.abs(dy[rank]).sum(0))

        x, w, dy = operand(5, world, m, k), operand(6, world, n, k), operand(7, m, n)
        X, W, B = tensors(BF16, x[rank], w[rank], operand(8, n))
        for leaf in (X, W, B):
            leaf.requires_grad_()
        y = flux_tp.matmul_reduce_scatter(X, W, B)
        y.backward(*tensors(BF16, dy[own]))
        near(X.grad, dy @ w[rank], np.abs(dy) @ np.abs(w[rank]))
        near(W.grad, dy.T @ x[rank], np.abs(dy).T @ np.abs(x[rank]))
        near(B.grad, dy.sum(0), np.abs(dy).sum(0))

    m, n, k = 8, 16, 24
    x, w, dy = operand(9, world, m, k), operand(10, world, n, k), operand(11, m, n)
    X, W, B = tensors(BF16, x[rank], w[rank], operand(12, n))
    for leaf in (X, W, B):
        leaf.requires_grad_()
    flux_tp.matmul_all_reduce(X, W, B).backward(*tensors(BF16, dy))
    near(X.grad, dy @ w[rank], np.abs(dy) @ np.abs(w[rank]))
    near(W.grad, dy.T @ x[rank], np.abs(dy).T @ np.abs(x[rank]))
    near(B.grad, dy.sum(0), np.abs(dy).sum(0))


def gradients_of_random_shapes(comm):
    """Gradients of every op and of both ways through a column-parallel layer, for each choice of operands that need one."""
    init_distributed()
    world, rank = comm.world_size, comm.rank
    # The same on every rank.
    draw = np.random.default_rng(7)
    for turn in range(10):
        m, n, k = int(draw.integers(1, 90)), 8 * int(draw.integers(1, 9)), 8 * int(draw.integers(1, 9))
        needs = [bool(turn & 1), not turn & 1 or bool(turn & 2), bool(turn & 4)]
        own = rows(world, rank, m)

        def grads(op, leaves, dy, **options):
            leaves = tensors(BF16, *leaves)
            for leaf, need in zip(leaves, needs):
                leaf.requires_grad_(need)
            op(*leaves, **options).backward(*tensors(BF16, dy))
            assert [leaf.grad is not None for leaf in leaves] == needs
            return [leaf.grad for leaf in leaves]

        def compare(found, *wanted):
            for grad, (expected, scale) in zip(found, wanted):
                if grad is not None:
                    near(grad, expected, scale)

        x, w, dy, b = operand(20 + turn, m, k), operand(40 + turn, world, n, k), operand(60 + turn, world, m, n), operand(80 + turn, n)
        found = grads(flux_tp.all_gather_matmul, (x[own], w[rank], b), dy[rank], m=m)
        dx, scale = np.einsum("pmn,pnk->mk", dy, w)[own], np.einsum("pmn,pnk->mk", np.abs(dy), np.abs(w))[own]
        mine = dy[rank]
        compare(found, (dx, scale), (mine.T @ x, np.abs(mine).T @ np.abs(x)), (mine.sum(0), np.abs(mine).sum(0)))

        x, dy = operand(100 + turn, world, m, k)[rank], operand(120 + turn, m, n)
        wanted = (dy @ w[rank], np.abs(dy) @ np.abs(w[rank])), (dy.T @ x, np.abs(dy).T @ np.abs(x)), (dy.sum(0), np.abs(dy).sum(0))
        compare(grads(flux_tp.matmul_reduce_scatter, (x, w[rank], b), dy[own]), *wanted)
        compare(grads(flux_tp.matmul_all_reduce, (x, w[rank], b), dy), *wanted)


def gradients_with_frozen_weights(comm):
    """The gradient of the input alone, which the ops compute without torch.distributed."""
    world, rank, n, k = comm.world_size, comm.rank, 16, 24
    for m in (world * 8, world * 8 + 1):
        own = rows(world, rank, m)
        x, w, dy = operand(1, m, k), operand(2, world, n, k), operand(3, world, m, n)
        X, W = tensors(BF16, x[own], w[rank])
        flux_tp.all_gather_matmul(X.requires_grad_(), W, m=m).backward(*tensors(BF16, dy[rank]))
        near(X.grad, np.einsum("pmn,pnk->mk", dy, w)[own], np.einsum("pmn,pnk->mk", np.abs(dy), np.abs(w))[own])
        x, w, dy = operand(5, world, m, k), operand(6, world, n, k), operand(7, m, n)
        X, W = tensors(BF16, x[rank], w[rank])
        flux_tp.matmul_reduce_scatter(X.requires_grad_(), W).backward(*tensors(BF16, dy[own]))
        near(X.grad, dy @ w[rank], np.abs(dy) @ np.abs(w[rank]))


def a_communicator_lives_until_the_backward_pass(comm):
    """No one else holds it, and a call by its number fails in words once it is collected."""
    from flux_tp import _comm, _kernels

    inner = flux_tp.init(transport="host" if comm.device is None else "auto", max_m=64, device=comm.device)
    *operands, _ = gathered(comm, comm.world_size * 8, 16, 32, dtype=np.float64)
    x, w, _ = tensors(BF16, *operands)
    expected = x.clone().requires_grad_()
    flux_tp.all_gather_matmul(expected, w).sum().backward()
    x.requires_grad_()
    y, number = flux_tp.all_gather_matmul(x, w, group=inner), inner.id
    del inner
    gc.collect()
    y.sum().backward()
    assert torch.equal(x.grad, expected.grad)
    del y
    gc.collect()
    raises(flux_tp.FluxError, lambda: _comm.known(number), "call flux_tp.init again")
    raises(flux_tp.FluxError, lambda: _kernels.call(_kernels.calls["all_gather_matmul"], x, w, None, 0, -1, -1, number), "closed")


def gradients_of_a_residual(comm):
    """That of the result, whether or not another operand has one."""
    init_distributed()
    for op in (flux_tp.matmul_reduce_scatter, flux_tp.matmul_all_reduce):
        operands, y, sums = row_parallel(comm, op, comm.world_size * 8 + 1, 24, 40, np.float64)
        x, w, b, residual, gain = tensors(BF16, *operands)
        dy = torch.randn_like(residual)
        plain = w.clone().requires_grad_()
        op(x, plain, b).backward(dy)
        for leaves in ([residual], [residual, w]):
            for leaf in leaves:
                leaf.requires_grad_().grad = None
            found = op(x, w, b, residual)
            close(numbers(found), y, "bfloat16", sums)
            found.backward(dy)
            assert torch.equal(residual.grad, dy)
        assert torch.equal(w.grad, plain.grad)
        raises(flux_tp.OperandError, lambda: op(x, w, b, residual, (gain, 1e-3)), "norm= takes no part in autograd", "no_grad")
        with torch.no_grad():
            op(x, w, b, residual, (gain, 1e-3))


def an_activation_has_a_gradient(comm):
    init_distributed()
    *operands, _ = gathered(comm, comm.world_size * 8, 16, 32, dtype=np.float64)
    x, w, _ = tensors(BF16, *operands)
    fused = flux_tp.all_gather_matmul(x, w, activation="silu")
    y = flux_tp.all_gather_matmul(x, w.requires_grad_(), activation="silu")
    torch.testing.assert_close(y.detach(), fused)
    y.sum().backward()
    plain = flux_tp.all_gather_matmul(x, w.detach()).float().requires_grad_()
    torch.nn.functional.silu(plain).sum().backward()
    full = operand(1, comm.world_size * 8, 32)
    near(w.grad, numbers(plain.grad).T @ full, np.abs(numbers(plain.grad)).T @ np.abs(full))


def gates_have_gradients(comm):
    init_distributed()
    *operands, _ = gathered(comm, comm.world_size * 8, 32, 32, dtype=np.float64)
    x, w, _ = tensors(BF16, *operands)
    lead = x.reshape(4, 2, 32)
    for activation in ("swiglu", "geglu_interleaved"):
        fused = flux_tp.all_gather_matmul(lead, w, activation=activation)
        assert fused.shape == (comm.world_size * 4, 2, 16)
        weight = w.clone().requires_grad_()
        y = flux_tp.all_gather_matmul(lead, weight, activation=activation)
        # The product is rounded before its gates where a gradient is needed.
        torch.testing.assert_close(y.detach(), fused, rtol=0.03, atol=0.03)
        y.sum().backward()
        plain = flux_tp.all_gather_matmul(x, w).float().requires_grad_()
        gate, up = (plain[:, 0::2], plain[:, 1::2]) if "inter" in activation else plain.chunk(2, 1)
        act = (lambda v: torch.nn.functional.gelu(v, approximate="tanh")) if activation[0] == "g" else torch.nn.functional.silu
        (act(gate) * up).sum().backward()
        full = operand(1, comm.world_size * 8, 32)
        near(weight.grad, numbers(plain.grad).T @ full, np.abs(numbers(plain.grad)).T @ np.abs(full))
