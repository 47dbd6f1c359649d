"""Tensor-parallel linear layers as modules of PyTorch, with state dicts as Megatron-LM's."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ._autograd import CopiedInputLinear
from ._comm import Communicator, default
from ._ops import ACTIVATIONS, GATED, all_gather_matmul, check_gates, matmul_all_reduce, matmul_reduce_scatter, partials_number
from ._torch import FUNCTIONS
from .errors import OperandError

__all__ = ["ColumnParallelLinear", "RowParallelLinear"]


class _ParallelLinear(nn.Module):
    """One rank's part of a linear layer whose weight is split along ``_dim``, in ``halves`` that are split alike."""

    _dim: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        sequence_parallel: bool,
        group: Communicator | None,
        device: Any,
        dtype: torch.dtype | None,
        halves: int = 1,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel
        self.comm = group or default()
        shape = [out_features, in_features]
        try:
            own = self.comm.features(shape[self._dim] // halves)
        except OperandError as error:
            raise OperandError(f"{('out_features', 'in_features')[self._dim]}: {error}") from None
        shape[self._dim] = halves * (own.stop - own.start)
        if device is None and self.comm.device is not None:
            device = torch.device("cuda", self.comm.device)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype or torch.bfloat16))
        self.bias = nn.Parameter(self.weight.new_empty(shape[0])) if bias else None
        # What Megatron-LM's optimizers and checkpoints ask of a parameter.
        for parameter, split in ((self.weight, True), (self.bias, self._dim == 0)):
            if parameter is not None:
                parameter.tensor_model_parallel = split
                parameter.partition_dim = self._dim if split else -1
                parameter.partition_stride = 1
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight as ``torch.nn.Linear`` does, from this rank's generator; the bias is zero, alike on every rank."""
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    # Megatron-LM's linear layers have this entry, too.
    def get_extra_state(self) -> None:
        """Returns nothing; makes the entry ``_extra_state`` that Megatron-LM's state dicts have."""

    def set_extra_state(self, state: Any) -> None:
        """Ignores the entry."""

    def extra_repr(self) -> str:
        words = [f"{name}={getattr(self, name)}" for name in ("in_features", "out_features", "sequence_parallel", "comm")]
        return ", ".join([*words, f"bias={self.bias is not None}"])


class ColumnParallelLinear(_ParallelLinear):
    """``y = activation(gather(x) @ weight.T + bias)``, with the output features split over the ranks.

    Input ``[m_r, ..., in_features]``, this rank's rows; output ``[m, ..., n_r]``, the rank's part of ``out_features``
    (:meth:`flux_tp.Communicator.features`). Parameters: ``weight`` ``[n_r, in_features]`` and ``bias`` ``[n_r]``, on the
    communicator's device.

    ``sequence_parallel=False``: every rank has the whole input ``[m, ..., in_features]``, and nothing is gathered. The
    gradient of the input is summed over the ranks by ``matmul_all_reduce``.

    ``keep_gathered=True``: the forward pass keeps the gathered input, ``[m, in_features]`` in place of ``[m_r, in_features]``,
    and the backward pass gathers nothing. Nothing is kept where the weight needs no gradient. The same on every rank.

    ``activation``: as in :func:`flux_tp.all_gather_matmul`; with gates the output has half as many columns. A rank then has
    the part of ``out_features // 2`` of the gates and of the ups, so its output is the input of a ``RowParallelLinear`` of as
    many ``in_features``.
    Fused where no gradient is needed.
    """

    _dim = 0

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = True,
        activation: str | None = None,
        keep_gathered: bool = False,
        group: Communicator | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if activation is not None and activation not in ACTIVATIONS:
            raise OperandError(f"activation = {activation!r}: there are {', '.join(ACTIVATIONS)}")
        halves = 2 if activation is not None and ACTIVATIONS[activation] in GATED else 1
        if halves == 2:
            check_gates("out_features", out_features, (group or default()).world_size)
        super().__init__(in_features, out_features, bias, sequence_parallel, group, device, dtype, halves)
        if halves == 2 and not sequence_parallel and out_features % (16 * self.comm.world_size):
            text = f"out_features = {out_features}: without sequence_parallel gates take multiples of {16 * self.comm.world_size}"
            raise OperandError(text)
        self.activation, self.keep_gathered = activation, keep_gathered

    def forward(self, x: Tensor) -> Tensor:
        if not self.sequence_parallel:
            y = CopiedInputLinear.apply(x, self.weight, self.bias, self.out_features, self.comm.id)
            return FUNCTIONS[ACTIVATIONS[self.activation or "none"]](y)
        options = {"n": self.out_features, "keep_gathered": self.keep_gathered}
        return all_gather_matmul(x, self.weight, self.bias, self.activation, self.comm, **options)


class RowParallelLinear(_ParallelLinear):
    """``y = scatter(sum over ranks of x @ weight.T) + bias``, with the input features split over the ranks.

    Input ``[m, ..., k_r]``, the rank's part of ``in_features``; output ``[m_r, ..., out_features]``, this rank's rows, or with
    ``sequence_parallel=False`` ``[m, ..., out_features]`` on every rank. Parameters: ``weight``
    ``[out_features, k_r]`` and ``bias`` ``[out_features]``, the same on every rank. The gradient of the
    bias is that of all rows: it needs no all-reduce over the ranks.

    ``partials="float32"``: ranks send partial sums in fp32, as in :func:`flux_tp.matmul_reduce_scatter`.
    """

    _dim = 1

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sequence_parallel: bool = True,
        partials: str | None = None,
        group: Communicator | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, sequence_parallel, group, device, dtype)
        partials_number(partials)
        self.partials = partials

    def forward(self, x: Tensor) -> Tensor:
        op = matmul_reduce_scatter if self.sequence_parallel else matmul_all_reduce
        return op(x, self.weight, self.bias, group=self.comm, k=self.in_features, partials=self.partials)
