"""Cases of schemas, fake kernels and ``torch.compile``; see ``ranks``."""

from __future__ import annotations

import numpy as np
import torch

import flux_tp
from cases_numpy import gathered, gathered_by_several, row_parallel, scattered
from cases_scaled import codes, powers
from cases_torch import BF16, F16, init_distributed, place, tensors
from oracle import operand, rows


def schemas_and_fakes(comm):
    """Each op with all that it takes, and with none of it."""
    checks, m = ("test_schema", "test_faketensor"), comm.world_size * 8
    ops = torch.ops.flux_tp
    for count in (1, 2, 3, 4):
        columns = [8 * (comm.world_size * n + 1) for n in range(1, count + 1)]
        x, w, b, _, _ = gathered_by_several(comm, m, columns, 32, True, dtype=np.float64)
        (x, *w), b = tensors(F16, x, *w), tensors(F16, *b)
        outs = [x.new_empty(m, weight.shape[0]) for weight in w]
        for biases, x_full in ((b, x.new_empty(m, 32)), (None, None)):
            arguments = x, w, None, None, biases, None, None, None, 0.0, 0, m, columns, 0, 0, 0, False, comm.id, outs, x_full, None
            torch.library.opcheck(ops.all_gather_matmul.default, arguments, test_utils=checks)
    for name in ("matmul_reduce_scatter", "matmul_all_reduce"):
        operands, _, _ = row_parallel(comm, getattr(flux_tp, name), m + 1, 16, 32, np.float64)
        x, w, b, residual, gain = tensors(F16, *operands)
        out, y_norm = torch.empty_like(residual), torch.empty_like(residual)
        codes, apart = out.new_empty(out.shape, dtype=torch.float8_e4m3fn), out.new_empty(1, out.shape[0], dtype=torch.float32)
        of_norm = residual, gain, None, 1e-3, 0, m + 1, None, 1, 0
        for others, possible in (
            ((None, None, [b], *of_norm, 0, True, comm.id, [out], y_norm, None), checks),
            # The test of schemas compares no elements of 8 bits.
            ((None, None, [b], *of_norm, 2, True, comm.id, [out], codes, apart), checks[1:]),
            ((*[None] * 6, 0.0, 0, m + 1, None, 0, 0, 0, False, comm.id, [out], None, None), checks),
        ):
            torch.library.opcheck(getattr(ops, name).default, (x, [w], *others), test_utils=possible)


def compiled(comm):
    def mlp(x, up, down):
        return flux_tp.matmul_reduce_scatter(flux_tp.all_gather_matmul(x, up, activation="relu") * 2, down)

    m = comm.world_size * 8
    x = operand(1, m, 32)[rows(comm.world_size, comm.rank, m)]
    x, up, down = tensors(F16, x, operand(2 + comm.rank, 16, 32), operand(20 + comm.rank, 24, 16))
    up, down = (torch.nn.Parameter(weight, requires_grad=False) for weight in (up, down))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
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


def several_weights_compile(comm):
    for count in (2, 3, 4):
        columns = [8 * (comm.world_size * n + 1) for n in range(1, count + 1)]
        x, w, b, _, _ = gathered_by_several(comm, comm.world_size * 8, columns, 32, True, dtype=np.float64)
        (x, *w), b = tensors(F16, x, *w), tensors(F16, *b)

        def layer(x, w, b):
            *ys, x_full = flux_tp.all_gather_matmul(x * 2, w, b, "relu", n=columns, return_gathered=True)
            first, *_ = flux_tp.all_gather_matmul(x, [weight + 1 for weight in w], n=columns)
            return *(y * 2 for y in ys), first, x_full

        with torch.no_grad():
            expected = layer(x, w, b)
            found = torch.compile(layer, fullgraph=True, backend="inductor" if x.is_cuda else "aot_eager")(x, w, b)
        assert all(map(torch.equal, found, expected))


def gates_compile(comm):
    *operands, _ = gathered(comm, comm.world_size * 8, 32, 32, dtype=np.float64)
    x, w, _ = tensors(BF16, *operands)
    eager = flux_tp.all_gather_matmul(x, w, activation="swiglu")
    compiled = torch.compile(lambda x, w: flux_tp.all_gather_matmul(x, w, activation="swiglu") * 2, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x, w), eager * 2)


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


def training_compiles(comm):
    """Every op with a gradient, in one graph: results and gradients are those without torch.compile."""
    init_distributed()
    world, inner = comm.world_size, 16 * comm.world_size + 8
    for keep, parallel in ((False, True), (True, True), (False, False)):
        up = flux_tp.ColumnParallelLinear(32, inner, activation="gelu", keep_gathered=keep, sequence_parallel=parallel)
        down = flux_tp.RowParallelLinear(inner, 24, sequence_parallel=parallel)
        mlp = torch.nn.Sequential(up, down)
        x = tensors(BF16, operand(1 + comm.rank * parallel, 8, 32))[0]
        check(mlp, torch.compile(mlp, fullgraph=True, backend="aot_eager"), list(mlp.parameters()), x)
    w = [tensors(BF16, operand(10 + index, n, 32))[0].requires_grad_() for index, n in enumerate((16, 8))]
    columns = [16 * world, 8 * world]

    def attention(x):
        q, k = flux_tp.all_gather_matmul(x, w, n=columns)
        return flux_tp.matmul_reduce_scatter(q * k.repeat(1, 2), w[0].t().contiguous(), residual=x)

    check(attention, torch.compile(attention, fullgraph=True, backend="aot_eager"), w, x)


def check(plain, compiled, leaves, x):
    found = []
    for call in (plain, compiled):
        own = x.clone().requires_grad_()
        y = call(own)
        y.float().square().sum().backward()
        found.append([y, own.grad, *(leaf.grad for leaf in leaves)])
        for leaf in leaves:
            leaf.grad = None
    assert all(map(torch.equal, *found))


def quantised_norms_compile(comm):
    m, n = comm.world_size * 4, 128
    x, w, residual, gain = tensors(BF16, operand(1, m, 32), operand(2 + comm.rank, n, 32), operand(3, m, n), operand(4, n))
    own = residual[rows(comm.world_size, comm.rank, m)].contiguous()
    up, of_up = codes(5, 64, n), powers(6, 1, 64)

    def layer(x, residual):
        y, z, scale = flux_tp.matmul_reduce_scatter(x, w, residual=residual, norm=(gain, 1e-3), norm_scales="row")
        return y, flux_tp.all_gather_matmul(z, up, scale_a=scale, scale_b=of_up)

    def apart(x, residual):
        y, z, scale = flux_tp.matmul_all_reduce(x, w, residual=residual, norm=(gain, 1e-3), norm_scales="block", norm_carried=False)
        return y, z.view(torch.uint8), scale

    for function, added in ((layer, own), (apart, residual)):
        expected = function(x, added)
        found = torch.compile(function, fullgraph=True, backend="inductor" if x.is_cuda else "aot_eager")(x, added)
        assert all(map(torch.equal, found, expected)) and [of.stride() for of in found] == [of.stride() for of in expected]


def scaled_ops_compile(comm):
    m = comm.world_size * 4
    x = torch.from_numpy(operand(1, m, 32)[rows(comm.world_size, comm.rank, m)]).to(place(), BF16)
    w, of_w = codes(2, 64, 32), powers(3, 1, 64)

    def layer(x):
        q, scale = flux_tp.quantize_rows(x)
        return flux_tp.all_gather_matmul(q, w, activation="relu", scale_a=scale, scale_b=of_w)

    backend = "inductor" if x.is_cuda else "aot_eager"
    assert torch.equal(torch.compile(layer, fullgraph=True, backend=backend)(x), layer(x))

    def apart(x):
        return flux_tp.quantize_rows(x, carried=False)

    found, expected = torch.compile(apart, fullgraph=True, backend=backend)(x), apart(x)
    assert torch.equal(found[0].view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(found[1], expected[1])
    assert [of.stride() for of in found] == [of.stride() for of in expected]
