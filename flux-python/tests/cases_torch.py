"""Cases of the ops with tensors of PyTorch on the communicator's device; see ``ranks``."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

import flux_tp
from cases_numpy import gathered, gathered_by_several, raises, row_parallel, scattered
from oracle import close, operand, rms_norm

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


def init_distributed():
    if not dist.is_initialized():
        # A rank that dies prints the stacks of torch's threads beside Python's.
        torch._C._set_print_stack_traces_on_fatal_signal(True)
        dist.init_process_group("gloo" if place().type == "cpu" else "nccl", timeout=timedelta(minutes=2))


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


def several_weights(comm):
    for dtype in (BF16, F16):
        for m, columns, activation in ((comm.world_size * 8, (4, 1), None), (comm.world_size * 40 + 1, (6, 1, 1), "gelu"), (1, (1, 2, 3, 1), None)):
            columns = [8 * (comm.world_size * n + n % 2) for n in columns]
            x, w, b, ys, full = gathered_by_several(comm, m, columns, 48, True, activation, np.float64)
            (x, *w), b = tensors(dtype, x, *w), tensors(dtype, *b)
            found = flux_tp.all_gather_matmul(x, w, b, activation, m=m, n=columns)
            assert all(y.dtype == dtype for y in found)
            for y, expected in zip(found, ys, strict=True):
                close(numbers(y), expected, NAMES[dtype], slope=4.0)
            *again, x_full = flux_tp.all_gather_matmul(x, w, b, activation, return_gathered=True, m=m, n=columns)
            assert all(map(torch.equal, again, found)) and np.array_equal(numbers(x_full), full)
            results = *(torch.empty_like(y) for y in found), x_full.new_empty(m, 56)[:, :48]
            assert flux_tp.all_gather_matmul(x, w, b, activation, return_gathered=True, m=m, n=columns, out=results) is results
            assert all(map(torch.equal, results, (*found, x_full)))
    bad, call = flux_tp.OperandError, flux_tp.all_gather_matmul
    x, w, _, ys, _ = gathered_by_several(comm, comm.world_size * 8, [16 * comm.world_size, 8 * comm.world_size], 32, dtype=np.float64)
    x, *w = tensors(F16, x, *w)
    outs = tuple(call(x, w))
    lead = call(x.reshape(4, 2, 32), w, return_gathered=True)
    assert [y.shape[1:] for y in lead] == [(2, 16), (2, 8), (2, 32)] and torch.equal(lead[1].reshape(-1, 8), outs[1])
    raises(bad, lambda: call(x, [w[0], w[1].to(BF16)]), "weight[1]", "bf16")
    raises(bad, lambda: call(x, [w[0].to(BF16), w[1]]), "weight[0]", "bf16")
    raises(bad, lambda: call(x, [w[0], w[1].float()]), "weight[1]: the memory holds fp32")
    raises(bad, lambda: call(x, [w[0], w[1].to("meta")]), "weight[1] is on meta", "move it")
    raises(bad, lambda: call(x, [w[0], ys[1]]), "weight[1] is a ndarray")
    raises(bad, lambda: call(x, w, out=(outs[0], ys[1])), "out[1] is a ndarray")
    raises(bad, lambda: call(x, [w[0], w[1][0]]), "weight[1] has 1 dimensions")
    raises(bad, lambda: call(x, [w[0], w[1].t().contiguous().t()]), "weight[1] is a transposed view", "contiguous [n, k]")
    raises(bad, lambda: call(x, [w[0], w[1][:, :24]]), "weight[1] is [8, 24]", "the columns of x")
    raises(bad, lambda: call(x[0], w), "x has 1 dimensions")
    frozen = [w[0].clone().requires_grad_(), w[1]]
    raises(bad, lambda: call(x, frozen, out=outs), "out=", "no_grad")
    raises(bad, lambda: call(x, frozen, return_gathered=True), "return_gathered=", "no_grad")
    for y, expected in zip(call(x, w), ys):
        close(numbers(y), expected, "float16")


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


def partials_in_float32(comm):
    """Results are rounded once, and fp16 partial sums beyond its range are sent."""
    for op in (flux_tp.matmul_reduce_scatter, flux_tp.matmul_all_reduce):
        for dtype, m in ((BF16, 1), (F16, comm.world_size * 8), (BF16, comm.world_size * 40 + 1)):
            operands, y, _ = row_parallel(comm, op, m, 24, 40, np.float64)
            x, w, b, residual, gain = tensors(dtype, *operands)
            close(numbers(op(x, w, b, residual, partials="float32")), y, NAMES[dtype])
            found, normalised = map(numbers, op(x, w, b, residual, (gain, 1e-3), partials="float32"))
            close(found, y, NAMES[dtype])
            close(normalised, rms_norm(found, operands[4], 1e-3), NAMES[dtype], slope=4.0)
        last = comm.world_size - 1
        sign = 0 if last == 0 else {0: 1, last: -1}.get(comm.rank, 0)
        x, w = tensors(F16, np.full((5, 32), 64.0 * sign), np.full((16, 32), 64.0))
        assert not numbers(op(x, w, partials="float32")).any(), op


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
    raises(bad, lambda: op(x, w, norm=(gain, float("inf"))), "eps = inf of norm")
    raises(bad, lambda: op(x, w, norm=gain), "norm is a Tensor", "(gain, eps)")
    raises(bad, lambda: op(x, w, norm=(gain, 1e-3), out=residual), "out is a Tensor", "(y, y_norm)")
    raises(bad, lambda: op(x, w, b, residual, (gain, 1e-3), out=(torch.empty_like(residual), residual)), "overlaps residual")
    learns = gain.clone().requires_grad_()
    raises(bad, lambda: op(x, w, norm=(learns[:8], 1e-3)), "gain is [8]", "[24]")
    raises(bad, lambda: op(x, w, norm=(learns, -1.0)), "eps = -1.0 of norm")
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
    raises(bad, lambda: call(torch.cat([x.new_ones(1), x.flatten()])[1:].view_as(x), w), "x is", "16-byte border", ".clone()")
    raises(bad, lambda: call(x.new_ones(8, 34)[:, :32], w), "x is", "rows 34 elements apart", ".clone()")
    raises(bad, lambda: call(x[:1].expand(8, 32), w), "x is", "repeat", ".contiguous()")
    raises(bad, lambda: call(x[:, :24], w), "x is [8, 24]")
    raises(bad, lambda: call(x[0], w), "x has 1 dimensions")
    raises(bad, lambda: call(x, w.to("meta")), "weight is on meta", "move it")
    for value in (-1, -8):
        for name in ("m", "n"):
            raises(bad, lambda: call(x, w, **{name: value}), f"{name} = {value}", "from 0 on")
        for op in (flux_tp.matmul_reduce_scatter, flux_tp.matmul_all_reduce):
            raises(bad, lambda: op(x, w, k=value), f"k = {value}", "from 0 on")
    # Behind the public op.
    out = x.new_empty(8 * comm.world_size, 16)
    for m, weights, outs, words in ((-8, [w], [out], "m = -8"), (8, [], [], "there are 0 weights"), (8, [w], [out, out], "there are 1 weights")):
        raises(RuntimeError, lambda: torch.ops.flux_tp.all_gather_matmul(x, weights, *[None] * 6, 0, 0, m, None, 0, 0, 0, False, comm.id, outs, None, None), words)
    if comm.world_size > 1:
        # A shape that no rank has built.
        wide = torch.zeros(16 + 8 * (comm.rank == 0), 56, dtype=F16, device=place())
        raises(flux_tp.DisagreedError, lambda: call(torch.zeros(8, 56, dtype=F16, device=place()), wide))
    close(numbers(call(x, w)), y, "float16")


def threads_keep_their_errors(comm):
    """Each of several threads whose calls fail gets its own error, of its own class."""
    *operands, y = gathered(comm, comm.world_size * 8, 16, 32, dtype=np.float64)
    x, w, _ = tensors(F16, *operands)
    # Builds the op, which is collective.
    close(numbers(flux_tp.all_gather_matmul(x, w)), y, "float16")
    interval, found = sys.getswitchinterval(), []

    def fail(width):
        for _ in range(500):
            try:
                flux_tp.all_gather_matmul(x[:, :width], w)
            except RuntimeError as error:
                found.append((type(error), f"x is [8, {width}]" in str(error)))

    threads = [threading.Thread(target=fail, args=(width,)) for width in (8, 16, 24)]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert len(found) == 1500 and set(found) == {(flux_tp.OperandError, True)}, set(found)
    close(numbers(flux_tp.all_gather_matmul(x, w)), y, "float16")


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
