"""Cases of gradients; see ``ranks``."""

from __future__ import annotations

import gc
from contextlib import ExitStack, nullcontext
from unittest import mock

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


def without_collectives():
    """A context in which every collective of torch.distributed that gradients could call is an error."""
    stack = ExitStack()
    stack.enter_context(mock.patch("flux_tp._rows._collectives", None))
    names = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all_single")
    for name in names:
        stack.enter_context(mock.patch.object(dist, name, side_effect=AssertionError(f"torch.distributed.{name} was called")))
    return stack


def saved_shapes(call):
    """The shapes of all that autograd saves."""
    shapes = []

    def save(tensor):
        shapes.append(tuple(tensor.shape))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        call()
    return shapes


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
        for keep in (False, True):
            X, W, B = tensors(BF16, x[own], w[rank], operand(4 + rank, n))
            for leaf in (X, W, B):
                leaf.requires_grad_()
            y = flux_tp.all_gather_matmul(X, W, B, m=m, keep_gathered=keep)
            with without_collectives() if keep else nullcontext():
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
        dx, scale = np.einsum("pmn,pnk->mk", dy, w)[own], np.einsum("pmn,pnk->mk", np.abs(dy), np.abs(w))[own]
        mine = dy[rank]
        wanted = (dx, scale), (mine.T @ x, np.abs(mine).T @ np.abs(x)), (mine.sum(0), np.abs(mine).sum(0))
        for keep in (False, True):
            with without_collectives() if keep else nullcontext():
                compare(grads(flux_tp.all_gather_matmul, (x[own], w[rank], b), mine, m=m, keep_gathered=keep), *wanted)

        x, dy = operand(100 + turn, world, m, k)[rank], operand(120 + turn, m, n)
        wanted = (dy @ w[rank], np.abs(dy) @ np.abs(w[rank])), (dy.T @ x, np.abs(dy).T @ np.abs(x)), (dy.sum(0), np.abs(dy).sum(0))
        compare(grads(flux_tp.matmul_reduce_scatter, (x, w[rank], b), dy[own]), *wanted)
        compare(grads(flux_tp.matmul_all_reduce, (x, w[rank], b), dy), *wanted)


def gradients_of_several_weights(comm):
    """For each choice of operands that need one, against fp64. Without that of a weight, or with kept rows, by ops alone."""
    init_distributed()
    world, rank, k = comm.world_size, comm.rank, 24
    for turn, (m, more) in enumerate(((world * 8, 0), (world * 4 + 1, 1), (3, world - 1))):
        columns = [8 * (2 * world + more), 8 * world, 8 * (world + more)]
        own, parts = rows(world, rank, m), [[comm.features(n, peer) for n in columns] for peer in range(world)]
        x, w = operand(1 + turn, m, k), [operand(10 + index, n, k) for index, n in enumerate(columns)]
        dy, b = [operand(20 + index, m, n) for index, n in enumerate(columns)], [operand(30 + index, n) for index, n in enumerate(columns)]
        # The parts of all ranks are whole weights.
        dx, scale = (sum(of(d) @ of(v) for d, v in zip(dy, w))[own] for of in (np.asarray, np.abs))
        for needs in ("x", "xw", "w", "b", "xwb", "xw1", "w1", "b1"):
            for keep in (False, True):
                X, *W = tensors(BF16, x[own], *(v[part] for v, part in zip(w, parts[rank])))
                B = tensors(BF16, *(v[part] for v, part in zip(b, parts[rank])))
                some = slice(1, 2) if needs.endswith("1") else slice(None)
                leaves = [*([X] if "x" in needs else []), *(W[some] if "w" in needs else []), *(B[some] if "b" in needs else [])]
                for leaf in leaves:
                    leaf.requires_grad_()
                results = []
                given = {"n": columns} if more else {}
                shapes = saved_shapes(lambda: results.extend(flux_tp.all_gather_matmul(X, W, B, m=m, keep_gathered=keep, **given)))
                held = [m if keep else own.stop - own.start] if "w" in needs else []
                assert shapes[: len(held)] == [(rows, k) for rows in held] and len(shapes) == len(held) + 3 * ("x" in needs), (needs, shapes)
                dys = tensors(BF16, *(np.ascontiguousarray(d[:, part]) for d, part in zip(dy, parts[rank])))
                with without_collectives() if keep or "w" not in needs else nullcontext():
                    torch.autograd.backward(results, dys)
                if "x" in needs:
                    near(X.grad, dx, scale)
                for leaf, bias, d, part in zip(W, B, dy, parts[rank]):
                    mine = d[:, part]
                    if leaf.requires_grad:
                        near(leaf.grad, mine.T @ x, np.abs(mine).T @ np.abs(x))
                    if bias.requires_grad:
                        near(bias.grad, mine.sum(0), np.abs(mine).sum(0))
                assert all((leaf.grad is not None) == leaf.requires_grad for leaf in (X, *W, *B))
    # A result that is not used has no gradient to give; an activation runs apart.
    first = W[0].detach().requires_grad_()
    flux_tp.all_gather_matmul(X.detach(), [first, W[1]], activation="relu", m=m, n=columns[:2])[0].sum().backward()
    alone = W[0].detach().clone().requires_grad_()
    flux_tp.all_gather_matmul(X.detach(), alone, activation="relu", m=m, n=columns[0]).sum().backward()
    assert torch.equal(first.grad, alone.grad)


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


    gathered_rows_are_kept_for_weights_alone(comm)


def gathered_rows_are_kept_for_weights_alone(comm):
    """With ``keep_gathered`` a step needs no torch.distributed; only the gradient of a weight keeps rows."""
    world, rank, n, k = comm.world_size, comm.rank, 16, 24
    m = world * 8 + 1
    own = rows(world, rank, m)
    x, w, dy = operand(1, m, k), operand(2, world, n, k), operand(3, world, m, n)
    shard, whole = (own.stop - own.start, k), (m, k)
    for needs in ("x", "b", "xb", "w", "xwb"):
        for keep in (False, True):
            leaves = dict(zip("xwb", tensors(BF16, x[own], w[rank], operand(4, n))))
            for name in needs:
                leaves[name].requires_grad_()
            results = []
            shapes = saved_shapes(lambda: results.append(flux_tp.all_gather_matmul(*leaves.values(), m=m, keep_gathered=keep)))
            # One rank's shard is the whole.
            held = [shape for shape in shapes if shape in (shard, whole)]
            assert held == ([whole if keep else shard] if "w" in needs else []), (needs, keep, shapes)
            if "w" not in needs or keep:
                with without_collectives():
                    results[0].backward(*tensors(BF16, dy[rank]))
                if "x" in needs:
                    near(leaves["x"].grad, np.einsum("pmn,pnk->mk", dy, w)[own], np.einsum("pmn,pnk->mk", np.abs(dy), np.abs(w))[own])
                if "w" in needs:
                    near(leaves["w"].grad, dy[rank].T @ x, np.abs(dy[rank]).T @ np.abs(x))
                if "b" in needs:
                    near(leaves["b"].grad, dy[rank].sum(0), np.abs(dy[rank]).sum(0))
    # Under no_grad nothing is kept, and both results come.
    with torch.no_grad():
        y, x_full = flux_tp.all_gather_matmul(*tensors(BF16, x[own], w[rank]), m=m, keep_gathered=True, return_gathered=True)
    assert np.array_equal(numbers(x_full), x) and y.shape == (m, n)


def a_communicator_lives_until_the_backward_pass(comm):
    """No one else holds it, and a call by its number fails in words once it is collected."""
    inner = flux_tp.init(transport="host" if comm.device is None else "auto", max_m=64, device=comm.device)
    *operands, _ = gathered(comm, comm.world_size * 8, 16, 32, dtype=np.float64)
    x, w, _ = tensors(BF16, *operands)
    expected = x.clone().requires_grad_()
    flux_tp.all_gather_matmul(expected, w).sum().backward()
    x.requires_grad_()
    y, number = flux_tp.all_gather_matmul(x, w, group=inner), inner.id
    out = y.detach().clone()
    del inner
    gc.collect()
    y.sum().backward()
    assert torch.equal(x.grad, expected.grad)
    del y
    gc.collect()
    call = lambda: torch.ops.flux_tp.all_gather_matmul(x, [w], *[None] * 6, 0, 0, len(out), None, 0, 0, 0, False, number, [out], None, None)
    with torch.no_grad():
        raises(RuntimeError, call, "the communicator is closed: call flux_tp.init again")


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


def gradients_of_a_norm(comm):
    """Of a result and its normalised rows, both of which go on: those of torch's norm behind the op, in fp32."""
    init_distributed()
    for op in (flux_tp.matmul_reduce_scatter, flux_tp.matmul_all_reduce):
        operands, _, _ = row_parallel(comm, op, comm.world_size * 8 + 1, 24, 40, np.float64)
        x, w, b, residual, gain = tensors(BF16, *operands)
        dy, dnorm = torch.randn_like(residual), torch.randn_like(residual)
        with torch.no_grad():
            fused = op(x, w, b, residual, (gain, 1e-3))
        leaves = [leaf.requires_grad_() for leaf in (x, w, b, residual, gain)]
        found = op(*leaves[:4], (gain, 1e-3))
        assert torch.equal(found[0], fused[0])
        torch.testing.assert_close(found[1], fused[1], rtol=2 * UNIT["bfloat16"], atol=0)
        torch.autograd.backward(found, (dy, dnorm))
        y, exact = fused[0].float().requires_grad_(), gain.detach().float().requires_grad_()
        torch.nn.functional.rms_norm(y, y.shape[1:], exact, 1e-3).backward(dnorm.float())
        through = numbers(dy) + numbers(y.grad)
        near(residual.grad, through, np.abs(numbers(dy)) + np.abs(numbers(y.grad)))
        plain = torch.nn.functional.rms_norm(y, y.shape[1:], eps=1e-3)
        near(gain.grad, numbers(exact.grad), np.abs(numbers(dnorm) * numbers(plain)).sum(0))
        # What the op itself hands on is that of the sum.
        sums = [leaf.detach().clone().requires_grad_() for leaf in leaves[:4]]
        op(*sums).backward(residual.grad)
        for leaf, other in zip(leaves[:3], sums[:3], strict=True):
            assert torch.equal(leaf.grad, other.grad)


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

def gates_of_unequal_parts_have_gradients(comm):
    """A rank has 8 gates and ups more than another: values and gradients are those of gates and ups apart."""
    init_distributed()
    half, m = 16 * comm.world_size + 8, comm.world_size * 8
    part = comm.features(half)
    x, gates, ups = tensors(BF16, operand(1, m, 32)[rows(comm.world_size, comm.rank, m)], operand(2, half, 32)[part], operand(3, half, 32)[part])
    biases = tensors(BF16, operand(4, half)[part], operand(5, half)[part])
    for activation in ("swiglu", "swiglu_interleaved"):
        of = (lambda pair: torch.stack(pair, 1).flatten(0, 1)) if activation.endswith("interleaved") else torch.cat
        whole, bias = of((gates, ups)), of(tuple(biases))
        X, weight = x.clone().requires_grad_(), whole.clone().requires_grad_()
        y = flux_tp.all_gather_matmul(X, weight, bias, activation=activation, n=2 * half)
        y.sum().backward()
        apart = [t.clone().requires_grad_() for t in (x, gates, ups)]
        gate, up = flux_tp.all_gather_matmul(apart[0], apart[1:], biases, n=[half, half])
        plain = torch.nn.functional.silu(gate) * up
        plain.sum().backward()
        assert torch.equal(y, plain) and torch.equal(X.grad, apart[0].grad)
        found = weight.grad.unflatten(0, (-1, 2)).unbind(1) if activation.endswith("interleaved") else weight.grad.chunk(2)
        assert all(map(torch.equal, found, (apart[1].grad, apart[2].grad)))
        with torch.no_grad():
            fused = flux_tp.all_gather_matmul(x, whole, bias, activation=activation, n=2 * half)
        # The product is rounded before its gates where a gradient is needed.
        torch.testing.assert_close(y.detach(), fused, rtol=0.03, atol=0.03)
