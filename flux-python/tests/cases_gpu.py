"""Cases with tensors of PyTorch on GPUs; see ``ranks``."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import torch
import torch.distributed as dist

import flux_tp
from cases_numpy import gathered, raises, scattered
from oracle import close, operand
from ranks import within

BF16 = torch.bfloat16


def numbers(tensor):
    return tensor.detach().double().cpu().numpy()


def tensors(comm, *arrays):
    torch.cuda.set_device(comm.device)
    return [None if array is None else torch.from_numpy(array).to(BF16).cuda() for array in arrays]


def settled(comm):
    torch.cuda.synchronize()
    comm.check()


def ops(comm):
    for m in (1, 64, comm.world_size * 136 + 1):
        *operands, y = gathered(comm, m, 256, 512, True, "gelu", np.float64)
        x, w, b = tensors(comm, *operands)
        found = flux_tp.all_gather_matmul(x, w, b, "gelu", m=m)
        settled(comm)
        close(numbers(found), y, "bfloat16", slope=4.0)
        *operands, y, sums = scattered(comm, m, 256, 512, True, np.float64)
        x, w, b = tensors(comm, *operands)
        found = flux_tp.matmul_reduce_scatter(x, w, b)
        settled(comm)
        close(numbers(found), y, "bfloat16", sums)


def all_reduce(comm):
    for m in (1, 64, 512):
        whole, weights = operand(1, comm.world_size, m, 512), operand(2, comm.world_size, 256, 512)
        partials = whole @ weights.transpose(0, 2, 1)
        x, w = tensors(comm, whole[comm.rank], weights[comm.rank])
        found = flux_tp.matmul_all_reduce(x, w)
        settled(comm)
        close(numbers(found), partials.sum(0), "bfloat16", np.abs(partials).sum(0))


def another_stream(comm):
    *operands, y = gathered(comm, comm.world_size * 64, 256, 512, dtype=np.float64)
    x, w, _ = tensors(comm, *operands)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = flux_tp.all_gather_matmul(x, w)
    stream.synchronize()
    comm.check()
    close(numbers(found), y, "bfloat16")


def graphs(comm):
    """Capture in torch's default mode. An op that is not built is refused."""
    m = comm.world_size * 64
    flux_tp.prepare("all_gather_matmul", comm.world_size * 256, 512, rows=[m])
    *operands, y = gathered(comm, m, 256, 512, dtype=np.float64)
    x, w, _ = tensors(comm, *operands)
    zeros = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = flux_tp.all_gather_matmul(x, w)
    graph.replay()
    settled(comm)
    close(numbers(found), y, "bfloat16")
    x.copy_(zeros)
    graph.replay()
    settled(comm)
    assert not found.any()


def compiled(comm):
    def mlp(x, up, down):
        return flux_tp.matmul_reduce_scatter(torch.relu(flux_tp.all_gather_matmul(x, up)), down)

    x, up, down = tensors(comm, operand(1 + comm.rank, 64, 512), operand(20 + comm.rank, 256, 512), operand(40 + comm.rank, 512, 256))
    with torch.no_grad():
        expected = mlp(x, up, down)
        found = torch.compile(mlp, fullgraph=True)(x, up, down)
    settled(comm)
    assert torch.equal(found, expected)


def gradients(comm):
    if not dist.is_initialized():
        torch.cuda.set_device(comm.device)
        dist.init_process_group("nccl")
    up = flux_tp.ColumnParallelLinear(512, 256 * comm.world_size, activation="gelu")
    down = flux_tp.RowParallelLinear(256 * comm.world_size, 512)
    (x,) = tensors(comm, operand(1 + comm.rank, 128, 512))
    down(up(x.requires_grad_())).square().mean().backward()
    settled(comm)
    whole = [torch.zeros(comm.world_size, *p.shape, dtype=BF16, device="cuda") for p in (x, up.weight, down.weight)]
    for all_of, own in zip(whole, (x.detach(), up.weight.detach(), down.weight.detach())):
        dist.all_gather_into_tensor(all_of, own)
    X, W1, W2 = (t.double().requires_grad_() for t in whole)
    hidden = torch.nn.functional.gelu(torch.einsum("rmk,pnk->prmn", X, W1), approximate="tanh")
    torch.einsum("prmn,pkn->rmk", hidden, W2).square().mean(dim=(1, 2))[comm.rank].backward(retain_graph=True)
    # Each rank's loss is the mean over its rows: gradients of weights are sums over the ranks' losses.
    for grad in (W1.grad, W2.grad):
        dist.all_reduce(grad)
    for found, expected in ((x.grad, X.grad[comm.rank]), (up.weight.grad, W1.grad[comm.rank]), (down.weight.grad, W2.grad[comm.rank])):
        error = (found.double() - expected).norm() / expected.norm()
        assert error < 0.02, error


def a_thousand_steps_without_growth(comm):
    x, w = tensors(comm, operand(1 + comm.rank, 64, 512), operand(20 + comm.rank, 256, 512))
    with torch.no_grad():
        for _ in range(20):
            flux_tp.all_gather_matmul(x, w)
        settled(comm)
        free = torch.cuda.mem_get_info()[0]
        for _ in range(1000):
            flux_tp.all_gather_matmul(x, w)
        settled(comm)
    assert torch.cuda.mem_get_info()[0] >= free


def bad_operands(comm):
    x, w = tensors(comm, operand(1, 64, 512), operand(2, 256, 512))
    bad, call = flux_tp.OperandError, flux_tp.all_gather_matmul
    raises(bad, lambda: call(x, w.cpu()), "weight is in host memory")
    raises(bad, lambda: call(x.cpu(), w.cpu()), "x is in host memory")
    raises(bad, lambda: call(x.cpu().float().numpy(), w), "x is in host memory")
    if torch.cuda.device_count() > 1:
        other = (comm.device + 1) % torch.cuda.device_count()
        raises(bad, lambda: call(x, w.to(f"cuda:{other}")), "weight is in CUDA device")
    ops(comm)


def rank_1_is_killed(comm):
    ops(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    x, w = tensors(comm, operand(1, 64, 512), operand(2, 256, 512))
    began = time.monotonic()

    def call():
        for _ in range(100):
            flux_tp.all_gather_matmul(x, w)
            torch.cuda.synchronize()
            comm.check()

    assert raises(flux_tp.PeerLostError, call, "rank 1").rank == 1
    within(5, began)
