"""Cases of whole layers in training, and of what of torch wraps modules; see ``ranks``."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import flux_tp
from cases_torch import BF16, init_distributed, place, tensors
from oracle import operand


def attention_with_shared_heads(comm):
    """Grouped-query attention of all ranks is that of one, with its gradients, for KV heads that ranks share and others."""
    init_distributed()
    world, size, hidden, rows = comm.world_size, 8, 32, 4
    count = 4 * world
    for kv in {1, 2, world, 2 * world, 4}:
        heads = comm.heads(count, kv)
        x, wq, wk, wv, wo = tensors(
            torch.float64,
            operand(1, rows * world, hidden),
            operand(2, count, size, hidden) / 4,
            operand(3, kv, size, hidden) / 4,
            operand(4, kv, size, hidden) / 4,
            operand(5, hidden, count, size) / 4,
        )
        whole = [leaf.requires_grad_() for leaf in (wq, wk, wv, wo)]
        q, k, v = (torch.einsum("mk,hdk->hmd", x, w) for w in whole[:3])
        read = lambda of: of.repeat_interleave(count // kv, 0)
        y = torch.einsum("hmd,nhd->mn", F.scaled_dot_product_attention(q, read(k), read(v)), wo)
        y.sum().backward()

        own = [w[part].detach().flatten(0, 1).to(BF16).requires_grad_() for w, part in zip(whole, (heads.query, heads.kv, heads.kv))]
        out = wo[:, heads.query].detach().flatten(1).to(BF16).contiguous().requires_grad_()
        part = x[rows * comm.rank : rows * (comm.rank + 1)].to(BF16)
        q, k, v = (of.unflatten(1, (-1, size)).transpose(0, 1) for of in flux_tp.all_gather_matmul(part, own))
        found = F.scaled_dot_product_attention(q, k[heads.reads], v[heads.reads]).transpose(0, 1).flatten(1)
        flux_tp.matmul_reduce_scatter(found, out).sum().backward()
        flux_tp.sum_gradients(own[1:], heads=heads)
        for leaf, w, part in zip((*own, out), whole, (heads.query, heads.kv, heads.kv, heads.query)):
            grad = w.grad[:, part].flatten(1) if w is wo else w.grad[part].flatten(0, 1)
            # Several roundings to bfloat16 lie between.
            assert (leaf.grad.double() - grad).abs().max() <= 0.05 * grad.abs().max(), (kv, leaf.shape)


def gradients_of_own_rows_are_summed(comm):
    """The gain of a norm between split rows."""
    init_distributed()
    whole = torch.nn.RMSNorm(16, dtype=torch.float64, device=place())
    x = tensors(torch.float64, operand(1, 4 * comm.world_size, 16))[0]
    whole(x).square().sum().backward()
    norm, silent = torch.nn.RMSNorm(16, dtype=torch.float64, device=place()), torch.nn.Parameter(torch.ones(3, device=place()))
    norm(x[4 * comm.rank : 4 * comm.rank + 4]).square().sum().backward()
    flux_tp.sum_gradients([norm.weight, silent])
    torch.testing.assert_close(norm.weight.grad, whole.weight.grad)
    assert not silent.grad.any()


def step(model, x):
    model.zero_grad()
    y = model(x)
    y.float().square().mean().backward()
    return y.detach()


def mlp(comm):
    torch.manual_seed(3)
    return torch.nn.Sequential(
        flux_tp.ColumnParallelLinear(32, 16 * comm.world_size, activation="gelu"), flux_tp.RowParallelLinear(16 * comm.world_size, 32)
    )


def wrappers_of_torch(comm):
    """DDP and FSDP2 over groups of one rank, checkpoints of activations, and torch.export: the same values and gradients."""
    init_distributed()
    x, plain = tensors(BF16, operand(1 + comm.rank, 8, 32))[0], mlp(comm)
    y = step(plain, x)
    # Every rank makes every group.
    alone = [dist.new_group([rank]) for rank in range(comm.world_size)][comm.rank]
    mesh = dist.DeviceMesh.from_group(alone, place().type)
    copies = [
        DistributedDataParallel(mlp(comm), process_group=alone),
        fully_shard(mlp(comm), mesh=mesh),
        Checkpointed(mlp(comm)),
    ]
    for wrapped in copies:
        assert torch.equal(step(wrapped, x), y), type(wrapped)
        for parameter, other in zip(wrapped.parameters(), plain.parameters(), strict=True):
            grad = parameter.grad
            assert torch.equal(getattr(grad, "full_tensor", lambda: grad)(), other.grad), type(wrapped)
    with torch.no_grad():
        exported = torch.export.export(plain, (x,)).module()
        assert torch.equal(exported(x), plain(x))


class Checkpointed(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)
