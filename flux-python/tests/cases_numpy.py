"""Cases with arrays of NumPy; see ``ranks``."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np

import flux_tp
from oracle import activate, close, operand, rms_norm, rows
from ranks import within

F16 = np.float16


def raises(kind, call, *words):
    """Calls, and returns the error that must come."""
    try:
        call()
    except kind as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in {error}"
        return error
    raise AssertionError(f"no {kind.__name__}")


def gathered(comm, m, n, k, bias=False, activation=None, dtype=F16):
    """Operands and result of an all_gather_matmul: ``n`` columns a rank."""
    x, w = operand(1, m, k), operand(2 + comm.rank, n, k)
    b = operand(50 + comm.rank, n) if bias else None
    y = activate(activation, x @ w.T + (0 if b is None else b))
    own = x[rows(comm.world_size, comm.rank, m)]
    return own.astype(dtype), w.astype(dtype), None if b is None else b.astype(dtype), y


def scattered(comm, m, n, k, bias=False, dtype=F16):
    """Operands, result and partial sums of a matmul_reduce_scatter: ``k`` of the inner dimension a rank."""
    x, w = operand(1, comm.world_size, m, k), operand(2, comm.world_size, n, k)
    partials = x @ w.transpose(0, 2, 1)
    b = operand(50, n) if bias else None
    own = rows(comm.world_size, comm.rank, m)
    y = partials.sum(0)[own] + (0 if b is None else b)
    sums = np.abs(partials).sum(0)[own]
    return x[comm.rank].astype(dtype), w[comm.rank].astype(dtype), None if b is None else b.astype(dtype), y, sums


def row_parallel(comm, op, m, n, k, dtype=F16):
    """Operands of an op with bias and residual, a gain, result and partial sums; ``k`` of the inner dimension a rank."""
    x, w = operand(1, comm.world_size, m, k), operand(2, comm.world_size, n, k)
    partials = x @ w.transpose(0, 2, 1)
    b, residual, gain = operand(50, n), operand(51, m, n), operand(52, n)
    own = rows(comm.world_size, comm.rank, m) if op is flux_tp.matmul_reduce_scatter else slice(m)
    operands = x[comm.rank], w[comm.rank], b, residual[own], gain
    return [part.astype(dtype) for part in operands], (partials.sum(0) + b + residual)[own], np.abs(partials).sum(0)[own]


def all_gather(comm):
    for m in (comm.world_size * 8, comm.world_size * 8, comm.world_size * 130):
        x, w, _, y = gathered(comm, m, 24, 48)
        close(flux_tp.all_gather_matmul(x, w), y, "float16")


def all_gather_bias_and_activations(comm):
    m = comm.world_size * 16
    for activation in (None, "gelu", "silu", "relu"):
        x, w, b, y = gathered(comm, m, 16, 32, bias=True, activation=activation)
        close(flux_tp.all_gather_matmul(x, w, b, activation, comm), y, "float16", slope=4.0)


def all_gather_gates(comm):
    for name in ("geglu", "swiglu", "reglu"):
        for m, activation in ((comm.world_size * 16, name), (comm.world_size * 8 + 1, f"{name}_interleaved")):
            x, w, b, y = gathered(comm, m, 48, 32, bias=True, activation=activation)
            assert y.shape == (m, 24)
            # Gates and ups are below 64.
            close(flux_tp.all_gather_matmul(x, w, b, activation, m=m), y, "float16", slope=512.0)
    # Unequal parts: 16 gates and ups more than the ranks share.
    half, m = 16 * comm.world_size + 8, comm.world_size * 8
    gates, ups, full = operand(5, half, 32), operand(6, half, 32), operand(1, m, 32)
    part, x = comm.features(half), full[rows(comm.world_size, comm.rank, m)].astype(np.float16)
    for activation in ("swiglu", "reglu_interleaved"):
        pair = [gates[part], ups[part]]
        w = np.stack(pair, axis=1).reshape(-1, 32) if activation.endswith("interleaved") else np.concatenate(pair)
        y = flux_tp.all_gather_matmul(x, w.astype(np.float16), activation=activation, n=2 * half)
        close(y, activate(activation, full @ w.T), "float16", slope=512.0)
    few = lambda: flux_tp.all_gather_matmul(x, w[:8].astype(np.float16), activation="swiglu", n=2 * half - 8)
    raises(flux_tp.OperandError, few, "multiple of 16", f"pad the gates and the ups with zeros to {half} rows each")
    x, w, _, _ = gathered(comm, comm.world_size * 8, 48, 32)
    view = np.asfortranarray(w)
    raises(flux_tp.OperandError, lambda: flux_tp.all_gather_matmul(x, view, activation="swiglu"), "weight as a contiguous [n, k]")


def all_gather_uneven_rows(comm):
    for m in (comm.world_size * 4 + 1, comm.world_size - 1):
        x, w, _, y = gathered(comm, m, 16, 32)
        close(flux_tp.all_gather_matmul(x, w, m=m), y, "float16")


def all_gather_and_gathered_rows(comm):
    for m in (comm.world_size * 8, 0, comm.world_size * 4 + 1, 1):
        x, w, b, y = gathered(comm, m, 16, 32, bias=True)
        full = operand(1, m, 32)
        found, x_full = flux_tp.all_gather_matmul(x, w, b, return_gathered=True, m=m)
        close(found, y, "float16")
        assert np.array_equal(x_full, full.astype(F16))
        results = np.empty_like(found), np.full((m, 40), 7, F16)[:, :32]
        assert flux_tp.all_gather_matmul(x, w, b, return_gathered=True, m=m, out=results) is results
        assert np.array_equal(results[0], found) and np.array_equal(results[1], x_full)
    m = comm.world_size * 8
    x, w, _, y = gathered(comm, m, 16, 32)
    found, x_full = flux_tp.all_gather_matmul(x.reshape(4, 2, 32), w, return_gathered=True)
    assert found.shape == (m // 2, 2, 16) and x_full.shape == (m // 2, 2, 32)
    bad, call = flux_tp.OperandError, flux_tp.all_gather_matmul
    raises(bad, lambda: call(x, w, return_gathered=True, out=np.empty_like(y)), "out is a ndarray", "(y, x_full)")
    outs = np.empty((m, 16), F16), np.empty((m - 1, 32), F16)
    raises(bad, lambda: call(x, w, return_gathered=True, out=outs), "x_full is", str([m, 32]))
    outs = outs[0], np.empty((m, 32), np.float32)
    raises(bad, lambda: call(x, w, return_gathered=True, out=outs), "x_full: the memory holds fp32")
    shared = np.empty((2 * m, 32), F16)
    raises(bad, lambda: call(x, w, return_gathered=True, out=(shared[:m, :16], shared[:m])), "overlaps")
    close(call(x, w), y, "float16")


def gathered_by_several(comm, m, columns, k, bias=False, activation=None, dtype=F16):
    """Operands and results of an all_gather_matmul with several weights, of all ranks' ``columns``; the gathered rows."""
    x, parts = operand(1, m, k), [comm.features(n) for n in columns]
    weights = [operand(2 + index, n, k)[part] for index, (n, part) in enumerate(zip(columns, parts))]
    biases = [operand(20 + index, n)[part] for index, (n, part) in enumerate(zip(columns, parts))] if bias else None
    ys = [activate(activation, x @ w.T + (biases[index] if bias else 0)) for index, w in enumerate(weights)]
    own = x[rows(comm.world_size, comm.rank, m)]
    biases = [b.astype(dtype) for b in biases] if bias else None
    return own.astype(dtype), [w.astype(dtype) for w in weights], biases, ys, x


def several_weights(comm):
    """Results are those of one call for each weight."""
    world, call = comm.world_size, flux_tp.all_gather_matmul
    for m, columns in ((world * 8, (4, 1)), (world * 4 + 1, (3, 1, 1)), (0, (1, 1)), (world * 130, (16, 2, 2, 1)), (1, (1, 2, 3))):
        columns = [8 * world * n for n in columns]
        for bias, activation in ((False, None), (True, None), (True, "silu")):
            x, w, b, ys, full = gathered_by_several(comm, m, columns, 40, bias, activation)
            found = call(x, w, b, activation, m=m)
            assert isinstance(found, tuple) and len(found) == len(w)
            for y, expected in zip(found, ys):
                close(y, expected, "float16", slope=4.0)
            *found, x_full = call(x, tuple(w), b, activation, return_gathered=True, m=m)
            assert np.array_equal(x_full, full.astype(F16)) and len(found) == len(w)
            outs = *(np.full((m, y.shape[1] + 8), 7, F16)[:, :-8] for y in ys), np.empty_like(x_full)
            assert call(x, w, b, activation, return_gathered=True, m=m, out=outs) is outs
            assert all(map(np.array_equal, outs, (*found, x_full)))
            assert call(x, w, b, activation, m=m, out=outs[:-1])[0] is outs[0]
    x, w, _, ys, full = gathered_by_several(comm, world * 8, [32 * world, 8 * world], 32)
    found = call(x.reshape(4, 2, 32), w, return_gathered=True)
    assert [y.shape for y in found] == [(4 * world, 2, 32), (4 * world, 2, 8), (4 * world, 2, 32)]
    for y, expected in zip(found, (*ys, full)):
        close(y.reshape(-1, y.shape[2]), expected, "float16")


def several_weights_of_unequal_parts(comm):
    """Ranks split each weight on its own."""
    world, m = comm.world_size, 2 * comm.world_size + 1
    columns = [8 * (2 * world + 1), 8 * world, 8 * (2 * world - 1)]
    x, w, b, ys, _ = gathered_by_several(comm, m, columns, 32, bias=True)
    for y, expected in zip(flux_tp.all_gather_matmul(x, w, b, m=m, n=columns), ys):
        close(y, expected, "float16")
    if world > 1:
        words = "weight[1] is [16, 32]", "this rank's part is [8, 32]", "full[comm.features(n[1])]"
        wide = [w[0], np.zeros((16, 32), F16), w[2]]
        raises(flux_tp.OperandError, lambda: flux_tp.all_gather_matmul(x, wide, m=m, n=columns), *words)


def several_weights_are_prepared(comm):
    world, m = comm.world_size, 2 * comm.world_size
    columns = [16 * world, 8 * world]
    flux_tp.prepare("all_gather_matmul", columns, 32, rows=[1, m], dtype="float16", bias=True)
    x, w, b, ys, _ = gathered_by_several(comm, m, columns, 32, bias=True)
    for y, expected in zip(flux_tp.all_gather_matmul(x, w, b), ys):
        close(y, expected, "float16")
    bad, prepare = flux_tp.OperandError, flux_tp.prepare
    raises(bad, lambda: prepare("all_gather_matmul", columns[:1], 32), "n is a list of 1", "2 to 4 weights")
    raises(bad, lambda: prepare("all_gather_matmul", [8 * world, -8], 32), "n[1] = -8")
    raises(bad, lambda: prepare("all_gather_matmul", [8 * world, 8 * world + 4], 32), f"n[1] = {8 * world + 4}", "multiple of 8")
    raises(bad, lambda: prepare("all_gather_matmul", [8 * world, 0], 32), "n[1] = 0", f"pad n[1] with zeros to {8 * world}")
    raises(bad, lambda: prepare("all_gather_matmul", columns, 32, activation="swiglu"), "'swiglu'", "one weight")
    raises(bad, lambda: prepare("all_gather_matmul", columns, 32, transposed=True), "read as [n, k]", "leave out transposed")
    raises(bad, lambda: prepare("matmul_all_reduce", columns, 32), "n is a list", "matmul_all_reduce takes one weight")


def several_weights_that_do_not_fit(comm):
    world, bad, call = comm.world_size, flux_tp.OperandError, flux_tp.all_gather_matmul
    m = 8 * world
    x, w, b, ys, _ = gathered_by_several(comm, m, [16 * world, 8 * world], 32, bias=True)
    for count in (0, 1, 5):
        raises(bad, lambda: call(x, w[:1] * count), f"weight is a list of {count}", "2 to 4 weights")
    raises(bad, lambda: call(x, w, b[0]), "bias is a ndarray", "2 weights", "give a list of 2, or None")
    raises(bad, lambda: call(x, w, b[:1]), "bias has 1 elements", "give a list of 2, or None")
    raises(bad, lambda: call(x, w, [b[0], None]), "bias[1] is None", "None in place of the list")
    raises(bad, lambda: call(x, w, n=16 * world), "n is a int", "give a list of 2")
    raises(bad, lambda: call(x, w, n=[16 * world, -8]), "n[1] = -8", "from 0 on")
    raises(bad, lambda: call(x, w, n=["a", 8]), "n[0] is a str", "give a number")
    raises(bad, lambda: call(x, w[0], n=[16 * world]), "n is a list", "give a number")
    raises(bad, lambda: flux_tp.matmul_all_reduce(x, w), "weight is a list of 2", "all_gather_matmul alone")
    raises(bad, lambda: call(x, w, m=-1), "m = -1", "from 0 on")
    raises(bad, lambda: call(x, w, activation="geglu_interleaved"), "'geglu_interleaved'", "one weight", "gelu, silu or relu")
    raises(bad, lambda: call(x, w, out=np.empty((m, 16), F16)), "out is a ndarray", "2 results", "(y0, y1)")
    outs = np.empty((m, 16), F16), np.empty((m, 8), F16)
    raises(bad, lambda: call(x, w, return_gathered=True, out=outs), "out has 2 elements", "(y0, y1, x_full)")
    raises(bad, lambda: call(x, w, out=(outs[0], outs[0])), f"out[1] is [{m}, 16]", f"[{m}, 8]")
    raises(bad, lambda: call(x, [w[0], w[0]], out=(outs[0], outs[0])), "overlaps out[1]")
    raises(bad, lambda: call(x, [w[0], w[1].tolist()]), "weight[1] is a list")
    raises(bad, lambda: call(x, [w[0], w[1].astype(np.float32)]), "weight[1]: the memory holds fp32")
    raises(bad, lambda: call(x, [w[0], w[1][:, :24]]), "weight[1] is [8, 24], and weight[0] [16, 32]", "the columns of x")
    raises(bad, lambda: call(x[:, :24], w), "x is [8, 24]", "give 32 columns")
    raises(bad, lambda: call(x, [w[0], w[1][:4]]), f"n[1] = {4 * world}", "multiple of 8")
    raises(bad, lambda: call(x, [w[0], w[1][0]]), "weight[1] has 1 dimensions")
    raises(bad, lambda: call(x, w, [b[0], b[0]]), "bias[1] is [1, 16]", "one row of 8 values")
    raises(bad, lambda: call(x, w, [b[1], b[1]]), "bias[0] is [1, 8]", "one row of 16 values")
    raises(bad, lambda: call(x, [w[0], np.asfortranarray(w[1])]), "weight[1] is a transposed view", "contiguous [n, k]")
    if world == 1:
        raises(bad, lambda: call(x, w, n=[16, 16]), "weight[1] is [8, 32]", "full[comm.features(n[1])]")
    else:
        # Weights that no rank has built, another one on each.
        order = [w[0], w[0], w[1]] if comm.rank else [w[0], w[1], w[0]]
        raises(flux_tp.DisagreedError, lambda: call(x, order), "weights of")
    for y, expected in zip(call(x, w, b), ys):
        close(y, expected, "float16")


def transposed_weights(comm):
    """A transposed view is read as it is stored: the same bits as of a copy."""
    x, w, _, y = gathered(comm, comm.world_size * 8, 16, 32)
    view = np.asfortranarray(w)
    assert not view.flags.c_contiguous and view.strides[0] == 2
    found = flux_tp.all_gather_matmul(x, view)
    close(found, y, "float16")
    assert np.array_equal(found, flux_tp.all_gather_matmul(x, w))
    x, w, _, y, sums = scattered(comm, comm.world_size * 8 + 1, 24, 40)
    close(flux_tp.matmul_reduce_scatter(x, np.asfortranarray(w)), y, "float16", sums)
    assert np.array_equal(flux_tp.matmul_all_reduce(x, np.asfortranarray(w)), flux_tp.matmul_all_reduce(x, w))


def reduce_scatter(comm):
    for m, bias in ((comm.world_size * 8, False), (comm.world_size * 130, True)):
        x, w, b, y, sums = scattered(comm, m, 24, 40, bias)
        close(flux_tp.matmul_reduce_scatter(x, w, b), y, "float16", sums)


def reduce_scatter_uneven_rows(comm):
    for m in (comm.world_size * 4 + 1, comm.world_size - 1):
        x, w, _, y, sums = scattered(comm, m, 16, 32)
        close(flux_tp.matmul_reduce_scatter(x, w), y, "float16", sums)


def all_reduce(comm):
    for m, bias in ((1, False), (comm.world_size * 8, True), (comm.world_size * 130 + 1, False)):
        x, w, b, _, _ = scattered(comm, m, 24, 40, bias)
        whole, weights = operand(1, comm.world_size, m, 40), operand(2, comm.world_size, 24, 40)
        partials = whole @ weights.transpose(0, 2, 1)
        y = partials.sum(0) + (0 if b is None else b.astype(np.float64))
        close(flux_tp.matmul_all_reduce(x, w, b), y, "float16", np.abs(partials).sum(0))


def residual_and_norm(comm):
    for op in (flux_tp.matmul_reduce_scatter, flux_tp.matmul_all_reduce):
        for m in (1, comm.world_size * 8, comm.world_size * 130 + 1):
            (x, w, b, residual, gain), y, sums = row_parallel(comm, op, m, 24, 40)
            close(op(x, w, b, residual), y, "float16", sums)
            found, normalised = op(x, w, b, residual, (gain, 1e-3))
            close(found, y, "float16", sums)
            close(normalised, rms_norm(found, gain, 1e-3), "float16", slope=4.0)
            plain, normalised = op(x, w, norm=(gain, 0.5))
            close(plain, y - b - residual, "float16", sums)
            close(normalised, rms_norm(plain, gain, 0.5), "float16", slope=4.0)
            results = residual.copy(), np.empty_like(residual)
            assert op(x, w, b, results[0], (gain, 1e-3), out=results) is results
            assert np.array_equal(results[0], found), "out may hold the residual"
            close(results[1], rms_norm(found, gain, 1e-3), "float16", slope=4.0)
        (x, w, b, residual, gain), y, sums = row_parallel(comm, op, comm.world_size * 8, 24, 40)
        residual = residual.reshape(-1, 2, 24)
        found, normalised = op(x.reshape(-1, 2, 40), w, b, residual, (gain, 1e-3))
        assert found.shape == normalised.shape == residual.shape
        close(found.reshape(-1, 24), y, "float16", sums)


def residual_and_norm_that_do_not_fit(comm):
    bad, op = flux_tp.OperandError, flux_tp.matmul_reduce_scatter
    (x, w, b, residual, gain), y, sums = row_parallel(comm, op, comm.world_size * 8, 24, 40)
    raises(bad, lambda: op(x, w, b, residual[:, :16]), "residual is [8, 16]", "[8, 24]")
    raises(bad, lambda: op(x, w, b, residual[:4]), "residual is [4, 24]", "[8, 24]")
    raises(bad, lambda: op(x, w, b, gain), "residual has 1 dimensions")
    raises(bad, lambda: op(x, w, b, residual.astype(np.float32)), "residual: the memory holds fp32")
    raises(bad, lambda: op(x, w, b, residual.tolist()), "residual is a list")
    raises(bad, lambda: op(x.reshape(-1, 2, 40), w, b, residual.reshape(2, 4, 24)), "residual is [2, 4, 24]")
    raises(bad, lambda: op(x, w, norm=(gain[None], 1e-3)), "gain has 2 dimensions")
    raises(bad, lambda: op(x, w, norm=(gain[:8], 1e-3)), "gain is [1, 8]", "[1, 24]")
    raises(bad, lambda: op(x, w, norm=gain), "norm is a ndarray", "(gain, eps)")
    raises(bad, lambda: op(x, w, norm=(gain, -1.0)), "eps = -1 of norm", "0 or above")
    raises(bad, lambda: op(x, w, norm=(gain, 1e-3), out=residual), "out is a ndarray", "(y, y_norm)")
    wide = np.zeros((9, 24), F16)
    raises(bad, lambda: op(x, w, b, wide[1:], out=wide[:-1]), "overlaps residual")
    raises(bad, lambda: op(x, w, b, residual, (gain, 1e-3), out=(wide[1:], residual)), "y_norm", "overlaps residual")
    raises(bad, lambda: flux_tp.prepare("all_gather_matmul", comm.world_size * 8, 8, residual=True), "all_gather_matmul has no residual")
    close(op(x, w, b, residual), y, "float16", sums)


def out_and_strided_operands(comm):
    x, w, _, y = gathered(comm, comm.world_size * 8, 16, 32)
    wide = np.zeros((w.shape[0], 64), F16)
    wide[:, :32] = w
    out = np.full((y.shape[0], 24), 7, F16)
    assert flux_tp.all_gather_matmul(x, wide[:, :32], out=out[:, :16]) is not None
    close(out[:, :16], y, "float16")
    assert (out[:, 16:] == 7).all(), "elements between rows are left alone"


def unequal_parts(comm):
    """Features that the ranks do not divide: the first have 8 more."""
    world, rank, bad = comm.world_size, comm.rank, flux_tp.OperandError
    for more in range(world):
        split, m, other = 8 * (2 * world + more), world * 4 + 1, 24
        parts = [comm.features(split, peer) for peer in range(world)]
        sizes = [part.stop - part.start for part in parts]
        assert sizes == [16 + 8 * (peer < more) for peer in range(world)] and parts[-1].stop == split
        assert parts[rank] == comm.features(split)
        for multiple in (16, 128):
            assert comm.features(split // 8 * multiple, multiple=multiple) == slice(*(at // 8 * multiple for at in (parts[rank].start, parts[rank].stop)))

        x, w, b = operand(1, m, other), operand(2, split, other), operand(3, split)
        own, part = rows(world, rank, m), parts[rank]
        for activation in (None, "relu"):
            y = activate(activation, x @ w.T + b)[:, part]
            found = flux_tp.all_gather_matmul(x[own].astype(F16), w[part].astype(F16), b[part].astype(F16), activation, m=m, n=split)
            close(found, y, "float16", slope=1.0)

        x, w, b = operand(4, m, split), operand(5, other, split), operand(6, other)
        partials = np.stack([x[:, part] @ w[:, part].T for part in parts])
        y, sums = partials.sum(0) + b, np.abs(partials).sum(0)
        x, w, b = x[:, part].astype(F16), np.ascontiguousarray(w[:, part].astype(F16)), b.astype(F16)
        close(flux_tp.matmul_reduce_scatter(x, w, b, k=split), y[own], "float16", sums[own])
        close(flux_tp.matmul_all_reduce(x, w, b, k=split), y, "float16", sums)
        transposed = np.asfortranarray(w)
        assert np.array_equal(flux_tp.matmul_all_reduce(x, transposed, b, k=split), flux_tp.matmul_all_reduce(x, w, b, k=split))
        words = "weight is [24, 8]", f"[24, {sizes[rank]}]", "comm.features(k)"
        raises(bad, lambda: flux_tp.matmul_all_reduce(x, w[:, :8], b, k=split), *words)
    raises(bad, lambda: comm.features(12), "12 features", "groups of 8", f"pad them to {max(16, 8 * world)}")
    raises(bad, lambda: comm.features(8 * world - 8), f"pad them to {8 * world}")
    raises(bad, lambda: comm.features(64, world), f"rank = {world}")


def heads_of_ranks(comm):
    """Every rank has equal numbers of heads, and the KV heads that its query heads read; those of the model where that works."""
    for world in (1, 2, 3, 4, 6, 8):
        member = SimpleNamespace(world_size=world)
        of = lambda count, kv=None: [flux_tp.Communicator.heads(member, count, kv, rank) for rank in range(world)]
        for own in (1, 2, 3, 4, 8):
            count = own * world
            assert [heads[:2] for heads in of(count)] == [(slice(own * rank, own * (rank + 1)),) * 2 for rank in range(world)]
            for kv in (kv for kv in range(1, count + 1) if count % kv == 0):
                parts = of(count, kv)
                sizes = {heads.kv.stop - heads.kv.start for heads in parts}
                assert len(sizes) == 1 and (kv % world or sizes == {kv // world}) and (world % kv or sizes == {1}), (world, count, kv)
                for rank, (query, keys, total, reads) in enumerate(parts):
                    assert query == slice(own * rank, own * (rank + 1)) and 0 <= keys.start < keys.stop <= total == kv
                    assert [keys.start + head for head in reads] == [head * kv // count for head in range(count)[query]]
                    assert max(reads) < keys.stop - keys.start
    raises(flux_tp.OperandError, lambda: comm.heads(8 * comm.world_size, 5), "kv = 5", "key and value heads of the model")
    raises(flux_tp.OperandError, lambda: comm.heads(0), "0 heads", f"pad them to {comm.world_size}")
    raises(flux_tp.OperandError, lambda: comm.heads(comm.world_size, rank=comm.world_size), f"rank = {comm.world_size}")


def more_dimensions(comm):
    x, w, _, y = gathered(comm, comm.world_size * 8, 16, 32)
    found = flux_tp.all_gather_matmul(x.reshape(4, 2, 32), w)
    assert found.shape == (4 * comm.world_size, 2, 16)
    close(found.reshape(-1, 16), y, "float16")


def bad_operands_name_what_to_do_and_harm_nothing(comm):
    x, w, b, y = gathered(comm, comm.world_size * 8, 16, 32, bias=True)
    bad, call = flux_tp.OperandError, flux_tp.all_gather_matmul
    raises(bad, lambda: call(x.astype(np.float32), w), "x: dtype float32", "neither bfloat16 nor float16: convert it")
    raises(bad, lambda: call(x, w.astype(np.float32)), "weight: the memory holds fp32")
    raises(bad, lambda: call(x, np.repeat(w, 2, axis=1)[:, ::2]), "weight", "contiguous")
    raises(bad, lambda: call(x[0], w), "x has 1 dimensions")
    raises(bad, lambda: call(x, w, b[None]), "bias has 2 dimensions")
    raises(bad, lambda: call(x, w[:12]), f"{12 * comm.world_size}", "multiple of 8")
    raises(bad, lambda: call(x[:, :24], w), "x is [8, 24], but all_gather_matmul", "[8, 32]", "give 32 columns")
    raises(bad, lambda: call(x, w, b[:8]), "bias is [1, 8]")
    raises(bad, lambda: call(x, w, activation="tanh"), "'tanh'", "gelu")
    raises(bad, lambda: call(x.tolist(), w), "list", "numpy.ndarray")
    raises(bad, lambda: call(x, w.tolist()), "weight is a list")
    raises(bad, lambda: call(x, w, out=np.empty((3, 16), F16)), "[3, 16]")
    raises(bad, lambda: call(x, w, out=np.broadcast_to(F16(0), y.shape)), "out is not writeable", "numpy.empty")
    raises(bad, lambda: call(np.zeros((8193, 32), F16), w), str(8193 * comm.world_size), "8192")
    raises(ValueError, lambda: flux_tp.init(max_m=0), "max_m = 0")
    raises(bad, lambda: flux_tp.init(transport="carrier"), "carrier")
    raises(bad, lambda: flux_tp.init(timeout=-1), "timeout = -1")
    raises(flux_tp.ConnectError, lambda: flux_tp.init(transport="host", timeout=0), "timeout = 0")
    raises(bad, lambda: flux_tp.prepare("matmul", 8, 8), "matmul is no op", "all_gather_matmul")
    close(call(x, w, b), y, "float16")
    flux_tp.check()


def arrays_that_need_a_copy(comm):
    """Arrays in another byte order, and fields of packed records whose rows start between elements."""
    x, w, b, y = gathered(comm, comm.world_size * 8, 16, 32, bias=True)
    bad, call = flux_tp.OperandError, flux_tp.all_gather_matmul
    swapped = np.dtype(F16).newbyteorder("S")
    raises(bad, lambda: call(x.astype(swapped), w), "x: dtype", "byte order")
    raises(bad, lambda: call(x, w, b.astype(swapped)), "bias: dtype", "byte order")
    raises(bad, lambda: call(x, w, out=y.astype(swapped)), "out: dtype", "byte order")
    packed = np.zeros(w.shape, [("a", "f2"), ("b", "u1")])["a"]
    assert packed.strides[1] == 3
    raises(bad, lambda: call(x, packed), "weight has strides of (96, 3) bytes", "multiples of 2", "ascontiguousarray")
    # Rows that are contiguous, 65 bytes apart.
    odd = np.zeros(w.shape[0], [("a", "f2", (32,)), ("b", "u1")])["a"]
    assert odd.strides == (65, 2)
    raises(bad, lambda: call(x, odd), "weight has strides of (65, 2) bytes")
    raises(bad, lambda: call(x[::-1], w), "x is [8, 32]", "negative strides", "numpy.ascontiguousarray")
    raises(bad, lambda: call(np.append(x.ravel()[:1], x)[1:].reshape(x.shape), w), "x is", "16-byte border", ".copy()")
    close(call(x, w, b), y, "float16")


def extents_below_0(comm):
    x, w, _, y = gathered(comm, comm.world_size * 8, 16, 32)
    for value in (-1, -8):
        for name in ("m", "n"):
            raises(flux_tp.OperandError, lambda: flux_tp.all_gather_matmul(x, w, **{name: value}), f"{name} = {value}", "from 0 on")
        for op in (flux_tp.matmul_reduce_scatter, flux_tp.matmul_all_reduce):
            raises(flux_tp.OperandError, lambda: op(x, w, k=value), f"k = {value}", "from 0 on")
        raises(flux_tp.OperandError, lambda: flux_tp.prepare("all_gather_matmul", value, 8), f"n = {value}")
    close(flux_tp.all_gather_matmul(x, w), y, "float16")


def prepared(comm):
    world = comm.world_size
    flux_tp.prepare("all_gather_matmul", world * 8, 16, rows=[1, world * 8], dtype=np.dtype(F16), bias=True, activation="relu")
    words = "8193", "8192", "call flux_tp.init with a larger max_m"
    raises(flux_tp.OperandError, lambda: flux_tp.prepare("matmul_all_reduce", 8, world * 8, rows=[8193]), *words)
    x, w, b, y = gathered(comm, world * 8, 8, 16, bias=True, activation="relu")
    close(flux_tp.all_gather_matmul(x, w, b, "relu"), y, "float16", slope=1.0)
    flux_tp.prepare("all_gather_matmul", world * 8, 16, rows=[world * 8], dtype=np.dtype(F16), transposed=True)
    close(flux_tp.all_gather_matmul(x, np.asfortranarray(w)), gathered(comm, world * 8, 8, 16)[3], "float16")
    op = flux_tp.matmul_all_reduce
    flux_tp.prepare("matmul_all_reduce", 8, world * 16, rows=[8], dtype="float16", bias=True, residual=True, eps=1e-3)
    (x, w, b, residual, gain), y, sums = row_parallel(comm, op, 8, 8, 16)
    close(op(x, w, b, residual, (gain, 1e-3))[0], y, "float16", sums)


def the_ranks_disagree(comm):
    # A shape that no rank has built.
    x, w, _, _ = gathered(comm, comm.world_size * 8, 16 + 8 * (comm.rank == 0), 56)
    error = raises(flux_tp.DisagreedError, lambda: flux_tp.all_gather_matmul(x, w), "n=")
    assert isinstance(error, flux_tp.FluxError)
    all_gather(comm)


def others_run_while_a_rank_waits(comm):
    """The interpreter's lock is free while a rank waits for its peers."""
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


def a_forked_child_harms_nobody(comm):
    all_gather(comm)
    child = os.fork()
    if child == 0:
        try:
            raises(flux_tp.FluxError, lambda: flux_tp.check(comm), "forked")
            x, w, _, _ = gathered(comm, comm.world_size * 8, 24, 48)
            raises(flux_tp.FluxError, lambda: flux_tp.all_gather_matmul(x, w), "forked")
            comm.close()
            comm.__del__()
            flux_tp._native.close(comm.id)
            flux_tp._native.close_all()
        except BaseException:  # noqa: BLE001 (the exit status says it)
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    all_gather(comm)
    flux_tp.check(comm)


def a_second_communicator(comm):
    with flux_tp.init(transport="host", max_m=64) as second:
        assert second.id != comm.id and flux_tp.default() is comm
        # Compiled graphs are kept by this number, and their shapes are of one rank of one world.
        assert second.id % (1 << 16) == comm.world_size << 8 | comm.rank
        x, w, _, y = gathered(comm, comm.world_size * 8, 16, 32)
        close(flux_tp.all_gather_matmul(x, w, group=second), y, "float16")
        second.barrier()
    raises(flux_tp.FluxError, second.check, "closed")
    all_gather(comm)


def a_closed_or_broken_default_gives_way(comm):
    """The next communicator becomes the default of ops."""
    all_gather(comm)
    comm.close()
    raises(flux_tp.FluxError, flux_tp.default, "call flux_tp.init() on every rank")
    second = flux_tp.init(transport="host")
    assert flux_tp.default() is second
    all_gather(second)

    def fail():
        raise flux_tp.PeerLostError("rank 1 is gone")

    second.check = fail
    third = flux_tp.init(transport="host")
    assert flux_tp.default() is third
    all_gather(third)
    second.close()
    assert flux_tp.default() is third


def partials_in_float32(comm):
    """Partial sums beyond fp16 whose total is 0."""
    m, n, k, last = 5, 16, 32, comm.world_size - 1
    sign = 0 if last == 0 else {0: 1, last: -1}.get(comm.rank, 0)
    x, w = np.full((m, k), 64 * sign, F16), np.full((n, k), 64, F16)
    for op in (flux_tp.matmul_reduce_scatter, flux_tp.matmul_all_reduce):
        flux_tp.prepare(op.__name__, n, k * comm.world_size, dtype=np.dtype(F16), partials="float32")
        assert (op(x, w, partials=np.dtype("float32")) == 0).all(), op
        assert np.isfinite(op(x, w)).any() == (last == 0), op
        raises(flux_tp.OperandError, lambda op=op: op(x, w, partials="float16"), "partials = 'float16'", "give 'float32'")


def equal_rows_have_equal_bits(comm):
    n, k = 40, 72
    row, w = operand(1, comm.world_size, 1, k)[comm.rank], operand(2, comm.world_size, n, k)[comm.rank]
    with flux_tp.init(transport="host", max_m=256, batch_invariant=True) as second:
        for op in (flux_tp.matmul_reduce_scatter, flux_tp.matmul_all_reduce):
            calls = [op(np.repeat(row, m, 0).astype(F16), w.astype(F16), group=second) for m in (3, 7, 64, 200)]
            assert all((y == calls[0][0]).all() for y in calls), op


def rank_1_is_killed(comm):
    all_gather(comm)
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    error = raises(flux_tp.PeerLostError, lambda: all_gather(comm), "rank 1")
    assert (error.rank, error.ranks) == (1, (1,))
    raises(flux_tp.PeerLostError, flux_tp.check, "rank 1")
    # Python has nothing that rebuilds.
    again = raises(flux_tp.PeerLostError, lambda: all_gather(comm), "rank 1", "call flux_tp.init and make modules anew", "restart the job")
    assert "rebuild" not in str(again)
    within(60, began)


def rank_1_is_late(comm):
    all_gather(comm)
    if comm.rank == 1:
        time.sleep(1.5 * float(os.environ["FLUX_TEST_SECONDS"]))
        return
    error = raises(flux_tp.TimeoutError, lambda: all_gather(comm))
    assert error.rank == 1 and isinstance(error, TimeoutError)


def rank_1_leaves(comm):
    all_gather(comm)
    if comm.rank == 1:
        comm.close()
        return
    assert raises(flux_tp.PeerLeftError, lambda: all_gather(comm), "rank 1").rank == 1
