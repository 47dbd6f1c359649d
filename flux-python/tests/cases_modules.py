"""Cases of the modules; see ``ranks``."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from types import SimpleNamespace
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist

import flux_tp
from cases_gradients import near, without_collectives
from cases_numpy import raises
from cases_torch import BF16, init_distributed, numbers, tensors
from oracle import operand, rows


def modules(comm):
    """An MLP of both modules: shapes, state dicts, one step that lowers the loss."""
    init_distributed()
    torch.manual_seed(comm.rank)
    up = flux_tp.ColumnParallelLinear(32, 16 * comm.world_size, activation="gelu")
    down = flux_tp.RowParallelLinear(16 * comm.world_size, 24, partials="float32")
    assert up.weight.shape == (16, 32) and down.weight.shape == (24, 16)
    assert list(up.state_dict()) == ["weight", "bias"]
    other = copy.deepcopy(up.state_dict())
    up.load_state_dict(torch.nn.Linear(32, 16, dtype=BF16).state_dict(), strict=True)
    # As Megatron-LM's, also within another module.
    torch.nn.Sequential(up).load_state_dict({f"0.{name}": value for name, value in {**other, "_extra_state": None}.items()}, strict=True)
    raises(flux_tp.OperandError, lambda: flux_tp.ColumnParallelLinear(32, 16 * comm.world_size + 4), "out_features", "pad them to")
    gated = lambda: flux_tp.ColumnParallelLinear(32, 16 * comm.world_size + 1, activation="swiglu")
    raises(flux_tp.OperandError, gated, "out_features", f"pad each with zeros to {8 * comm.world_size + 8}")
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
    kept = flux_tp.ColumnParallelLinear(32, 16 * comm.world_size, activation="gelu", keep_gathered=True)
    kept.load_state_dict(other)
    up.load_state_dict(other)
    dy = torch.randn_like(up(x).detach())
    up.zero_grad()
    up(x).backward(dy)
    with without_collectives():
        kept(x).backward(dy)
    near(kept.weight.grad, numbers(up.weight.grad), np.abs(numbers(up.weight.grad)))


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
    for whole, keep in ((True, False), (False, False), (False, True)):
        up = flux_tp.ColumnParallelLinear(32, inner, activation="relu", sequence_parallel=not whole, keep_gathered=keep)
        down = flux_tp.RowParallelLinear(inner, 24, sequence_parallel=not whole)
        for module, weight in ((up, w1[part]), (down, w2[:, part])):
            module.load_state_dict({"weight": torch.from_numpy(weight), "bias": torch.zeros_like(module.bias), "_extra_state": None})
        own = slice(m) if whole else rows(world, rank, m)
        X = tensors(BF16, x[own])[0].requires_grad_()
        # Rows of all ranks are not a multiple of those of one.
        h = up(X) if whole else torch.relu(flux_tp.all_gather_matmul(X, up.weight, up.bias, m=m, n=inner, keep_gathered=keep))
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


def copies_of_modules_share_the_communicator(comm):
    """Copies work and may go; what is pickled is told what to save."""
    init_distributed()
    inner = flux_tp.init(transport="host" if comm.device is None else "auto", max_m=64, device=comm.device)
    layer = flux_tp.ColumnParallelLinear(32, 16 * comm.world_size, group=inner)
    x = tensors(BF16, operand(1, 8, 32))[0]
    expected = layer(x)
    for copied in (copy.deepcopy(layer), copy.copy(layer), copy.deepcopy(torch.nn.Sequential(layer)), copy.copy(inner), copy.deepcopy(inner)):
        if isinstance(copied, torch.nn.Module):
            assert torch.equal(copied(x), expected)
        else:
            assert copied is inner
        del copied
        gc.collect()
        assert torch.equal(layer(x), expected)
    for save in (pickle.dumps, lambda of: torch.save(of, io.BytesIO())):
        for of in (layer, inner):
            raises(flux_tp.FluxError, lambda: save(of), "cannot be pickled", "state_dict()")
    torch.save(layer.state_dict(), io.BytesIO())


def modules_refuse_other_dtypes(comm):
    for module in (flux_tp.ColumnParallelLinear, flux_tp.RowParallelLinear):
        raises(flux_tp.OperandError, lambda: module(64, 64, dtype=torch.float32), "dtype = torch.float32", "torch.bfloat16")


def one_seed_is_one_model(comm):
    """With one seed the parts of all ranks are those of torch's own weight, whatever their number."""
    outs, ins = 64, 96
    for world in (1, 2, 4, comm.world_size):
        for activation in (None, "swiglu", "swiglu_interleaved"):
            parts = {"column": [], "row": []}
            for rank in range(world):
                member = SimpleNamespace(rank=rank, world_size=world, device=None)
                member.features = flux_tp.Communicator.features.__get__(member)
                with StandIn(member):
                    torch.manual_seed(5)
                    parts["column"].append(flux_tp.ColumnParallelLinear(ins, outs, activation=activation, device="cpu").weight.detach())
                    parts["row"].append(flux_tp.RowParallelLinear(ins, outs, device="cpu").weight.detach())
            torch.manual_seed(5)
            column, row = (torch.nn.Linear(ins, outs, bias=False, dtype=BF16).weight.detach() for _ in range(2))
            if activation == "swiglu":
                halves = zip(*(part.chunk(2) for part in parts["column"]))
                whole = torch.cat([part for half in halves for part in half])
            else:
                whole = torch.cat(parts["column"])
            assert torch.equal(whole, column) and torch.equal(torch.cat(parts["row"], 1), row)


class StandIn:
    """A communicator of another number of ranks as the default."""

    def __init__(self, member):
        self._patch = mock.patch("flux_tp.nn.chosen", lambda group: member)

    def __enter__(self):
        self._patch.start()

    def __exit__(self, *error):
        self._patch.stop()


def modules_of_unequal_rows(comm):
    """Without ``m`` an error that names it; with it the rows of ``tensor_split``. The communicator lives."""
    init_distributed()
    world, m = comm.world_size, 4 * comm.world_size + 1
    if world == 1:
        return
    torch.manual_seed(0)
    # A shape that no other case has built: the ranks compare their rows as an op is built.
    up, down = flux_tp.ColumnParallelLinear(88, 16 * world), flux_tp.RowParallelLinear(16 * world, 40)
    x = tensors(BF16, operand(1, m, 88))[0]
    own = x.tensor_split(world)[comm.rank].requires_grad_()
    raises(flux_tp.DisagreedError, lambda: up(own), "m=", str(4 * world), str(5 * world))
    y = down(up(own, m=m))
    assert y.shape == (own.shape[0], 40)
    y.float().sum().backward()
    whole = flux_tp.ColumnParallelLinear(88, 16 * world, sequence_parallel=False)
    raises(flux_tp.OperandError, lambda: whole(x, m=m), "leave it out")
