"""What torch.distributed moves between ranks, for gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ._comm import Communicator, Heads, chosen
from .errors import FluxError, OperandError

__all__ = ["Rows", "all_reduce", "sum_gradients"]


# As torch.compile takes them: a result is valid once it is waited for.
_collectives = torch.ops._c10d_functional


class Rows:
    """Collectives of torch.distributed on ``m`` rows of all ranks, which may have one row more or less.

    A collective is begun by a call, and ended by a call of what that returns.
    """

    def __init__(self, m: int, comm: Communicator) -> None:
        self._m, self._world, self._rank = m, comm.world_size, comm.rank
        self._group = _process_group(comm).group_name if comm.world_size > 1 else None
        self._most = -(-m // self._world)
        self._counts = [m // self._world + (rank < m % self._world) for rank in range(self._world)]

    def gather(self, x: Tensor) -> Callable[[], Tensor]:
        """All rows, of each rank's own."""
        if self._world == 1:
            return lambda: x
        begun = _collectives.all_gather_into_tensor(self._padded(x.contiguous()), self._world, self._group)

        def finish() -> Tensor:
            gathered = _collectives.wait_tensor(begun)
            if self._m == gathered.shape[0]:
                return gathered
            return torch.cat([part[:count] for part, count in zip(gathered.split(self._most), self._counts)])

        return finish

    def scatter(self, x: Tensor) -> Callable[[], Tensor]:
        """This rank's rows of the sum."""
        if self._world == 1:
            return lambda: x
        if self._m % self._world:
            x = torch.cat([self._padded(part) for part in x.split(self._counts)])
        begun = _collectives.reduce_scatter_tensor(x.contiguous(), "sum", self._world, self._group)
        return lambda: _collectives.wait_tensor(begun)[: self._counts[self._rank]]

    def _padded(self, part: Tensor) -> Tensor:
        # The collectives take equal parts.
        return part if part.shape[0] == self._most else F.pad(part, (0, 0, 0, self._most - part.shape[0]))


def all_reduce(x: Tensor, op: str, group: Any) -> Tensor:
    """``sum`` or ``max`` of the ranks' tensors, in a new one; ``group``: a ProcessGroup, or a communicator."""
    group = _process_group(group) if isinstance(group, Communicator) else group
    return _collectives.wait_tensor(_collectives.all_reduce(x.contiguous(), op, group.group_name))


def _process_group(comm: Communicator) -> Any:
    """The ProcessGroup of the communicator's ranks."""
    if comm.group is not None:
        return comm.group
    if dist.is_initialized() and (dist.get_world_size(), dist.get_rank()) == (comm.world_size, comm.rank):
        return dist.group.WORLD
    raise FluxError(
        "gradients of weights move rows by torch.distributed, which does not know these ranks: call "
        "torch.distributed.init_process_group before the first step, or flux_tp.init with a ProcessGroup"
    )


@torch.no_grad()
def sum_gradients(parameters: Iterable[Tensor], group: Communicator | None = None, *, heads: Heads | None = None) -> None:
    """Sums gradients over the ranks, by torch.distributed; collective. Call it between the backward pass and the optimizer.

    For parameters that are the same on every rank and see only a rank's rows or heads, such as the gains of norms between
    sequence-parallel layers: each rank's gradient is that of its own rows. Weights of this package's layers and ops, and
    the bias of row-parallel ones, have whole gradients.

    Args:
        parameters: the same on every rank, in the same order. One without a gradient counts as zeros.
        group: the communicator; the first that :func:`flux_tp.init` made.
        heads: those of :meth:`flux_tp.Communicator.heads`, where the first dimension of the parameters are the rank's KV
            heads: ranks that have the same head get the sum for it.
    """
    comm = chosen(group)
    if comm.world_size == 1:
        return
    for parameter in parameters:
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        whole = own if heads is None else _among_all_heads(own, heads)
        dist.all_reduce(whole, group=_process_group(comm))
        parameter.grad = own if heads is None else whole[heads.kv].reshape(own.shape)


def _among_all_heads(own: Tensor, heads: Heads) -> Tensor:
    count = heads.kv.stop - heads.kv.start
    if not own.dim() or own.shape[0] % count:
        raise OperandError(f"a parameter is {list(own.shape)}: its first dimension is no multiple of the {count} KV heads of this rank")
    whole = own.new_zeros(heads.kv_count, own.numel() // count)
    whole[heads.kv] = own.reshape(count, -1)
    return whole
