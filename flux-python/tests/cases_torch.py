"""Cases with tensors of PyTorch on the communicator's device; see ``ranks``."""

from __future__ import annotations

import copy
import threading
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

import flux_tp
from cases_numpy import gathered, raises, row_parallel, scattered
from oracle import UNIT, close, operand, rms_norm, rows

BF16, F16 = torch.bfloat16, torch.float16
NAMES = {BF16: "bfloat16", F16: "float16"}


def place():
    """The device of the operands."""
    device = flux_tp.default().device
    return torch.device("cpu") if device is None else torch.device("cuda", device)


def tensors(dtype, *arrays):
    return [None if array is None else torch.from_numpy(array).to(place(), dtype) for array in arrays]


def numbers(tensor):
    """The values of a result, once they are valid."""
    values = tensor.detach().double().cpu().numpy()
    flux_tp.check()
    return values


def all_gather(comm):
    for dtype in (BF16, F16):
        for m, bias, activation in ((comm.world_size * 8, False, None), (comm.world_size * 40, True, "gelu")):
            *operands, y = gathered(comm, m, 24, 48, bias, activation, np.float64)
            x, w, b = tensors(dtype, *operands)
            found = flux_tp.all_gather_matmul(x, w, b, activation)
            assert found.dtype == dtype
            close(numbers(found), y, NAMES[dtype], slope=4.0)


def all_gather_and_gathered_rows(comm):
    for dtype in (BF16, F16):
        for m in (comm.world_size * 8, 0, comm.world_size * 40 + 1, 1):
            *operands, y = gathered(comm, m, 24, 48, True, None, np.float64)
            x, w, b = tensors(dtype, *operands)
            found, x_full = flux_tp.all_gather_matmul(x, w, b, return_gathered=True, m=m)
            close(numbers(found), y, NAMES[dtype])
            assert x_full.dtype == dtype and np.array_equal(numbers(x_full), operand(1, m, 48))
            results = torch.empty_like(found), x_full.new_empty(m, 56)[:, :48]
            assert flux_tp.all_gather_matmul(x, w, b, return_gathered=True, m=m, out=results) is results
            assert all(map(torch.equal, results, (found, x_full)))
    *operands, y = gathered(comm, comm.world_size * 8, 16, 32, dtype=np.float64)
    x, w, _ = tensors(F16, *operands)
    found, x_full = flux_tp.all_gather_matmul(x.reshape(4, 2, 32), w, return_gathered=True)
    assert found.shape[:2] == x_full.shape[:2] == (4 * comm.world_size, 2)
    bad, call = flux_tp.OperandError, flux_tp.all_gather_matmul
    raises(bad, lambda: call(x, w, return_gathered=True, out=found), "out is a Tensor", "(y, x_full)")
    outs = torch.empty_like(found.reshape(-1, 16)), x_full.reshape(-1, 32)[1:]
    raises(bad, lambda: call(x, w, return_gathered=True, out=outs), "x_full is")
    outs = outs[0], torch.empty_like(x_full.reshape(-1, 32), dtype=BF16)
    raises(bad, lambda: call(x, w, return_gathered=True, out=outs), "x_full", "bf16")
    raises(bad, lambda: call(x, w.clone().requires_grad_(), return_gathered=True), "return_gathered=", "no_grad")
    close(numbers(call(x, w)), y, "float16")


def transposed_weights(comm):
    """A transposed view is read as it is stored."""
    *operands, y = gathered(comm, comm.world_size * 8, 16, 32, dtype=np.float64)
    x, w, _ = tensors(F16, *operands)
    close(numbers(flux_tp.all_gather_matmul(x, w.t().contiguous().t())), y, "float16")
    *operands, y, sums = scattered(comm, comm.world_size * 8 + 1, 24, 40, dtype=np.float64)
    x, w, _ = tensors(F16, *operands)
    close(numbers(flux_tp.matmul_reduce_scatter(x, w.t().contiguous().t())), y, "float16", sums)


def reduce_scatter(comm):
    for dtype in (BF16, F16):
        for m, bias in ((comm.world_size * 8, False), (comm.world_size * 40 + 1, True)):
            *operands, y, sums = scattered(comm, m, 24, 40, bias, np.float64)
            x, w, b = tensors(dtype, *operands)
            close(numbers(flux_tp.matmul_reduce_scatter(x, w, b)), y, NAMES[dtype], sums)


def residual_and_norm(comm):
    for op in (flux_tp.matmul_reduce_scatter, flux_tp.matmul_all_reduce):
        for dtype, m in ((BF16, 1), (F16, comm.world_size * 8), (BF16, comm.world_size * 40 + 1)):
            operands, y, sums = row_parallel(comm, op, m, 24, 40, np.float64)
            x, w, b, residual, gain = tensors(dtype, *operands)
            close(numbers(op(x, w, b, residual)), y, NAMES[dtype], sums)
            results = op(x, w, b, residual, (gain, 1e-3))
            found, normalised = map(numbers, results)
            close(found, y, NAMES[dtype], sums)
            close(normalised, rms_norm(found, operands[4], 1e-3), NAMES[dtype], slope=4.0)
            in_place = residual.clone(), torch.empty_like(residual)
            assert op(x, w, b, in_place[0], (gain, 1e-3), out=in_place) is in_place
            assert all(map(torch.equal, in_place, results)), "out may hold the residual"
            op(x, w, b, residual, out=residual)
            assert torch.equal(residual, results[0])
        operands, y, sums = row_parallel(comm, op, comm.world_size * 8, 24, 40, np.float64)
        x, w, b, residual, gain = tensors(F16, *operands)
        residual = residual.reshape(-1, 2, 24)
        found, normalised = op(x.reshape(-1, 2, 40), w, b, residual, (gain, 1e-3))
        assert found.shape == normalised.shape == residual.shape
        close(numbers(found).reshape(-1, 24), y, "float16", sums)


def residual_and_norm_that_do_not_fit(comm):
    bad, op = flux_tp.OperandError, flux_tp.matmul_all_reduce
    operands, y, sums = row_parallel(comm, op, 8, 24, 40, np.float64)
    x, w, b, residual, gain = tensors(BF16, *operands)
    raises(bad, lambda: op(x, w, b, residual[:, :16]), "residual is [8, 16]", "[8, 24]")
    raises(bad, lambda: op(x, w, b, residual.to(F16)), "residual", "f16")
    raises(bad, lambda: op(x, w, b, residual.to("meta")), "residual is on meta", "move it")
    raises(bad, lambda: op(x, w, b, operands[3]), "residual is a ndarray")
    raises(bad, lambda: op(x, w, norm=(gain[:8], 1e-3)), "gain is [1, 8]", "[1, 24]")
    raises(bad, lambda: op(x, w, norm=(gain.to("meta"), 1e-3)), "gain is on meta", "move it")
    raises(bad, lambda: op(x, w, norm=(gain, float("inf"))), "rms_norm(inf)")
    raises(bad, lambda: op(x, w, norm=gain), "norm is a Tensor", "(gain, eps)")
    raises(bad, lambda: op(x, w, norm=(gain, 1e-3), out=residual), "out is a Tensor", "(y, y_norm)")
    raises(bad, lambda: op(x, w, b, residual, (gain, 1e-3), out=(torch.empty_like(residual), residual)), "overlaps residual")
    raises(bad, lambda: op(x, w, norm=(gain.clone().requires_grad_(), 1e-3)), "norm=", "no_grad")
    close(numbers(op(x, w, b, residual)), y, "bfloat16", sums)


def uneven_rows_and_more_dimensions(comm):
    m = comm.world_size * 4 + 1
    *operands, y = gathered(comm, m, 16, 32, dtype=np.float64)
    x, w, _ = tensors(F16, *operands)
    close(numbers(flux_tp.all_gather_matmul(x, w, m=m)), y, "float16")
    *operands, y = gathered(comm, comm.world_size * 8, 16, 32, dtype=np.float64)
    x, w, _ = tensors(F16, *operands)
    found = flux_tp.all_gather_matmul(x.reshape(4, 2, 32), w)
    assert found.shape == (4 * comm.world_size, 2, 16)
    close(numbers(found).reshape(-1, 16), y, "float16")


def out(comm):
    *operands, y = gathered(comm, comm.world_size * 8, 16, 32, dtype=np.float64)
    x, w, _ = tensors(F16, *operands)
    result = torch.empty(y.shape, dtype=F16, device=place())
    assert flux_tp.all_gather_matmul(x, w, out=result) is result
    close(numbers(result), y, "float16")
    raises(flux_tp.OperandError, lambda: flux_tp.all_gather_matmul(x.requires_grad_(), w, out=result), "out=", "no_grad")
    with torch.no_grad():
        flux_tp.all_gather_matmul(x, w, out=result)


def errors_keep_their_class(comm):
    *operands, y = gathered(comm, comm.world_size * 8, 16, 32, dtype=np.float64)
    x, w, _ = tensors(F16, *operands)
    call, bad = flux_tp.all_gather_matmul, flux_tp.OperandError
    raises(bad, lambda: call(x.float(), w.float()), "x: its dtype", "torch.bfloat16")
    raises(bad, lambda: call(x, w.to(BF16)), "weight", "bf16")
    raises(bad, lambda: call(x, w.repeat(1, 2)[:, ::2]), "weight", ".contiguous()")
    raises(bad, lambda: call(x[:, :24], w), "x is [8, 24]")
    raises(bad, lambda: call(x[0], w), "x has 1 dimensions")
    raises(bad, lambda: call(x, w.to("meta")), "weight is on meta", "move it")
    if comm.world_size > 1:
        # A shape that no rank has built.
        wide = torch.zeros(16 + 8 * (comm.rank == 0), 56, dtype=F16, device=place())
        raises(flux_tp.DisagreedError, lambda: call(torch.zeros(8, 56, dtype=F16, device=place()), wide))
    close(numbers(call(x, w)), y, "float16")


def others_run_while_a_rank_waits(comm):
    all_gather(comm)
    if comm.rank == 0:
        time.sleep(0.5)
        return all_gather(comm)
    steps, ended = 0, threading.Event()

    def count():
        nonlocal steps
        while not ended.wait(0.01):
            steps += 1

    counter = threading.Thread(target=count)
    counter.start()
    all_gather(comm)
    ended.set()
    counter.join()
    assert steps > 5, steps


def schemas_and_fakes(comm):
    *operands, _ = gathered(comm, comm.world_size * 8, 16, 32, True, dtype=np.float64)
    x, w, b = tensors(F16, *operands)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.flux_tp.all_gather_matmul.default, (x, w, b, 0, -1, -1, comm.id), test_utils=checks)
    torch.library.opcheck(torch.ops.flux_tp.all_gather_matmul.gathered, (x, w, b, 0, -1, -1, comm.id), test_utils=checks)
    m = x.shape[0] * comm.world_size
    outs = {"out": x.new_empty(m, w.shape[0]), "x_full": x.new_empty(m, x.shape[1])}
    torch.library.opcheck(torch.ops.flux_tp.all_gather_matmul.gathered_out, (x, w, b, 0, -1, -1, comm.id), outs, test_utils=checks)
    *operands, _, _ = scattered(comm, comm.world_size * 8, 16, 32, dtype=np.float64)
    x, w, _ = tensors(F16, *operands)
    torch.library.opcheck(torch.ops.flux_tp.matmul_reduce_scatter.default, (x, w, None, None, -1, 0, comm.id), test_utils=checks)
    for name in ("matmul_reduce_scatter", "matmul_all_reduce"):
        operands, _, _ = row_parallel(comm, getattr(flux_tp, name), comm.world_size * 8 + 1, 16, 32, np.float64)
        x, w, b, residual, gain = tensors(F16, *operands)
        packet, out = getattr(torch.ops.flux_tp, name), torch.empty_like(residual)
        torch.library.opcheck(packet.default, (x, w, b, residual, -1, 1, comm.id), test_utils=checks)
        torch.library.opcheck(packet.norm, (x, w, b, residual, gain, 1e-3, -1, 1, comm.id), test_utils=checks)
        torch.library.opcheck(packet.out, (x, w, b, residual, -1, 1, comm.id), {"out": out}, test_utils=checks)
        outs = {"out": out, "out_norm": torch.empty_like(out)}
        torch.library.opcheck(packet.norm_out, (x, w, b, residual, gain, 1e-3, -1, 1, comm.id), outs, test_utils=checks)


def compiled(comm):
    def mlp(x, up, down):
        return flux_tp.matmul_reduce_scatter(flux_tp.all_gather_matmul(x, up, activation="relu") * 2, down)

    m = comm.world_size * 8
    x = operand(1, m, 32)[rows(comm.world_size, comm.rank, m)]
    x, up, down = tensors(F16, x, operand(2 + comm.rank, 16, 32), operand(20 + comm.rank, 24, 16))
    with torch.no_grad():
        expected = mlp(x, up, down)
        # On the CPU the graph as inductor gets it: its C++ is not what is tested here.
        found = torch.compile(mlp, fullgraph=True, backend="inductor" if x.is_cuda else "aot_eager")(x, up, down)
    assert torch.equal(found, expected)

    def gathers(x, up, down):
        y, x_full = flux_tp.all_gather_matmul(x, up, return_gathered=True)
        return flux_tp.matmul_reduce_scatter(y, down.t().contiguous().t()), x_full * 2

    with torch.no_grad():
        expected = gathers(x, up, down)
        found = torch.compile(gathers, fullgraph=True, backend="inductor" if x.is_cuda else "aot_eager")(x, up, down)
    assert all(map(torch.equal, found, expected))

    def block(op, x, w, b, residual, gain):
        y, y_norm = op(x * 2, w, b, residual, (gain, 1e-3))
        return op(x, w, residual=y), y_norm + 1

    for op in (flux_tp.matmul_reduce_scatter, flux_tp.matmul_all_reduce):
        operands, _, _ = row_parallel(comm, op, m, 24, 40, np.float64)
        operands = tensors(F16, *operands)
        with torch.no_grad():
            expected = block(op, *operands)
            found = torch.compile(block, fullgraph=True, backend="inductor" if x.is_cuda else "aot_eager")(op, *operands)
        assert all(map(torch.equal, found, expected))


def init_distributed():
    if not dist.is_initialized():
        dist.init_process_group("gloo" if place().type == "cpu" else "nccl", timeout=timedelta(minutes=2))


def weights_need_torch_distributed(comm):
    if comm.world_size == 1 or dist.is_initialized():
        return
    *operands, _ = gathered(comm, comm.world_size * 8, 16, 32, dtype=np.float64)
    x, w, _ = tensors(F16, *operands)
    y = flux_tp.all_gather_matmul(x, w.requires_grad_())
    raises(flux_tp.FluxError, lambda: y.sum().backward(), "init_process_group")


def near(found, expected, scale):
    """Gradients are rounded twice, and sums of rounded partials are; ``scale``: what is added, in absolute value."""
    error = np.abs(numbers(found) - expected)
    bound = 4 * UNIT["bfloat16"] * (scale + np.abs(expected)) + 2.0**-10
    assert (error <= bound).all(), f"{error.max()} is above {bound.flat[error.argmax()]}"


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


def gates_compile(comm):
    *operands, _ = gathered(comm, comm.world_size * 8, 32, 32, dtype=np.float64)
    x, w, _ = tensors(BF16, *operands)
    eager = flux_tp.all_gather_matmul(x, w, activation="swiglu")
    compiled = torch.compile(lambda x, w: flux_tp.all_gather_matmul(x, w, activation="swiglu") * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, w), eager * 2)


def modules(comm):
    """An MLP of both modules: shapes, state dicts, one step that lowers the loss."""
    init_distributed()
    torch.manual_seed(comm.rank)
    up = flux_tp.ColumnParallelLinear(32, 16 * comm.world_size, activation="gelu")
    down = flux_tp.RowParallelLinear(16 * comm.world_size, 24, partials="float32")
    assert up.weight.shape == (16, 32) and down.weight.shape == (24, 16)
    assert list(up.state_dict()) == ["weight", "bias", "_extra_state"]
    other = copy.deepcopy(up.state_dict())
    up.load_state_dict(other, strict=True)
    raises(flux_tp.OperandError, lambda: flux_tp.ColumnParallelLinear(32, 16 * comm.world_size + 4), "out_features", "pad them to")
    raises(flux_tp.OperandError, lambda: flux_tp.RowParallelLinear(16 * comm.world_size, 24, partials="bfloat16"), "give 'float32'")
    m = comm.world_size * 4
    own = rows(comm.world_size, comm.rank, m)
    x, goal = tensors(BF16, operand(1, m, 2, 32)[own], operand(2, m, 2, 24)[own])
    parameters = [*up.parameters(), *down.parameters()]

    def loss():
        y = down(up(x))
        assert y.shape == goal.shape
        return ((y - goal).float() ** 2).mean()

    def total():
        sum_of_all = loss().detach().clone()
        dist.all_reduce(sum_of_all)
        return sum_of_all.item()

    before = total()
    loss().backward()
    with torch.no_grad():
        for parameter in parameters:
            parameter -= 0.5 * parameter.grad
    assert total() < before, (total(), before)


def modules_without_sequence_parallelism(comm):
    """The same MLP by whole inputs and outputs: values and gradients against fp64."""
    world, rank, m = comm.world_size, comm.rank, 6
    up = flux_tp.ColumnParallelLinear(32, 16 * world, activation="relu", sequence_parallel=False)
    down = flux_tp.RowParallelLinear(16 * world, 24, sequence_parallel=False, partials="float32")
    w1, w2, x, dy = operand(1, world, 16, 32), operand(2, world, 24, 16), operand(3, m, 32), operand(4, m, 24)
    for module, weight in ((up, w1), (down, w2)):
        module.load_state_dict({"weight": torch.from_numpy(weight[rank]), "bias": torch.zeros_like(module.bias), "_extra_state": None})
    X = tensors(BF16, x)[0].requires_grad_()
    y = down(up(X.reshape(2, 3, 32))).reshape(m, 24)
    hidden = np.einsum("mk,pnk->pmn", x, w1)
    active = np.maximum(hidden, 0)
    near(y, np.einsum("pmn,pkn->mk", active, w2), np.einsum("pmn,pkn->mk", active, np.abs(w2)))
    y.backward(*tensors(BF16, dy))
    back = np.einsum("mk,pkn->pmn", dy, w2) * (hidden > 0)
    scale = np.einsum("mk,pkn->pmn", np.abs(dy), np.abs(w2)) * (hidden > 0)
    near(X.grad, np.einsum("pmn,pnk->mk", back, w1), np.einsum("pmn,pnk->mk", scale, np.abs(w1)))
    near(up.weight.grad, back[rank].T @ x, scale[rank].T @ np.abs(x))
    near(down.weight.grad, dy.T @ active[rank], np.abs(dy).T @ active[rank])


def modules_of_unequal_parts(comm):
    """An MLP whose inner features do not divide, with and without sequence parallelism: values and gradients against fp64."""
    init_distributed()
    world, rank, m, inner = comm.world_size, comm.rank, 3 * comm.world_size + 1, 16 * comm.world_size + 8
    w1, w2, x, dy = operand(1, inner, 32), operand(2, 24, inner), operand(3, m, 32), operand(4, m, 24)
    hidden = np.maximum(x @ w1.T, 0)
    back, scale = (dy @ w2) * (hidden > 0), (np.abs(dy) @ np.abs(w2)) * (hidden > 0)
    part = comm.features(inner)
    for whole in (True, False):
        up = flux_tp.ColumnParallelLinear(32, inner, activation="relu", sequence_parallel=not whole)
        down = flux_tp.RowParallelLinear(inner, 24, sequence_parallel=not whole)
        for module, weight in ((up, w1[part]), (down, w2[:, part])):
            module.load_state_dict({"weight": torch.from_numpy(weight), "bias": torch.zeros_like(module.bias), "_extra_state": None})
        own = slice(m) if whole else rows(world, rank, m)
        X = tensors(BF16, x[own])[0].requires_grad_()
        # Rows of all ranks are not a multiple of those of one.
        h = up(X) if whole else torch.relu(flux_tp.all_gather_matmul(X, up.weight, up.bias, m=m, n=inner))
        assert h.shape == (m, part.stop - part.start)
        y = down(h)
        near(y, (hidden @ w2.T)[own], (hidden @ np.abs(w2).T)[own])
        y.backward(*tensors(BF16, dy[own]))
        near(X.grad, (back @ w1)[own], (scale @ np.abs(w1))[own])
        near(up.weight.grad, (back.T @ x)[part], (scale.T @ np.abs(x))[part])
        near(down.weight.grad, (dy.T @ hidden)[:, part], (np.abs(dy).T @ hidden)[:, part])
        with torch.no_grad():
            frozen = tensors(BF16, x[own])[0].requires_grad_()
        up.weight.requires_grad_(False)
        up.bias.requires_grad_(False)
        if not whole:
            flux_tp.all_gather_matmul(frozen, up.weight, m=m, n=inner).backward(*tensors(BF16, back[:, part]))
            near(frozen.grad, (back @ w1)[own], (scale @ np.abs(w1))[own])


def compiled_with_unequal_parts(comm):
    inner, m = 16 * comm.world_size + 8, comm.world_size * 8
    part = comm.features(inner)

    def mlp(x, up, down):
        return flux_tp.matmul_reduce_scatter(flux_tp.all_gather_matmul(x, up, n=inner) * 2, down, k=inner)

    x, up, down = operand(1, m, 32)[rows(comm.world_size, comm.rank, m)], operand(2, inner, 32)[part], operand(3, 24, inner)[:, part]
    x, up, down = tensors(F16, x, up, np.ascontiguousarray(down))
    with torch.no_grad():
        expected = mlp(x, up, down)
        found = torch.compile(mlp, fullgraph=True, backend="inductor" if x.is_cuda else "aot_eager")(x, up, down)
    assert torch.equal(found, expected)


def groups_inside_a_larger_job(comm):
    """Even and odd ranks compute apart, as the tensor-parallel groups of a larger job do."""
    init_distributed()
    world, rank = comm.world_size, comm.rank
    # Every rank makes every group.
    even, odd = (dist.new_group(list(range(first, world, 2))) for first in (0, 1))
    own, other = (odd, even) if rank % 2 else (even, odd)
    raises(flux_tp.ConnectError, lambda: flux_tp.init(other), "not of the group")
    with flux_tp.init(own, transport="host" if comm.device is None else "auto", device=comm.device) as inner:
        assert (inner.rank, inner.world_size) == (rank // 2, dist.get_world_size(own))
        *operands, y = gathered(inner, 16 * inner.world_size, 16, 32, dtype=np.float64)
        x, w, _ = tensors(BF16, *operands)
        close(numbers(flux_tp.all_gather_matmul(x, w.requires_grad_(), group=inner)), y, "bfloat16")
        inner.check()


def a_call_costs_microseconds(comm):
    """Python and binding of a call of one rank without rows, which does nothing else."""
    if comm.world_size > 1:
        return
    x, w, b = torch.empty(0, 64, dtype=F16), torch.zeros(8, 64, dtype=F16), torch.zeros(8, dtype=F16)
    times = []
    with torch.no_grad():
        for _ in range(300):
            began = time.perf_counter()
            for _ in range(10):
                flux_tp.all_gather_matmul(x, w, b)
            times.append((time.perf_counter() - began) / 10)
    print(f"a call costs {min(times) * 1e6:.1f} us at least")
