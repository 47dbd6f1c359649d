"""Tensor-parallel linear layers as modules of PyTorch, with state dicts as of ``torch.nn.Linear``; Megatron-LM's load, too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ._arguments import ACTIVATIONS, GATED, check_gates, partials_number
from ._comm import Communicator, chosen
from ._ops import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from ._scales import Quantisable, check_groups, quantize_rows, quantized_weight, scaled_product
from ._torch import FUNCTIONS, copied_input_linear
from .errors import OperandError

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "quantize"]


class _ParallelLinear(Quantisable, nn.Module):
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
        sequence_dim: int,
        gates: str | None = None,
    ) -> None:
        super().__init__()
        dtype = torch.bfloat16 if dtype is None else dtype
        if dtype not in (torch.bfloat16, torch.float16):
            raise OperandError(f"dtype = {dtype}: give torch.bfloat16 or torch.float16")
        self.in_features, self.out_features = in_features, out_features
        self.sequence_parallel = sequence_parallel
        self.comm = chosen(group)
        self.sequence_dim, self._gates = sequence_dim, gates
        shape, halves = [out_features, in_features], 1 if gates is None else 2
        try:
            own = self.comm.features(shape[self._dim] // halves)
        except OperandError as error:
            raise OperandError(f"{('out_features', 'in_features')[self._dim]}: {error}") from None
        shape[self._dim] = halves * (own.stop - own.start)
        if device is None and self.comm.device is not None:
            device = torch.device("cuda", self.comm.device)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(self.weight.new_empty(shape[0])) if bias else None
        # What Megatron-LM's optimizers and checkpoints ask of a parameter.
        for parameter, split in ((self.weight, True), (self.bias, self._dim == 0)):
            if parameter is not None:
                parameter.tensor_model_parallel = split
                parameter.partition_dim = self._dim if split else -1
                parameter.partition_stride = 1
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the weight as ``torch.nn.Linear`` does; the bias is zero.

        Every rank draws the whole weight and keeps its part, so with one seed on all ranks the parts are those of one weight,
        whatever the number of ranks. The whole weight is in memory meanwhile.
        """
        own = self.weight.detach()
        # A single rank's part is the whole.
        whole = own if self.comm.world_size == 1 else own.new_empty(self.out_features, self.in_features)
        nn.init.kaiming_uniform_(whole, a=math.sqrt(5))
        if whole is not own:
            own.copy_(self._part(whole))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def _part(self, whole: Tensor) -> Tensor:
        """This rank's part of a weight, or of a bias that is split as its rows are."""
        features = whole.shape[self._dim]
        if self._gates is None:
            own = self.comm.features(features)
            return whole[own] if self._dim == 0 else whole[:, own]
        own = self.comm.features(features // 2)
        if self._gates.endswith("_interleaved"):
            return whole[2 * own.start : 2 * own.stop]
        return torch.cat([half[own] for half in whole.chunk(2)])

    def check_quantisable(self, form: str, name: str) -> None:
        """Refuses scales of a form that do not fit the layer of this name."""
        world = self.comm.world_size
        parts = {"out_features": (world if self._dim == 0 else 1) * (1 if self._gates is None else 2), "in_features": world if self._dim else 1}
        check_groups(name, form, {feature: (getattr(self, feature), count) for feature, count in parts.items()})

    def hold_quantised(self, form: str) -> None:
        """Holds the weight as ``weight`` and ``weight_scale``."""
        self._out_dtype = self.weight.dtype
        codes, scale = quantized_weight(self.weight, form)
        self.weight, self.weight_scale = (nn.Parameter(of, requires_grad=False) for of in (codes, scale))
        if self.bias is not None:
            self.bias.requires_grad_(False)
        self.scales = form

    def _quantized(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The input of a layer, and what the op takes with it."""
        if self.scales is None:
            return x, {}
        codes, scale = quantize_rows(x, self.scales, group=self.comm)
        return codes, {"scale_a": scale, "scale_b": self.weight_scale, "out_dtype": self._out_dtype}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *options: Any) -> None:
        # An empty entry of Megatron-LM's linear layers.
        state_dict.pop(prefix + "_extra_state", None)
        super()._load_from_state_dict(state_dict, prefix, *options)

    def extra_repr(self) -> str:
        words = [f"{name}={getattr(self, name)}" for name in ("in_features", "out_features", "sequence_parallel", "comm")]
        words += [f"scales={self.scales}"] * (self.scales is not None)
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

    ``sequence_dim=1``: the input is batch-first, ``[b, s_r, in_features]``, and the output ``[b, s, n_r]``.

    ``dtype``: ``torch.bfloat16``, which is the default, or ``torch.float16``. Under autocast inputs are cast.
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
        sequence_dim: int = 0,
    ) -> None:
        if activation is not None and activation not in ACTIVATIONS:
            raise OperandError(f"activation = {activation!r}: there are {', '.join(ACTIVATIONS)}")
        gates = activation if activation is not None and ACTIVATIONS[activation] in GATED else None
        if gates is not None:
            check_gates("out_features", out_features, chosen(group).world_size)
        super().__init__(in_features, out_features, bias, sequence_parallel, group, device, dtype, sequence_dim, gates)
        if gates is not None and not sequence_parallel and out_features % (16 * self.comm.world_size):
            text = f"out_features = {out_features}: without sequence_parallel gates take multiples of {16 * self.comm.world_size}"
            raise OperandError(text)
        self.activation, self.keep_gathered = activation, keep_gathered

    def forward(self, x: Tensor, m: int | None = None) -> Tensor:
        """``m``: rows of all ranks together, where ranks have different numbers of rows, as in :func:`flux_tp.all_gather_matmul`."""
        if not self.sequence_parallel:
            if m is not None:
                raise OperandError(f"m = {m}: without sequence_parallel every rank has all rows, leave it out")
            if self.scales is None:
                y = copied_input_linear(x, self.weight, self.bias, self.out_features, self.comm)
            else:
                codes, scale = quantize_rows(x, self.scales, carried=False, group=self.comm)
                y = scaled_product(codes, self.weight, scale, self.weight_scale, self.scales, self.bias, self._out_dtype)
            return FUNCTIONS[ACTIVATIONS[self.activation or "none"]](y)
        x, scales = self._quantized(x)
        options = {"m": m, "n": self.out_features, "keep_gathered": self.keep_gathered, "sequence_dim": self.sequence_dim, **scales}
        return all_gather_matmul(x, self.weight, self.bias, self.activation, self.comm, **options)


class RowParallelLinear(_ParallelLinear):
    """``y = scatter(sum over ranks of x @ weight.T) + bias``, with the input features split over the ranks.

    Input ``[m, ..., k_r]``, the rank's part of ``in_features``; output ``[m_r, ..., out_features]``, this rank's rows, or with
    ``sequence_parallel=False`` ``[m, ..., out_features]`` on every rank. Parameters: ``weight``
    ``[out_features, k_r]`` and ``bias`` ``[out_features]``, the same on every rank. The gradient of the
    bias is that of all rows: it needs no all-reduce over the ranks.

    ``partials="float32"``: ranks send partial sums in fp32, as in :func:`flux_tp.matmul_reduce_scatter`.

    ``sequence_dim``, ``dtype``: as of :class:`ColumnParallelLinear`.
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
        sequence_dim: int = 0,
    ) -> None:
        super().__init__(in_features, out_features, bias, sequence_parallel, group, device, dtype, sequence_dim)
        partials_number(partials)
        self.partials = partials

    def forward(self, x: Tensor) -> Tensor:
        x, scales = self._quantized(x)
        options = {"group": self.comm, "k": self.in_features, "partials": self.partials, **scales}
        if not self.sequence_parallel:
            return matmul_all_reduce(x, self.weight, self.bias, **options)
        return matmul_reduce_scatter(x, self.weight, self.bias, sequence_dim=self.sequence_dim, **options)


def quantize(module: nn.Module, scales: str = "row", *, keep: Callable[[str, nn.Module], bool] | None = None) -> nn.Module:
    """Has the parallel linear layers of a model compute in 8 bits, for inference: in place, and returned.

    A :class:`flux_tp.ColumnParallelLinear` or :class:`flux_tp.RowParallelLinear`, or a linear layer that
    :func:`flux_tp.parallelize` has split with ``mode="inference"``, then holds its weight in
    ``torch.float8_e4m3fn`` with ``weight_scale``, and quantises its input (:func:`quantize_rows`): ``"row"`` has a scale of each
    output channel and of each token, ``"block"`` of 128 x 128 of the weight and 1 x 128 of the input. Biases stay. What has
    whole inputs and is split by columns is multiplied by ``torch._scaled_mm``.

    Args:
        keep: layers, by name and module, that stay as they are.
    """
    if scales not in ("row", "block"):
        raise OperandError(f"scales = {scales!r}: give 'row' or 'block'")
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, Quantisable) and layer.scales is None}
    layers = {name: layer for name, layer in layers.items() if not (keep and keep(name, layer))}
    for name, layer in layers.items():
        layer.check_quantisable(scales, name or type(layer).__name__)
    for layer in layers.values():
        layer.hold_quantised(scales)
    return module
