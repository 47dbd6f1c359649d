"""How the two kinds of linear layers of a tensor-parallel layer are computed: flux, and the alternatives to it.

``x`` is ``[rows, in]`` and a weight ``[out, in]``, both of bf16, or of 8 bits with scales (:mod:`.fp8`). A mode is
*sharded* where the rows between two layers are split over the ranks: a column-parallel layer gathers them, a
row-parallel one scatters its sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import flux_tp

from .. import quantize_rows
from .._autograd import CopiedInputLinear
from . import fp8
from .fp8 import Rows, Weight, quantized
from .models import Model
from .ranks import Ranks
from .weights import EPS, activate, norm

__all__ = ["MODES", "AllReduce", "Calibrating", "Dequantised", "Mode"]


def _product(x: Tensor | Rows, weight: Tensor | Weight, out: Tensor | None = None) -> Tensor:
    if isinstance(weight, Weight):
        return fp8.product(x, weight, out)
    return F.linear(x, weight) if out is None else torch.mm(x, weight.t(), out=out)


def _operands(x: Tensor | Rows, weight: Tensor | Weight) -> tuple[tuple[Tensor, Tensor], dict[str, Tensor]]:
    """What an op of flux_tp takes."""
    if isinstance(weight, Weight):
        return (x.codes, weight.codes), {"scale_a": x.scale, "scale_b": weight.scale}
    return (x, weight), {}


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
    """One way, for ``m`` rows of a model. Methods ``*_backward`` return the gradients of ``x`` and ``weight``.

    ``form``: that of the scales of 8-bit operands; ``None`` for bf16.
    """

    sharded = False
    column_carried = False
    """Whether rows carry their scales into a column-parallel layer. Products of torch take scales of their own."""
    row_carried = False
    """The same of a row-parallel layer."""

    def __init__(self, ranks: Ranks, m: int, model: Model, form: str | None = None) -> None:
        self.ranks, self.m, self.model, self.form = ranks, m, model, form
        self.gain = torch.ones(model.hidden, dtype=torch.bfloat16, device=ranks.device)

    @staticmethod
    def why_not(ranks: Ranks, m: int, phase: str, form: str | None) -> str | None:
        """Why the mode cannot be measured, or ``None``."""
        return None

    def normed(self, x: Tensor) -> Tensor:
        """The norm before a column-parallel layer. With 8 bits it is part of what quantises the layer's input."""
        return norm(self.model, x) if self.form is None else x

    def column_input(self, x: Tensor | Rows, weight: Tensor | Weight) -> Tensor | Rows:
        if self.form is None or isinstance(x, Rows):
            return x
        if self.model.gated:
            return quantized(self.ranks.comm, x, weight, self.column_carried, (self.gain, EPS))
        return quantized(self.ranks.comm, norm(self.model, x), weight, self.column_carried)

    def row_input(self, x: Tensor, weight: Tensor | Weight) -> Tensor | Rows:
        return x if self.form is None else quantized(self.ranks.comm, x, weight, self.row_carried)

    def column(self, x: Tensor | Rows, weight: Tensor | Weight) -> Tensor:
        return self._linear(self.column_input(x, weight), weight, self.column_forward, self.column_backward)

    def mlp_column(self, x: Tensor | Rows, weight: Tensor | Weight) -> Tensor:
        """The column-parallel layer of the MLP, and its activation."""
        return activate(self.model, self.column(x, weight))

    def row(self, x: Tensor, weight: Tensor | Weight) -> Tensor:
        return self._linear(self.row_input(x, weight), weight, self.row_forward, self.row_backward)

    def row_residual(self, x: Tensor, weight: Tensor | Weight, residual: Tensor) -> Tensor:
        """A row-parallel layer, added to the residual stream."""
        return residual + self.row(x, weight)

    def block_end(self, x: Tensor, weight: Tensor | Weight, residual: Tensor, following: Tensor | Weight) -> tuple[Tensor, Tensor | Rows]:
        """The same, and the norm of the next column-parallel layer, whose weight is ``following``."""
        y = self.row_residual(x, weight, residual)
        return y, self.normed(y)

    def _linear(self, x: Tensor | Rows, weight: Tensor | Weight, forward: Callable, backward: Callable) -> Tensor:
        return _Linear.apply(x, weight, forward, backward) if torch.is_grad_enabled() else forward(x, weight)


class AllReduce(Mode):
    """NCCL's AllReduce after a row-parallel layer: what serving engines do."""

    def column_forward(self, x, weight):
        return _product(x, weight)

    def row_forward(self, x, weight):
        y = _product(x, weight)
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


class Calibrating(AllReduce):
    """The same in fp32, which also finds the largest magnitude of each layer's input on this rank."""

    def __init__(self, ranks, m, model):
        super().__init__(ranks, m, model)
        self.largest: list[float] = []

    def column_forward(self, x, weight):
        self.largest.append(x.abs().max().item())
        return super().column_forward(x, weight)

    def row_forward(self, x, weight):
        self.largest.append(x.abs().max().item())
        return super().row_forward(x, weight)


class Dequantised(AllReduce):
    """The AllReduce of products in fp32 of what 8-bit operands hold, rounded to bf16."""

    def column_forward(self, x, weight):
        return F.linear(x.wide(), weight.wide()).to(torch.bfloat16)

    def row_forward(self, x, weight):
        y = self.column_forward(x, weight)
        dist.all_reduce(y)
        return y


class OneShot(AllReduce):
    """The AllReduce in one exchange over PyTorch's symmetric memory."""

    @staticmethod
    def why_not(ranks, m, phase, form):
        return "it has no gradient" if phase == "train" else ranks.why_no_symmetric_memory()

    def row_forward(self, x, weight):
        y = _product(x, weight, self.ranks.symmetric(self.m, self.model.hidden))
        return torch.ops.symm_mem.one_shot_all_reduce(y, "sum", self.ranks.group)


class TwoShot(OneShot):
    """The AllReduce in two exchanges over PyTorch's symmetric memory."""

    def row_forward(self, x, weight):
        y = _product(x, weight, self.ranks.symmetric(self.m, self.model.hidden))
        return torch.ops.symm_mem.two_shot_all_reduce_(y, "sum", self.ranks.group)


class SequenceParallel(Mode):
    """NCCL's AllGather and ReduceScatter, with Megatron-LM's overlaps in the backward pass.

    There ``x`` is gathered beside dgrad, and the ReduceScatter of ``dx`` runs beside wgrad. The gather of a row-parallel
    layer's ``dy`` is exposed, as it is there.
    """

    sharded = True
    column_carried = True

    @staticmethod
    def why_not(ranks, m, phase, form):
        return f"m = {m} is not a multiple of {ranks.world}" if m % ranks.world else None

    def gather(self, x: Tensor, async_op: bool = False):
        full = x.new_empty(self.m, x.shape[1])
        return full, dist.all_gather_into_tensor(full, x, async_op=async_op)

    def scatter(self, y: Tensor, async_op: bool = False):
        own = y.new_empty(self.m // self.ranks.world, y.shape[1])
        return own, dist.reduce_scatter_tensor(own, y, async_op=async_op)

    def column_forward(self, x, weight):
        # One collective gathers codes and scales.
        full = x.gathered(self.gather(x.carried())[0]) if isinstance(x, Rows) else self.gather(x)[0]
        return _product(full, weight)

    def row_forward(self, x, weight):
        return self.scatter(_product(x, weight))[0]

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

    column_carried = False

    @staticmethod
    def why_not(ranks, m, phase, form):
        if form not in (None, "tensor", "row"):
            return "the fused ops have no scales of blocks"
        return SequenceParallel.why_not(ranks, m, phase, form) or ranks.why_no_symmetric_memory()

    def fused_gather(self, x: Tensor, weight: Tensor, gathered: bool):
        return torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], gather_dim=0, group_name=self.ranks.group, return_A=gathered)

    def fused_scatter(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight, "sum", scatter_dim=0, group_name=self.ranks.group)

    def column_forward(self, x, weight):
        if not isinstance(weight, Weight):
            return self.fused_gather(x, weight.t(), False)[1][0]
        rows, weights = (x.codes, [weight.codes.t()]), (x.scale, [weight.scale])
        options = [None], [None], [torch.bfloat16], [False]
        return torch.ops.symm_mem.fused_all_gather_scaled_matmul(*rows, *weights, 0, self.ranks.group, *options)[1][0]

    def row_forward(self, x, weight):
        if not isinstance(weight, Weight):
            return self.fused_scatter(x, weight.t())
        given, whole = (x.codes, weight.codes.t(), x.scale, weight.scale), [self.m, weight.codes.shape[0]]
        return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            *given, "sum", 0, 0, self.ranks.group, whole, out_dtype=torch.bfloat16
        )

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
        return _product(x, weight)

    def column_backward(self, x, weight, dy):
        return dy @ weight, dy.t() @ x


class NoCollectivesSharded(Mode):
    """The bound of the sharded layout: instead of gathered rows a buffer of random ones is read, and sums are cut."""

    sharded = True

    def __init__(self, ranks, m, model, form=None):
        super().__init__(ranks, m, model, form)
        self.full = torch.empty(m, model.hidden, dtype=torch.bfloat16, device=ranks.device).normal_()
        if form is not None:
            scales = torch.full((1,), 2.0**-6, device=ranks.device) if form == "tensor" else form
            self.full = Rows(*quantize_rows(self.full, scales, carried=False, group=ranks.comm), form)
        self.own = ranks.own(m)

    def column_forward(self, x, weight):
        return _product(self.full, weight)

    def row_forward(self, x, weight):
        return _product(x, weight)[self.own]

    def column_backward(self, x, weight, dy):
        return (dy @ weight)[self.own], dy.t() @ self.full

    def row_backward(self, x, weight, dy):
        return self.full @ weight, self.full.t() @ x


class Flux(Mode):
    """flux_tp: the row-parallel op adds the residual. In inference it also writes the RMSNorm as the next layer's input."""

    op = staticmethod(flux_tp.matmul_reduce_scatter)
    row_carried = True

    def row_residual(self, x, weight, residual):
        operands, scales = _operands(self.row_input(x, weight), weight)
        return self.op(*operands, residual=residual, group=self.ranks.comm, **scales)

    def block_end(self, x, weight, residual, following):
        if torch.is_grad_enabled() or not self.model.gated:
            return super().block_end(x, weight, residual, following)
        operands, scales = _operands(self.row_input(x, weight), weight)
        options = {"residual": residual, "norm": (self.gain, EPS), "group": self.ranks.comm, **scales}
        if self.form is None:
            return self.op(*operands, **options)
        y, *rows = self.op(*operands, **options, norm_scales=following.scales_of_input, norm_carried=self.column_carried)
        return y, Rows(*rows, following.form)


class FluxAllReduce(Flux):
    """flux_tp with whole rows: a GEMM, then GEMM-AllReduce. Gradients are those of flux_tp."""

    op = staticmethod(flux_tp.matmul_all_reduce)

    def column(self, x, weight):
        if not torch.is_grad_enabled():
            return _product(self.column_input(x, weight), weight)
        return CopiedInputLinear.apply(x, weight, None, weight.shape[0] * self.ranks.world, self.ranks.comm)


class FluxSharded(Flux):
    """flux_tp with split rows: AllGather-GEMM, in inference with the MLP's activation, then GEMM-ReduceScatter.

    Gradients are those of flux_tp.
    """

    sharded = True
    column_carried = True

    def column(self, x, weight, activation=None):
        operands, scales = _operands(self.column_input(x, weight), weight)
        return flux_tp.all_gather_matmul(*operands, activation=activation, group=self.ranks.comm, m=self.m, **scales)

    def mlp_column(self, x, weight):
        if torch.is_grad_enabled():
            return super().mlp_column(x, weight)
        return self.column(x, weight, "swiglu" if self.model.gated else "gelu")


class FluxKept(FluxSharded):
    """The same in training, where column-parallel layers keep the gathered ``x`` for the backward pass."""

    @staticmethod
    def why_not(ranks, m, phase, form):
        return None if phase == "train" else "it differs from flux in training alone"

    def column(self, x, weight):
        return flux_tp.all_gather_matmul(x, weight, group=self.ranks.comm, m=self.m, keep_gathered=True)


MODES: dict[str, Callable[[str], type[Mode]]] = {
    # Serving engines decode with whole rows.
    "none": lambda phase: NoCollectives if phase == "decode" else NoCollectivesSharded,
    "ar": lambda phase: AllReduce,
    "one_shot": lambda phase: OneShot,
    "two_shot": lambda phase: TwoShot,
    "sp": lambda phase: SequenceParallel,
    "async_tp": lambda phase: AsyncTp,
    "flux": lambda phase: FluxAllReduce if phase == "decode" else FluxSharded,
    # In bf16, beside the others in 8 bits.
    "flux_bf16": lambda phase: FluxAllReduce if phase == "decode" else FluxSharded,
    # Not measured unless asked for: the two layouts, and the backward pass that gathers nothing.
    "flux_ar": lambda phase: FluxAllReduce,
    "flux_sp": lambda phase: FluxSharded,
    "flux_kept": lambda phase: FluxKept,
}
"""The mode of each name, by phase."""
