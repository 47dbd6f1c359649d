"""Cases of what else of torch meets the ops: versions, derivatives, autocast, views from autograd; see ``ranks``."""

from __future__ import annotations

import numpy as np
import torch

import flux_tp
from cases_numpy import gathered, gathered_by_several, raises, row_parallel
from cases_torch import BF16, F16, init_distributed, place, tensors
from oracle import operand


def what_a_call_writes_is_noticed_by_autograd(comm):
    """Every place of a result: its version grows, and a backward pass that needs its old values refuses."""
    m = comm.world_size * 8
    *operands, _ = gathered(comm, m, 16, 32, dtype=np.float64)
    x, w, _ = tensors(BF16, *operands)
    y, x_full = x.new_zeros(m, 16), x.new_zeros(m, 32)
    x2, w2, b, residual, gain = tensors(BF16, *row_parallel(comm, flux_tp.matmul_reduce_scatter, m, 24, 40, np.float64)[0])
    in_place, y_norm = residual.clone(), torch.zeros_like(residual)
    xs, ws, _, _, _ = gathered_by_several(comm, m, [8 * comm.world_size] * 2, 32, dtype=np.float64)
    (xs, *ws) = tensors(BF16, xs, *ws)
    several = x.new_zeros(m, 8), x.new_zeros(m, 8), x.new_zeros(m, 32)
    whole = x.new_zeros(m, 24)
    calls = [
        ([y], lambda: flux_tp.all_gather_matmul(x, w, out=y)),
        ([y, x_full], lambda: flux_tp.all_gather_matmul(x, w, return_gathered=True, out=(y, x_full))),
        (several, lambda: flux_tp.all_gather_matmul(xs, ws, return_gathered=True, out=several)),
        ([in_place], lambda: flux_tp.matmul_reduce_scatter(x2, w2, b, in_place, out=in_place)),
        ([in_place, y_norm], lambda: flux_tp.matmul_reduce_scatter(x2, w2, b, in_place, (gain, 1e-3), out=(in_place, y_norm))),
        ([whole], lambda: flux_tp.matmul_all_reduce(x2, w2, out=whole)),
    ]
    for places, call in calls:
        factors = [torch.ones_like(written, requires_grad=True) for written in places]
        products, before = [(a * written).sum() for a, written in zip(factors, places)], [written._version for written in places]
        with torch.no_grad():
            call()
        assert all(written._version > version for written, version in zip(places, before, strict=True))
        for product in products:
            raises(RuntimeError, product.backward, "modified by an inplace operation")
        with torch.inference_mode():
            call()


def other_derivatives_are_refused(comm):
    """A second derivative, forward mode and torch.func: an error each, whichever operand asks; the first derivative is right."""
    init_distributed()
    m = comm.world_size * 8
    *operands, _ = gathered(comm, m, 16, 32, dtype=np.float64)
    x, w, _ = tensors(BF16, *operands)
    x2, w2 = tensors(BF16, *row_parallel(comm, flux_tp.matmul_all_reduce, m, 24, 40, np.float64)[0][:2])
    whole = flux_tp.ColumnParallelLinear(40, 16 * comm.world_size, sequence_parallel=False)
    calls = [
        (flux_tp.all_gather_matmul, x, w),
        (lambda x, *w: flux_tp.all_gather_matmul(x, list(w))[0], x, w, w.clone()),
        (flux_tp.matmul_reduce_scatter, x2, w2),
        (flux_tp.matmul_all_reduce, x2, w2),
        (lambda x, w: torch.func.functional_call(whole, {"weight": w}, x), x2, whole.weight.detach()),
    ]
    for call, *leaves in calls:
        # Of the sum the gradient of `x` depends on the weight alone.
        for loss in (torch.sum, lambda y: y.float().pow(2).sum()):
            leaves = [leaf.detach().requires_grad_() for leaf in leaves]
            plain = torch.autograd.grad(loss(call(*leaves)), leaves[0])[0]
            found = torch.autograd.grad(loss(call(*leaves)), leaves[0], create_graph=True)[0]
            assert torch.equal(found, plain)
            raises(RuntimeError, lambda: found.float().pow(2).sum().backward(), "differentiate twice", "once_differentiable")
        leaves = [leaf.detach() for leaf in leaves]
        refused, words = flux_tp.OperandError, ("x is a tensor of torch.func", "backward pass")
        raises(refused, lambda: torch.func.grad(lambda x: call(x, *leaves[1:]).float().sum())(leaves[0]), *words)
        raises(refused, lambda: torch.func.jvp(lambda x: call(x, *leaves[1:]), (leaves[0],), (leaves[0],)), *words)
        raises(refused, lambda: torch.func.vmap(lambda x: call(x, *leaves[1:]))(leaves[0][None]), *words)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(leaves[0], leaves[0])
            raises(refused, lambda: call(dual, *leaves[1:]), *words)


def autocast_casts(comm):
    """Operands in fp32 are cast as for torch's own linear, and gradients come back in fp32."""
    init_distributed()
    m = comm.world_size * 8
    *operands, _ = gathered(comm, m, 16, 32, True, dtype=np.float64)
    x, w, b = tensors(BF16, *operands)
    x2, w2, b2, residual, gain = tensors(BF16, *row_parallel(comm, flux_tp.matmul_reduce_scatter, m, 24, 40, np.float64)[0])

    def whole(x, w, b):
        module = flux_tp.ColumnParallelLinear(32, 16 * comm.world_size, sequence_parallel=False)
        return torch.func.functional_call(module, {"weight": w, "bias": b}, x)

    for call, *leaves in (
        (flux_tp.all_gather_matmul, x, w, b),
        (lambda x, w, b: flux_tp.all_gather_matmul(x, [w, w], [b, b])[1], x, w, b),
        (flux_tp.matmul_reduce_scatter, x2, w2, b2, residual),
        (whole, x, w, b),
    ):
        plain, cast = ([leaf.detach().to(dtype).requires_grad_() for leaf in leaves] for dtype in (BF16, torch.float32))
        expected = call(*plain)
        raises(flux_tp.OperandError, lambda: call(*cast), "x: its dtype", "torch.bfloat16")
        raises(flux_tp.OperandError, lambda: call(plain[0], plain[1].detach().to(F16), *plain[2:]), "weight")
        with torch.autocast(place().type, dtype=BF16):
            y = call(*cast)
        assert y.dtype == BF16 and torch.equal(y, expected)
        for result in (y, expected):
            result.float().sum().backward()
        assert all(leaf.grad.dtype == torch.float32 and torch.equal(leaf.grad.to(BF16), want.grad) for leaf, want in zip(cast, plain))
    with torch.no_grad(), torch.autocast(place().type, dtype=BF16):
        y, normalised = flux_tp.matmul_reduce_scatter(x2.float(), w2, norm=(gain.float(), 1e-3))
    assert y.dtype == normalised.dtype == BF16


def gradients_off_a_border_are_copied(comm):
    """A gradient is a view that begins two bytes into a buffer, or has strides: as good as any other."""
    init_distributed()
    m = comm.world_size * 8
    *operands, _ = gathered(comm, m, 16, 32, dtype=np.float64)
    x, w, _ = tensors(BF16, *operands)
    x2, w2 = tensors(BF16, *row_parallel(comm, flux_tp.matmul_reduce_scatter, m, 24, 40, np.float64)[0][:2])
    whole = flux_tp.ColumnParallelLinear(40, 16 * comm.world_size, sequence_parallel=False)
    calls = [
        (lambda x, w: flux_tp.all_gather_matmul(x, w, keep_gathered=True), x, w),
        (flux_tp.all_gather_matmul, x, w),
        (flux_tp.matmul_reduce_scatter, x2, w2),
        (flux_tp.matmul_all_reduce, x2, w2),
        (lambda x, w: torch.func.functional_call(whole, {"weight": w}, x), x2, whole.weight.detach()),
    ]
    for call, *leaves in calls:
        for needs in (slice(1), slice(2)):
            found = []
            # The gradient of the first is a buffer of its own, that of the others begins behind one element, or repeats one row.
            for join in (lambda y: y.flatten(), lambda y: torch.cat([y.new_ones(1, requires_grad=True), y.flatten()]), lambda y: y.t().flatten()):
                given = [leaf.detach().clone() for leaf in leaves]
                for leaf in given[needs]:
                    leaf.requires_grad_()
                join(call(*given)).square().sum().backward()
                found.append([leaf.grad for leaf in given[needs]])
            assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


def zero_rows_in_more_dimensions(comm):
    init_distributed()
    world = comm.world_size
    w, w2 = tensors(BF16, operand(1, 16, 32), operand(2, 24, 32))
    for lead in ((2 * world, 0), (0, 2), (2 * world, 2, 0)):
        x = w.new_empty(*lead, 32)
        wide, same, own = (lead[0] * world, *lead[1:]), lead, (lead[0] // world, *lead[1:])
        assert flux_tp.all_gather_matmul(x, w).shape == (*wide, 16)
        y, x_full = flux_tp.all_gather_matmul(x, w, return_gathered=True)
        assert y.shape == (*wide, 16) and x_full.shape == (*wide, 32)
        assert [y.shape for y in flux_tp.all_gather_matmul(x, [w, w2])] == [(*wide, 16), (*wide, 24)]
        assert flux_tp.matmul_reduce_scatter(x, w2).shape == (*own, 24)
        assert flux_tp.matmul_all_reduce(x, w2).shape == (*same, 24)
        if comm.device is None:
            zeros = np.zeros((*lead, 32), np.float16), np.ones((16, 32), np.float16)
            assert flux_tp.all_gather_matmul(*zeros).shape == (*wide, 16)
            assert flux_tp.all_gather_matmul(zeros[0], [zeros[1]] * 2)[1].shape == (*wide, 16)
            assert flux_tp.matmul_reduce_scatter(*zeros).shape == (*own, 16)
        for op in (flux_tp.all_gather_matmul, flux_tp.matmul_reduce_scatter, flux_tp.matmul_all_reduce):
            leaves = x.clone().requires_grad_(), w2.clone().requires_grad_()
            op(*leaves).float().sum().backward()
            assert leaves[0].grad.shape == x.shape and not leaves[1].grad.any()
    if world > 1:
        x = w.new_ones(world + 1, 2, 32)
        raises(flux_tp.OperandError, lambda: flux_tp.matmul_reduce_scatter(x, w), f"x is [{world + 1}, 2, k_r]", f"pad it to {2 * world}")
        raises(flux_tp.OperandError, lambda: flux_tp.all_gather_matmul(x, w, m=4 * world + 2), "give x as [rows, k]")


def batch_first_operands(comm):
    """``sequence_dim=1`` is the op between two transposes."""
    init_distributed()
    world = comm.world_size
    x, w, residual = tensors(BF16, operand(1 + comm.rank, 2, 4, 32), operand(2, 16, 32), operand(3, 2, 4, 16))
    for dim in (1, -2):
        y, x_full = flux_tp.all_gather_matmul(x, w, return_gathered=True, sequence_dim=dim)
        for found, part in ((y, flux_tp.all_gather_matmul(x.transpose(0, 1), w)), (x_full, None)):
            assert found.shape[:2] == (2, 4 * world) and (part is None or torch.equal(found, part.transpose(0, 1)))
        own = slice(4 * comm.rank, 4 * comm.rank + 4)
        assert torch.equal(x_full[:, own], x)
        assert all(torch.equal(y, other) for other in flux_tp.all_gather_matmul(x, [w, w], sequence_dim=dim))
        rows_first = flux_tp.matmul_reduce_scatter(x_full.transpose(0, 1), w, residual=residual.transpose(0, 1))
        z = flux_tp.matmul_reduce_scatter(x_full, w, residual=residual, sequence_dim=dim)
        assert z.shape == (2, 4, 16) and torch.equal(z, rows_first.transpose(0, 1))
    bad = flux_tp.OperandError
    for dim in (2, -1, 3):
        raises(bad, lambda: flux_tp.all_gather_matmul(x, w, sequence_dim=dim), f"sequence_dim = {dim}", "3 dimensions")
    raises(bad, lambda: flux_tp.matmul_reduce_scatter(x, w, sequence_dim=1, out=residual), "out=", "leave one out")
    up = flux_tp.ColumnParallelLinear(32, 16 * world, sequence_dim=1)
    down = flux_tp.RowParallelLinear(16 * world, 32, sequence_dim=1)
    h = up(x)
    assert h.shape == (2, 4 * world, 16) and down(h).shape == x.shape
    down(h).float().sum().backward()


def groups_of_another_kind(comm):
    """What is not a communicator, or not a ProcessGroup, is told what goes there."""
    init_distributed()
    x, w = tensors(BF16, operand(1, 8, 32), operand(2, 16, 32))
    for call in (lambda g: flux_tp.all_gather_matmul(x, w, group=g), lambda g: flux_tp.ColumnParallelLinear(32, 64, group=g), flux_tp.check):
        raises(flux_tp.OperandError, lambda: call(torch.distributed.group.WORLD), "group is a ProcessGroup", "flux_tp.init")
    mesh = torch.distributed.init_device_mesh(place().type, (comm.world_size,), mesh_dim_names=("tp",))
    raises(flux_tp.OperandError, lambda: flux_tp.init(mesh), "group is a DeviceMesh", "mesh.get_group()")
    raises(flux_tp.OperandError, lambda: flux_tp.init([0, 1]), "group is a list", "new_group")
    with flux_tp.init(mesh.get_group("tp"), transport="host" if comm.device is None else "auto") as other:
        assert (other.rank, other.world_size) == (comm.rank, comm.world_size)
