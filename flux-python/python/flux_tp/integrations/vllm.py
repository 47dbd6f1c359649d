"""vLLM's linear layers computed by flux_tp: row-parallel ones, and with ``enable_sp`` column-parallel ones, too.

The wheel's entry point ``vllm.general_plugins`` calls :func:`register` in every process of vLLM. It does nothing without
the environment variable FLUX_VLLM=1::

    FLUX_VLLM=1 vllm serve MODEL --tensor-parallel-size 4

Invariant: every rank of a tensor-parallel group fuses the same layers and the same calls. Written for vllm 0.20.0.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._comm import Communicator
from .._init import init
from .._ops import prepare
from ..errors import FluxError
from ._vllm_fp8 import MULTIPLES, held, scales_of, widen

__all__ = ["ColumnParallel", "RowParallel", "register"]

# A child of vLLM's logger, whose handlers and level it has.
_log = logging.getLogger("vllm.flux_tp")
_TIMEOUT = 600.0
"""Seconds, as of torch's NCCL groups: a rank may load or compile much longer than its peers."""

# By the name of a tensor-parallel group; None where its ranks cannot use one.
_communicators: dict[str, Communicator | None] = {}
_prepared: set[tuple[Any, ...]] = set()
_epilogues: set[Any] = set()
# vLLM's CompilationMode.VLLM_COMPILE.
_COMPILED = 3


def register() -> None:
    """Has vLLM make its layers with :class:`RowParallel` and :class:`ColumnParallel`; nothing without FLUX_VLLM=1. Connects nothing.

    Raises:
        FluxError: FLUX_VLLM has another value than 1 or 0.
    """
    value = os.environ.get("FLUX_VLLM") or "0"
    if value not in ("0", "1"):
        raise FluxError(f"FLUX_VLLM = {value!r}: give 1, or 0 for vLLM's own layers")
    if value == "0":
        return
    from vllm import envs
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers import linear
    from vllm.platforms import current_platform

    for name in ("RowParallelLinear", "ColumnParallelLinear", "MergedColumnParallelLinear", "QKVParallelLinear"):
        known, own = op_registry_oot.get(name), RowParallel if name == "RowParallelLinear" else ColumnParallel
        if known is None:
            theirs = getattr(linear, name)
            theirs.register_oot(type(f"Flux{name}", (own, theirs), {}))
        elif not issubclass(known, own):
            _log.warning("flux_tp: %s.%s has the place of %s, none is fused", known.__module__, known.__name__, name)
    if current_platform.is_cuda():
        from vllm.compilation.passes.fusion import sequence_parallelism

        # vLLM's own collectives gain with many rows alone. The user's number has precedence.
        sequence_parallelism.get_sequence_parallelism_threshold = lambda *_, **__: 1
    # vLLM finds compiled graphs on disk by these, and a graph has the numbers of communicators.
    envs.environment_variables["FLUX_VLLM"] = _fused


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

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not fusable(self):
            return
        from vllm import envs
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config()
        if self.flux_op == "all_gather_matmul" and not config.compilation_config.pass_config.enable_sp:
            return
        comm = _communicator(config)
        # A layer may be split over fewer ranks than its group has.
        if comm is None or comm.world_size != self.tp_size or not _computes(scales_of(self)):
            return
        self._take(comm, config, normed(config, envs.VLLM_BATCH_INVARIANT))

    def _take(self, comm: Communicator, config: Any, eps: float | None) -> None:
        raise NotImplementedError

    def _split(self, comm: Communicator, rows: Sequence[int], eps: float | None, least: int, group: str) -> None:
        """Builds the ops of the layer with split rows; collective. ``least``: rows of the smallest graph that has them split."""
        from ._vllm_linear import number

        self.flux_comm, self.flux_scales, self.flux_group = comm, scales_of(self), group
        if self.flux_op == "all_gather_matmul":
            _prepare(self, self.flux_op, [m for m in rows if m >= least], None)
        else:
            _prepare(self, self.flux_op, [m for m in rows if m >= least], eps, quantised=self.flux_scales != "none")
            if least > 1:
                _prepare(self, "matmul_all_reduce", [m for m in rows if m < least], eps if self.flux_scales == "none" else None)
        if self.flux_scales == "row":
            widen(self)
        self.flux_number = number(self)

    def _results(self, y: Tensor) -> Any:
        return (y, self.bias if self.skip_bias_add else None) if self.return_bias else y


class ColumnParallel(_Parallel):
    """In front of vLLM's ColumnParallelLinear and its subclasses: all-gather and GEMM are one op where rows are split."""

    flux_op = "all_gather_matmul"

    def _take(self, comm: Communicator, config: Any, eps: float | None) -> None:
        self._split(comm, captured(config), eps, least_split(config), _group())

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

    def _take(self, comm: Communicator, config: Any, eps: float | None) -> None:
        if config.compilation_config.pass_config.enable_sp:
            self._split(comm, captured(config), eps, least_split(config), _group())
        else:
            # Behind 8-bit operands vLLM's norm quantises, too.
            self._fuse(comm, captured(config), eps if scales_of(self) == "none" else None)

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
        weight, scale = (self.weight, None) if self.flux_scales == "none" else held(self, self.flux_scales) or (None, None)
        if weight is None:
            return super().forward(input_)
        # Not in processes of vLLM that fuse nothing: it registers ops with torch.
        from .._kernels import call
        from .._scales import quantize_rows, scaled

        x, operands, options = input_ if input_.dim() == 2 else input_.reshape(-1, input_.shape[-1]), {}, {}
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


def fusable(layer: Any) -> bool:
    """Whether a layer is one that an op computes: split, with its collective, scales of a form that ops have or none, and its parts whole groups."""
    whole = not layer.gather_output if hasattr(layer, "gather_output") else layer.input_is_parallel and layer.reduce_results
    if not (layer.tp_size > 1 and whole and layer.params_dtype in (torch.bfloat16, torch.float16)):
        return False
    multiple = MULTIPLES.get(scales_of(layer) or "")
    return multiple is not None and layer.input_size_per_partition % multiple == 0 and layer.output_size_per_partition % multiple == 0


def captured(config: Any) -> list[int]:
    """Numbers of rows for which vLLM may capture CUDA graphs."""
    sizes = set(config.compilation_config.cudagraph_capture_sizes or ())
    if config.speculative_config is not None:
        # vLLM rounds them after the model is made.
        tokens = 1 + (config.speculative_config.num_speculative_tokens or 0)
        if config.compilation_config.pass_config.enable_sp:
            tokens = max(tokens, config.parallel_config.tensor_parallel_size)
        sizes |= {-(-size // tokens) * tokens for size in sizes}
    return sorted(size for size in sizes if size <= config.scheduler_config.max_num_batched_tokens)


def least_split(config: Any) -> int:
    """The least number of rows that vLLM splits over the ranks."""
    given = config.compilation_config.pass_config.sp_min_token_num
    return min(1 if given is None else given, config.scheduler_config.max_num_batched_tokens)


def normed(config: Any, invariant: bool) -> float | None:
    """The epsilon of norms that vLLM's compiler may leave to the op. Has it compile the rows of CUDA graphs for themselves.

    Split rows have the norm in the op in graphs of all sizes. ``invariant``: whether a row has the same bits in graphs of all sizes.
    """
    compilation, rows = config.compilation_config, captured(config)
    eps = getattr(config.model_config.hf_text_config, "rms_norm_eps", None)
    if invariant or compilation.mode != _COMPILED or not rows or not compilation.compile_ranges_endpoints or eps is None:
        return None
    if not compilation.pass_config.enable_sp and rows[-1] not in compilation.compile_ranges_endpoints:
        compilation.compile_ranges_endpoints.append(rows[-1])
    return float(eps)


def unfit(config: Any) -> str | None:
    """What in the settings keeps vLLM's own layers; the same on every rank."""
    if config.compilation_config.pass_config.enable_sp and config.compilation_config.mode != _COMPILED:
        return "enable_sp needs vLLM's compiler"
    if config.parallel_config.use_ubatching:
        return "micro-batches run on two streams"
    if config.offload_config.uva.cpu_offload_gb > 0 or config.offload_config.prefetch.offload_group_size > 0:
        return "weights are in host memory"
    return None


def _communicator(config: Any) -> Communicator | None:
    """That of this process's tensor-parallel group. Connects its ranks for the first of their layers: collective."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.unique_name not in _communicators:
        _communicators[group.unique_name] = _connect(group.cpu_group, config)
    return _communicators[group.unique_name]


def _group() -> str:
    """vLLM's name for the tensor-parallel group."""
    from vllm.distributed.parallel_state import get_tp_group

    return get_tp_group().unique_name


def _connect(group: Any, config: Any) -> Communicator | None:
    from vllm import envs
    from vllm.platforms import current_platform

    reason = unfit(config) if current_platform.is_cuda() else "this is not CUDA"
    if reason is None:
        # vLLM makes its layers with the GPU as torch's default device. This group is the CPU's.
        with torch.device("cpu"):
            comm = init(
                group,
                # With enable_sp vLLM pads rows to a multiple of the ranks.
                max_m=-(-config.scheduler_config.max_num_batched_tokens // group.size()) * group.size(),
                timeout=_TIMEOUT,
                batch_invariant=envs.VLLM_BATCH_INVARIANT,
                device=torch.cuda.current_device(),
            )
        if comm.transport == "nvlink":
            split = config.compilation_config.pass_config.enable_sp
            kind = f"layers with rows split from {least_split(config)} on," if split else "row-parallel layers"
            _log.info("flux_tp: fuses %s of %d ranks, %d rows at most", kind, comm.world_size, comm.max_m)
            _check_steps()
            _add_passes()
            return comm
        reason = f"the transport is {comm.transport}, and CUDA graphs need nvlink"
        comm.close()
    _log.warning("flux_tp: the layers stay vLLM's, as %s", reason)
    return None


def _computes(scales: str) -> bool:
    """Whether this GPU and the settings let the op take operands with such scales."""
    if scales == "none":
        return True
    from vllm import envs

    # Batch-invariant vLLM dequantises weights, but those with scales of blocks.
    return torch.cuda.get_device_capability() == (9, 0) and (scales == "block" or not envs.VLLM_BATCH_INVARIANT)


def _prepare(layer: Any, op: str, rows: Sequence[int], eps: float | None, quantised: bool = False) -> None:
    """Builds an op of a layer before a graph is captured; collective. As a layer is made, so that vLLM's profile counts its memory.

    ``quantised``: whether the norm may be in 8 bits, too.
    """
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

        for norm_scales in [None, form] if quantised else [None]:
            for bias in biases:
                epilogues.append({"bias": bias, "residual": True, "eps": eps, "norm_scales": norm_scales})
                _epilogues.add(Epilogue(comm.id, op, n, k, layer.params_dtype, FORMS[form], bias, eps, FORMS[norm_scales or "none"]))
    for epilogue in epilogues:
        of = (comm.id, op, *extents, *options.values(), *epilogue.values(), tuple(rows))
        if of not in _prepared:
            prepare(op, *extents, rows=rows, group=comm, **options, **epilogue)
            _prepared.add(of)


def _fused() -> str:
    """What in compiled graphs is of flux_tp, the same on every rank: numbers of communicators end with the rank."""
    from .. import __version__

    return f"{__version__} {[(name, comm and comm.id - comm.rank) for name, comm in sorted(_communicators.items())]}"


def _check_steps() -> None:
    """Has vLLM's workers check the communicators before tokens leave them: a graph's calls raise nothing themselves."""
    from vllm.v1.worker.gpu_worker import Worker

    for name in ("execute_model", "sample_tokens"):
        step = getattr(Worker, name)
        if not hasattr(step, "flux_checked"):
            setattr(Worker, name, checked(step))


def _add_passes() -> None:
    """Has vLLM's compiler run the passes that fuse layers: behind its own that splits rows, before its own that take norms."""
    from torch._higher_order_ops.auto_functionalize import auto_functionalized
    from vllm.compilation.passes.fusion.sequence_parallelism import SequenceParallelismPass
    from vllm.compilation.passes.inductor_pass import InductorPass
    from vllm.compilation.passes.pass_manager import PostGradPassManager
    from vllm.compilation.passes.utility.noop_elimination import NoOpEliminationPass
    from vllm.model_executor.layers.layernorm import RMSNorm

    from ._vllm_norms import NormFusion

    configure = PostGradPassManager.configure
    if hasattr(configure, "flux_fuses"):
        return

    @functools.wraps(configure)
    def run(manager: Any, config: Any) -> None:
        configure(manager, config)
        rows, dtype, split = captured(config), config.model_config.dtype, config.compilation_config.pass_config.enable_sp
        if not split and not (rows and _epilogues):
            return

        def native(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
            return RMSNorm.forward_static(input, eps, input.size(-1), dtype, weight, residual)

        def custom(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
            op = torch.ops._C.fused_add_rms_norm.default
            return auto_functionalized(op, input=input, residual=residual, weight=weight, epsilon=eps)[1:]

        most = config.scheduler_config.max_num_batched_tokens if split else rows[-1]
        fusion = type("FluxNormFusion", (NormFusion, InductorPass), {})([native, custom], dtype, _epilogues, most)
        if split:
            from ._vllm_sp import SplitRows

            fusion = type("FluxSplitRows", (SplitRows, InductorPass), {})(fusion)
        first = sum(isinstance(of, (NoOpEliminationPass, SequenceParallelismPass)) for of in manager.passes)
        manager.passes.insert(first, fusion)

    run.flux_fuses = True
    PostGradPassManager.configure = run


def checked(step: Callable[..., Any]) -> Callable[..., Any]:
    """A worker's method that raises the communicators' faults. A result that is computed later raises them when it is asked for."""

    @functools.wraps(step)
    def run(*args: Any, **options: Any) -> Any:
        output = step(*args, **options)
        get = getattr(output, "get_output", None)
        if get is None:
            _check()
            return output

        def get_output() -> Any:
            # First: it waits for the GPU.
            found = get()
            _check()
            return found

        output.get_output = get_output
        return output

    run.flux_checked = True
    return run


def _check() -> None:
    for comm in _communicators.values():
        if comm is not None:
            comm.check()
