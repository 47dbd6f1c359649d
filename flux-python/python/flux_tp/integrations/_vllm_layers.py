"""Classes in front of vLLM's linear layers, and the ops that are built for a layer.

Invariant: every rank of a tensor-parallel group fuses the same layers and the same calls. Ops are built as layers are made:
a captured call builds nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from .._comm import Communicator
from .._ops import prepare
from ._vllm_config import captured, least_split, normed, unfit
from ._vllm_fp8 import MULTIPLES, computes, held, scales_of, widen
from ._vllm_groups import communicator, log
from ._vllm_passes import built

__all__ = ["ColumnParallel", "RowParallel", "is_split", "misfit"]

_prepared: set[tuple[Any, ...]] = set()
_warned: set[str] = set()


class _Parallel:
    """In front of a linear layer of vLLM. Parameters, weight loaders and everything else are vLLM's."""

    # None: the layer is vLLM's own.
    flux_comm: Communicator | None = None
    flux_scales: str = "none"
    flux_op: str = ""
    # With split rows a graph has the layer's product under this number, until a pass fuses it.
    flux_number: int | None = None
    flux_group: str = ""
    flux_fused: bool = False
    """Whether calls are of flux_tp; with split rows those of a graph that this process has compiled."""

    def _is_taken(self) -> bool:
        """Builds the ops of the layer, where it fits and the settings allow them; collective."""
        if not is_split(self):
            return False
        from vllm import envs
        from vllm.config import get_current_vllm_config
        from vllm.distributed.parallel_state import get_tp_group

        config = get_current_vllm_config()
        split = config.compilation_config.pass_config.enable_sp
        # Whole rows are not gathered.
        if self.flux_op == "all_gather_matmul" and not split:
            return False
        # A setting that keeps all layers is named by `communicator`.
        reason = None if unfit(config) else misfit(self)
        if reason is not None:
            _warn(self, reason)
            return False
        group = get_tp_group()
        comm = communicator(group, config)
        # A layer may be split over fewer ranks than its group has.
        if comm is None or comm.world_size != self.tp_size:
            return False
        if not computes(scales_of(self)):
            _warn(self, "8-bit ops need Hopper, and with VLLM_BATCH_INVARIANT=1 scales of blocks")
            return False
        rows, eps = captured(config), normed(config, envs.VLLM_BATCH_INVARIANT)
        if split:
            self._split(comm, rows, eps, least_split(config), group.unique_name)
        else:
            # Behind 8-bit operands vLLM's norm quantises, too.
            self._fuse(comm, rows, eps if scales_of(self) == "none" else None)
        return True

    def _split(self, comm: Communicator, rows: Sequence[int], eps: float | None, least: int, group: str) -> None:
        """Builds the ops of the layer with split rows; collective. ``least``: rows of the smallest graph that has them split."""
        from ._vllm_linear import number

        self.flux_comm, self.flux_scales, self.flux_group = comm, scales_of(self), group
        column = self.flux_op == "all_gather_matmul"
        _prepare(self, self.flux_op, [m for m in rows if m >= least], None if column else eps)
        if least > 1 and not column:
            _prepare(self, "matmul_all_reduce", [m for m in rows if m < least], eps if self.flux_scales == "none" else None)
        if self.flux_scales == "row":
            widen(self)
        self.flux_number = number(self)

    def _results(self, y: Tensor) -> Any:
        return (y, self.bias if self.skip_bias_add else None) if self.return_bias else y


class ColumnParallel(_Parallel):
    """In front of vLLM's column-parallel layers: all-gather and GEMM are one op where rows are split.

    LoRA and others know such a layer by its very class, so only a layer that is taken changes it.
    """

    flux_op = "all_gather_matmul"

    @staticmethod
    def taking(construct: Callable[..., None], kinds: Collection[type]) -> Callable[..., None]:
        """The constructor of these layers, which changes those that are taken."""

        @functools.wraps(construct)
        def run(self: Any, *args: Any, **options: Any) -> None:
            construct(self, *args, **options)
            theirs = type(self)
            if theirs in kinds:
                self.__class__ = _fused(theirs)
                if not self._is_taken():
                    self.__class__ = theirs

        run.flux_takes = True
        return run

    def forward(self, input_: Tensor) -> Any:
        if self.flux_number is None or not torch.compiler.is_compiling():
            return super().forward(input_)
        from ._vllm_linear import marked

        y = marked(self, input_)
        return super().forward(input_) if y is None else self._results(y)


class RowParallel(_Parallel):
    """In front of vLLM's RowParallelLinear: GEMM and all-reduce are one ``matmul_all_reduce`` where that is possible.

    Where rows are split, they become a ``matmul_reduce_scatter`` behind vLLM's pass that splits them.
    """

    flux_op = "matmul_reduce_scatter"
    flux_rows: frozenset[int] = frozenset()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_taken()

    def _fuse(self, comm: Communicator, rows: Sequence[int], eps: float | None) -> None:
        """Builds the ops of the layer; collective. ``eps``: that of a norm behind it, which a compiled graph may have in the op."""
        self.flux_comm, self.flux_scales, self.flux_rows = comm, scales_of(self), frozenset(rows)
        _prepare(self, "matmul_all_reduce", rows, eps)
        if self.flux_scales == "row":
            widen(self)
        self.flux_fused = True

    def forward(self, input_: Tensor) -> Any:
        # A compiled model has the scheduler's numbers of rows alone, and must not ask for them.
        if self.flux_comm is None or not self.reduce_results or not (torch.compiler.is_compiling() or self._takes(input_)):
            return super().forward(input_)
        if self.flux_number is not None:
            from ._vllm_linear import marked

            y = marked(self, input_)
            return super().forward(input_) if y is None else self._results(torch.ops.vllm.all_reduce(y, group_name=self.flux_group))
        found = held(self, self.flux_scales)
        if found is None:
            return super().forward(input_)
        # Not in processes of vLLM that fuse nothing: it registers ops with torch.
        from .._kernels import call
        from .._scales import quantize_rows, scaled

        (weight, scale), operands, options = found, {}, {}
        x = input_ if input_.dim() == 2 else input_.reshape(-1, input_.shape[-1])
        if scale is not None:
            x, of_x = quantize_rows(x, self.input_scale if self.flux_scales == "tensor" else self.flux_scales, group=self.flux_comm)
            x, operands, options = scaled("matmul_all_reduce", x, [weight], of_x, scale, self.params_dtype, {}, None)
        # On every rank, where vLLM has it on the first: the op adds it once.
        if self.bias is not None and not self.skip_bias_add:
            operands["bias"] = [self.bias]
        y = call("matmul_all_reduce", self.flux_comm, x, [weight], operands, constant=not self.weight.requires_grad, **options)[0]
        return self._results(y if input_.dim() == 2 else y.reshape(*input_.shape[:-1], y.shape[-1]))

    def _takes(self, x: Tensor) -> bool:
        """Whether a call outside of torch.compile is one of flux_tp. A vision tower may have more rows, or graphs of its own."""
        m = x.numel() // x.shape[-1]
        # Without a graph no pass splits rows.
        if self.flux_number is not None or m > self.flux_comm.max_m or x.stride(-1) != 1:
            return False
        return m in self.flux_rows or not (x.is_cuda and torch.cuda.is_current_stream_capturing())


@functools.cache
def _fused(theirs: type) -> type:
    return type(f"Flux{theirs.__name__}", (ColumnParallel, theirs), {})


def is_split(layer: Any) -> bool:
    """Whether a layer is split, and has the collective that an op has."""
    whole = not layer.gather_output if hasattr(layer, "gather_output") else layer.input_is_parallel and layer.reduce_results
    return layer.tp_size > 1 and whole


def misfit(layer: Any) -> str | None:
    """Why no op computes a split layer; ``None`` where one does."""
    if layer.params_dtype not in (torch.bfloat16, torch.float16):
        return f"no op has results in {layer.params_dtype}"
    form = scales_of(layer)
    if form is None:
        return f"no op takes the scales of {type(layer.quant_method).__name__}"
    k, n = layer.input_size_per_partition, layer.output_size_per_partition
    if k % MULTIPLES[form] or n % MULTIPLES[form]:
        return f"a rank's weight is {n} x {k}, and ops take multiples of {MULTIPLES[form]}"
    return None


def _warn(layer: Any, reason: str) -> None:
    """Says once for each reason why a split layer stays vLLM's."""
    if reason not in _warned:
        _warned.add(reason)
        log.warning("flux_tp: %s, and layers like it, stay vLLM's: %s", getattr(layer, "prefix", "") or type(layer).__name__, reason)


def _prepare(layer: Any, op: str, rows: Sequence[int], eps: float | None) -> None:
    """Builds an op of a layer before a graph is captured; collective. As a layer is made, so that vLLM's profile counts its memory."""
    comm, form = layer.flux_comm, layer.flux_scales
    options = {"dtype": layer.params_dtype}
    if form != "none":
        options |= {"dtype": "float8_e4m3fn", "scales": form, "out_dtype": layer.params_dtype}
    n, k = layer.output_size_per_partition, layer.input_size_per_partition
    extents = (n * comm.world_size, k) if op == "all_gather_matmul" else (n, k * comm.world_size)
    # A model may take the bias from a layer that was made with it.
    biases = [False, True] if layer.bias is not None and not layer.skip_bias_add else [False]
    epilogues: list[dict[str, Any]] = [{"bias": bias} for bias in biases]
    if eps is not None:
        from .._scales import FORMS
        from ._vllm_norms import Epilogue

        # Rows that are gathered behind the norm may be in 8 bits.
        for norm_scales in [None, form] if op == "matmul_reduce_scatter" and form != "none" else [None]:
            for bias in biases:
                epilogues.append({"bias": bias, "residual": True, "eps": eps, "norm_scales": norm_scales})
                built.add(Epilogue(comm.id, op, n, k, layer.params_dtype, FORMS[form], bias, eps, FORMS[norm_scales or "none"]))
    for epilogue in epilogues:
        of = (comm.id, op, *extents, *options.values(), *epilogue.values(), tuple(rows))
        if of not in _prepared:
            prepare(op, *extents, rows=rows, group=comm, **options, **epilogue)
            _prepared.add(of)
