"""How the two kinds of linear layers of a tensor-parallel layer are computed: flux, and the alternatives to it.

``x`` is ``[rows, in]`` and a weight ``[out, in]``. A mode is *sharded* where the rows between two layers are
split over the ranks: a column-parallel layer gathers them, a row-parallel one scatters its sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flux_tp

from .._autograd import CopiedInputLinear
from .models import Model
from .ranks import Ranks
from .weights import EPS, activate, norm

__all__ = ["MODES", "AllReduce", "Mode"]


class _Linear(torch.autograd.Function):
    """A linear layer of a mode that says its gradients itself."""

    @staticmethod
    def forward(ctx, x, weight, forward, backward):
        ctx.save_for_backward(x, weight)
        ctx.backward_of_mode = backward
        return forward(x, weight)

    @staticmethod
    def backward(ctx, dy):
        return *ctx.backward_of_mode(*ctx.saved_tensors, dy.contiguous()), None, None


class Mode:
    """One way, for ``m`` rows of ``hidden`` features. Methods ``*_backward`` return the gradients of ``x`` and ``weight``."""

    sharded = False

    def __init__(self, ranks: Ranks, m: int, hidden: int) -> None:
        self.ranks, self.m, self.hidden = ranks, m, hidden

    @staticmethod
    def why_not(ranks: Ranks, m: int, phase: str) -> str | None:
        """Why the mode cannot be measured, or ``None``."""
        return None

    def column(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._linear(x, weight, self.column_forward, self.column_backward)

    def mlp_column(self, model: Model, x: Tensor, weight: Tensor) -> Tensor:
        """The column-parallel layer of the MLP, and its activation."""
        return activate(model, self.column(x, weight))

    def row(self, x: Tensor, weight: Tensor) -> Tensor:
        return self._linear(x, weight, self.row_forward, self.row_backward)

    def row_residual(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """A row-parallel layer, added to the residual stream."""
        return residual + self.row(x, weight)

    def block_end(self, model: Model, x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The same, and the norm of the next column-parallel layer."""
        y = self.row_residual(x, weight, residual)
        return y, norm(model, y)

    def _linear(self, x: Tensor, weight: Tensor, forward: Callable, backward: Callable) -> Tensor:
        return _Linear.apply(x, weight, forward, backward) if torch.is_grad_enabled() else forward(x, weight)


class AllReduce(Mode):
    """NCCL's AllReduce after a row-parallel layer: what serving engines do."""

    def column_forward(self, x, weight):
        return F.linear(x, weight)

    def row_forward(self, x, weight):
        y = F.linear(x, weight)
        dist.all_reduce(y)
        return y

    def column_backward(self, x, weight, dy):
        dx = dy @ weight
        sum_of_dx = dist.all_reduce(dx, async_op=True)
        dweight = dy.t() @ x
        sum_of_dx.wait()
        return dx, dweight

    def row_backward(self, x, weight, dy):
        return dy @ weight, dy.t() @ x


class OneShot(AllReduce):
    """The AllReduce in one exchange over PyTorch's symmetric memory."""

    @staticmethod
    def why_not(ranks, m, phase):
        return "it has no gradient" if phase == "train" else ranks.why_no_symmetric_memory()

    def row_forward(self, x, weight):
        y = self.ranks.symmetric(self.m, self.hidden)
        torch.mm(x, weight.t(), out=y)
        return torch.ops.symm_mem.one_shot_all_reduce(y, "sum", self.ranks.group)


class TwoShot(OneShot):
    """The AllReduce in two exchanges over PyTorch's symmetric memory."""

    def row_forward(self, x, weight):
        y = self.ranks.symmetric(self.m, self.hidden)
        torch.mm(x, weight.t(), out=y)
        return torch.ops.symm_mem.two_shot_all_reduce_(y, "sum", self.ranks.group)


class SequenceParallel(Mode):
    """NCCL's AllGather and ReduceScatter, with Megatron-LM's overlaps in the backward pass.

    There ``x`` is gathered beside dgrad, and the ReduceScatter of ``dx`` runs beside wgrad. The gather of a row-parallel
    layer's ``dy`` is exposed, as it is there.
    """

    sharded = True

    @staticmethod
    def why_not(ranks, m, phase):
        return f"m = {m} is not a multiple of {ranks.world}" if m % ranks.world else None

    def gather(self, x: Tensor, async_op: bool = False):
        full = x.new_empty(self.m, x.shape[1])
        return full, dist.all_gather_into_tensor(full, x, async_op=async_op)

    def scatter(self, y: Tensor, async_op: bool = False):
        own = y.new_empty(self.m // self.ranks.world, y.shape[1])
        return own, dist.reduce_scatter_tensor(own, y, async_op=async_op)

    def column_forward(self, x, weight):
        return F.linear(self.gather(x)[0], weight)

    def row_forward(self, x, weight):
        return self.scatter(F.linear(x, weight))[0]

    def column_backward(self, x, weight, dy):
        full, gathered = self.gather(x, async_op=True)
        sums = dy @ weight
        gathered.wait()
        dx, scattered = self.scatter(sums, async_op=True)
        dweight = dy.t() @ full
        scattered.wait()
        return dx, dweight

    def row_backward(self, x, weight, dy):
        full = self.gather(dy)[0]
        return full @ weight, full.t() @ x


class AsyncTp(SequenceParallel):
    """The fused ops of PyTorch's symmetric memory; a column-parallel layer's ``x`` is gathered by NCCL beside its dgrad."""

    @staticmethod
    def why_not(ranks, m, phase):
        return SequenceParallel.why_not(ranks, m, phase) or ranks.why_no_symmetric_memory()

    def fused_gather(self, x: Tensor, weight: Tensor, gathered: bool):
        return torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], gather_dim=0, group_name=self.ranks.group, return_A=gathered)

    def fused_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", scatter_dim=0, group_name=self.ranks.group)

    def column_forward(self, x, weight):
        return self.fused_gather(x, weight.t(), False)[1][0]

    def row_forward(self, x, weight):
        return self.fused_scatter(x, weight.t())

    def column_backward(self, x, weight, dy):
        full, gathered = self.gather(x, async_op=True)
        dx = self.fused_scatter(dy, weight)
        gathered.wait()
        return dx, dy.t() @ full

    def row_backward(self, x, weight, dy):
        full, (dx,) = self.fused_gather(dy, weight, True)
        return dx, full.t() @ x


class NoCollectives(AllReduce):
    """The same GEMMs without any exchange: wrong results in the least time. The bound of the unsharded layout."""

    def row_forward(self, x, weight):
        return F.linear(x, weight)

    def column_backward(self, x, weight, dy):
        return dy @ weight, dy.t() @ x


class NoCollectivesSharded(Mode):
    """The bound of the sharded layout: instead of gathered rows a buffer of random ones is read, and sums are cut."""

    sharded = True

    def __init__(self, ranks, m, hidden):
        super().__init__(ranks, m, hidden)
        self.full = torch.empty(m, hidden, dtype=torch.bfloat16, device=ranks.device).normal_()
        self.own = ranks.own(m)

    def column_forward(self, x, weight):
        return F.linear(self.full, weight)

    def row_forward(self, x, weight):
        return F.linear(x, weight)[self.own]

    def column_backward(self, x, weight, dy):
        return (dy @ weight)[self.own], dy.t() @ self.full

    def row_backward(self, x, weight, dy):
        return self.full @ weight, self.full.t() @ x


class Flux(Mode):
    """flux_tp: the row-parallel op adds the residual. In inference it also normalises, where the model has RMSNorms."""

    op = staticmethod(flux_tp.matmul_reduce_scatter)

    def __init__(self, ranks, m, hidden):
        super().__init__(ranks, m, hidden)
        self.gain = torch.ones(hidden, dtype=torch.bfloat16, device=ranks.device)

    def row_residual(self, x, weight, residual):
        return self.op(x, weight, residual=residual, group=self.ranks.comm)

    def block_end(self, model, x, weight, residual):
        if torch.is_grad_enabled() or not model.gated:
            return super().block_end(model, x, weight, residual)
        return self.op(x, weight, residual=residual, norm=(self.gain, EPS), group=self.ranks.comm)


class FluxAllReduce(Flux):
    """flux_tp with whole rows: a GEMM, then GEMM-AllReduce. Gradients are those of flux_tp."""

    op = staticmethod(flux_tp.matmul_all_reduce)

    def column(self, x, weight):
        if not torch.is_grad_enabled():
            return F.linear(x, weight)
        return CopiedInputLinear.apply(x, weight, None, weight.shape[0] * self.ranks.world, self.ranks.comm)


class FluxSharded(Flux):
    """flux_tp with split rows: AllGather-GEMM, in inference with the MLP's activation, then GEMM-ReduceScatter.

    Gradients are those of flux_tp.
    """

    sharded = True

    def column(self, x, weight):
        return flux_tp.all_gather_matmul(x, weight, group=self.ranks.comm, m=self.m)

    def mlp_column(self, model, x, weight):
        if torch.is_grad_enabled():
            return super().mlp_column(model, x, weight)
        activation = "swiglu" if model.gated else "gelu"
        return flux_tp.all_gather_matmul(x, weight, activation=activation, group=self.ranks.comm, m=self.m)


class FluxKept(FluxSharded):
    """The same in training, where column-parallel layers keep the gathered ``x`` for the backward pass."""

    @staticmethod
    def why_not(ranks, m, phase):
        return None if phase == "train" else "it differs from flux in training alone"

    def column(self, x, weight):
        return flux_tp.all_gather_matmul(x, weight, group=self.ranks.comm, m=self.m, keep_gathered=True)


MODES: dict[str, Callable[[str], type[Mode]]] = {
    # A decoded batch is small: its rows are not worth splitting.
    "none": lambda phase: NoCollectives if phase == "decode" else NoCollectivesSharded,
    "ar": lambda phase: AllReduce,
    "one_shot": lambda phase: OneShot,
    "two_shot": lambda phase: TwoShot,
    "sp": lambda phase: SequenceParallel,
    "async_tp": lambda phase: AsyncTp,
    "flux": lambda phase: FluxAllReduce if phase == "decode" else FluxSharded,
    # Not measured unless asked for: the two layouts, and the backward pass that gathers nothing.
    "flux_ar": lambda phase: FluxAllReduce,
    "flux_sp": lambda phase: FluxSharded,
    "flux_kept": lambda phase: FluxKept,
}
"""The mode of each name, by phase."""
