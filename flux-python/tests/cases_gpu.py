"""Cases with tensors of PyTorch on GPUs, beside those for any device; see ``ranks``."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import torch

import flux_tp
from cases_numpy import gathered, gathered_by_several, raises, row_parallel, scattered
from cases_torch import BF16, init_distributed, numbers, place, tensors
from oracle import close, operand, rms_norm
from ranks import within

PAGE = 4096


def ops(comm):
    """Every op with few, some and many rows, whole tiles and others."""
    for m in (1, 64, comm.world_size * 136 + 1):
        *operands, y = gathered(comm, m, 256, 512, True, "gelu", np.float64)
        x, w, b = tensors(BF16, *operands)
        close(numbers(flux_tp.all_gather_matmul(x, w, b, "gelu", m=m)), y, "bfloat16", slope=4.0)
        *operands, y, sums = scattered(comm, m, 256, 512, True, np.float64)
        x, w, b = tensors(BF16, *operands)
        close(numbers(flux_tp.matmul_reduce_scatter(x, w, b)), y, "bfloat16", sums)
        whole, weights = operand(1, comm.world_size, m, 512), operand(2, comm.world_size, 256, 512)
        partials = whole @ weights.transpose(0, 2, 1)
        x, w = tensors(BF16, whole[comm.rank], weights[comm.rank])
        close(numbers(flux_tp.matmul_all_reduce(x, w)), partials.sum(0), "bfloat16", np.abs(partials).sum(0))


def another_stream(comm):
    *operands, y = gathered(comm, comm.world_size * 64, 256, 512, dtype=np.float64)
    x, w, _ = tensors(BF16, *operands)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = flux_tp.all_gather_matmul(x, w)
    stream.synchronize()
    close(numbers(found), y, "bfloat16")


def graphs(comm):
    """Captures in torch's default mode. An op that is not built is refused, and the capture can be made again."""
    m = comm.world_size * 64
    flux_tp.prepare("all_gather_matmul", comm.world_size * 256, 512, rows=[m])
    *operands, y = gathered(comm, m, 256, 512, dtype=np.float64)
    x, w, _ = tensors(BF16, *operands)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = flux_tp.all_gather_matmul(x, w)
    graph.replay()
    close(numbers(found), y, "bfloat16")
    x.zero_()
    graph.replay()
    assert not numbers(found).any()
    unbuilt = torch.zeros(264, 512, dtype=BF16, device=place())

    def capture():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            flux_tp.all_gather_matmul(x, unbuilt)

    raises(flux_tp.BuildError, capture, "flux_tp.prepare")
    graph.replay()
    assert not numbers(found).any()


def a_norm_in_a_graph(comm):
    """Captures row-parallel ops with residual and norm, whose kernels follow one another."""
    for name in ("matmul_reduce_scatter", "matmul_all_reduce"):
        op, m = getattr(flux_tp, name), comm.world_size * 16
        flux_tp.prepare(name, 512, comm.world_size * 256, rows=[m], bias=True, residual=True, eps=1e-3)
        operands, y, sums = row_parallel(comm, op, m, 512, 256, np.float64)
        x, w, b, residual, gain = tensors(BF16, *operands)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            results = op(x, w, b, residual, (gain, 1e-3))
        for _ in range(2):
            graph.replay()
            found, normalised = map(numbers, results)
            close(found, y, "bfloat16", sums)
            close(normalised, rms_norm(found, operands[4], 1e-3), "bfloat16", slope=4.0)
            for result in results:
                result.zero_()


def gathered_rows_in_a_graph(comm):
    """Replays use either half of the gather buffer; eager calls between them change which."""
    m = comm.world_size * 64
    flux_tp.prepare("all_gather_matmul", comm.world_size * 256, 512, rows=[m])
    *operands, y = gathered(comm, m, 256, 512, dtype=np.float64)
    x, w, _ = tensors(BF16, *operands)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = flux_tp.all_gather_matmul(x, w, return_gathered=True)
    full = operand(1, m, 512)
    for turn in range(6):
        sign = -1 if turn % 2 else 1
        x.copy_(torch.from_numpy(sign * operands[0]))
        for result in results:
            result.zero_()
        graph.replay()
        close(numbers(results[0]), sign * y, "bfloat16")
        assert np.array_equal(numbers(results[1]), sign * full)
        if turn % 3 == 1:
            assert np.array_equal(numbers(flux_tp.all_gather_matmul(x, w, return_gathered=True)[1]), sign * full)


def several_weights_in_a_graph(comm):
    m, columns = comm.world_size * 64, [256 * comm.world_size, 128 * comm.world_size, 128 * comm.world_size]
    flux_tp.prepare("all_gather_matmul", columns, 512, rows=[m])
    x, w, _, ys, full = gathered_by_several(comm, m, columns, 512, dtype=np.float64)
    x, *w = tensors(BF16, x, *w)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = flux_tp.all_gather_matmul(x, w, return_gathered=True)
    for _ in range(3):
        for result in results:
            result.zero_()
        graph.replay()
        for found, expected in zip(results, ys):
            close(numbers(found), expected, "bfloat16")
        assert np.array_equal(numbers(results[-1]), full)


def a_thousand_steps_without_growth(comm):
    """Steps of two MLPs, forward and backward, with numbers of rows that change; one keeps the gathered rows."""
    init_distributed()
    ups = [flux_tp.ColumnParallelLinear(512, 256 * comm.world_size, activation="gelu", keep_gathered=keep) for keep in (False, True)]
    down = flux_tp.RowParallelLinear(256 * comm.world_size, 512)
    inputs = tensors(BF16, *(operand(1 + comm.rank, rows, 512) for rows in (16, 64, 40)))

    def steps(count):
        for step in range(count):
            up = ups[step % 2]
            down(up(inputs[step % len(inputs)])).sum().backward()
            up.zero_grad(), down.zero_grad()
        torch.cuda.synchronize()
        comm.check()
        with open("/proc/self/statm", encoding="ascii") as file:
            return torch.cuda.mem_get_info()[0], int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    free, resident = steps(100)
    free_after, resident_after = steps(1000)
    assert free_after >= free, (free, free_after)
    # A leak of a page a step would show.
    assert resident_after < resident + 1000 * PAGE, (resident, resident_after)


def bad_operands(comm):
    x, w = tensors(BF16, operand(1, 64, 512), operand(2, 256, 512))
    bad, call = flux_tp.OperandError, flux_tp.all_gather_matmul
    # torch's dispatcher takes the kernel of one device for all operands.
    raises(bad, lambda: call(x, w.cpu()), "weight is in host memory")
    raises(bad, lambda: call(x.cpu(), w.cpu()), "x is in host memory")
    raises(bad, lambda: call(x.cpu().float().numpy(), w), "x is in host memory")
    if torch.cuda.device_count() > 1:
        other = (comm.device + 1) % torch.cuda.device_count()
        raises(bad, lambda: call(x, w.to(f"cuda:{other}")), "weight is in CUDA device")
    ops(comm)


def rank_1_is_killed(comm):
    ops(comm)
    comm.barrier()
    x, w = tensors(BF16, operand(1, 64, 512), operand(2, 256, 512))
    torch.cuda.synchronize()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()

    def call():
        # One call may end before the other rank does.
        while time.monotonic() < began + 10:
            flux_tp.all_gather_matmul(x, w)
            torch.cuda.synchronize()
            comm.check()

    assert raises(flux_tp.PeerLostError, call, "rank 1").rank == 1
    within(1, began)
