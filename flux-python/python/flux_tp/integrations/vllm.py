"""vLLM's row-parallel linear layers computed by flux_tp.

The wheel's entry point ``vllm.general_plugins`` calls :func:`register` in every process of vLLM. It does nothing without
the environment variable FLUX_VLLM=1::

    FLUX_VLLM=1 vllm serve MODEL --tensor-parallel-size 4

Invariant: every rank of a tensor-parallel group fuses the same layers and the same calls. Written for vllm 0.20.0.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._comm import Communicator
from .._init import init
from .._ops import prepare
from ..errors import FluxError
from ._vllm_fp8 import MULTIPLES, held, scales_of, widen

__all__ = ["RowParallel", "register"]

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
    """Has vLLM make its RowParallelLinear with :class:`RowParallel`; nothing without FLUX_VLLM=1. Connects nothing.

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
    from vllm.model_executor.layers.linear import RowParallelLinear

    known = op_registry_oot.get(RowParallelLinear.__name__)
    if known is not None:
        if not issubclass(known, RowParallel):
            _log.warning("flux_tp: %s.%s has the place of RowParallelLinear, nothing is fused", known.__module__, known.__name__)
        return
    RowParallelLinear.register_oot(type("FluxRowParallelLinear", (RowParallel, RowParallelLinear), {}))
    # vLLM finds compiled graphs on disk by these, and a graph has the numbers of communicators.
    envs.environment_variables["FLUX_VLLM"] = _fused


class RowParallel:
    """In front of vLLM's RowParallelLinear: GEMM and all-reduce are one ``matmul_all_reduce`` where that is possible.

    Parameters, weight loaders and everything else are vLLM's.
    """

    # None: the layer is vLLM's own.
    flux_comm: Communicator | None = None
    flux_scales: str = "none"
    flux_rows: frozenset[int] = frozenset()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        if not fusable(self):
            return
        from vllm import envs
        from vllm.config import get_current_vllm_config

        config = get_current_vllm_config()
        comm = _communicator(config)
        # A layer may be split over fewer ranks than its group has.
        if comm is None or comm.world_size != self.tp_size or not _computes(scales_of(self)):
            return
        # Behind 8-bit operands vLLM's norm quantises, too.
        eps = normed(config, envs.VLLM_BATCH_INVARIANT) if scales_of(self) == "none" else None
        self._fuse(comm, captured(config), eps)

    def _fuse(self, comm: Communicator, rows: list[int], eps: float | None) -> None:
        """Builds the ops of the layer; collective. ``eps``: that of a norm behind it, which a compiled graph may have in the op."""
        self.flux_scales = scales_of(self)
        self.flux_rows = _prepare(self, comm, rows, eps)
        if self.flux_scales == "row":
            widen(self)
        self.flux_comm = comm

    def forward(self, input_: Tensor) -> Any:
        # A compiled model has the scheduler's numbers of rows alone, and must not ask for them.
        if self.flux_comm is None or not self.reduce_results or not (torch.compiler.is_compiling() or self._takes(input_)):
            return super().forward(input_)
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
        if input_.dim() != 2:
            y = y.reshape(*input_.shape[:-1], y.shape[-1])
        if not self.return_bias:
            return y
        return y, self.bias if self.skip_bias_add else None

    def _takes(self, x: Tensor) -> bool:
        """Whether a call outside of torch.compile is one of flux_tp. A vision tower may have more rows, or graphs of its own."""
        m = x.numel() // x.shape[-1]
        if m > self.flux_comm.max_m or x.stride(-1) != 1:
            return False
        return m in self.flux_rows or not (x.is_cuda and torch.cuda.is_current_stream_capturing())


def fusable(layer: Any) -> bool:
    """Whether a RowParallelLinear is one that the op computes: split, summed, with scales of a form that it has or none, and its parts whole groups."""
    if not (layer.tp_size > 1 and layer.input_is_parallel and layer.reduce_results and layer.params_dtype in (torch.bfloat16, torch.float16)):
        return False
    multiple = MULTIPLES.get(scales_of(layer) or "")
    return multiple is not None and layer.input_size_per_partition % multiple == 0 and layer.output_size % multiple == 0


def captured(config: Any) -> list[int]:
    """Numbers of rows for which vLLM may capture CUDA graphs."""
    sizes = set(config.compilation_config.cudagraph_capture_sizes or ())
    if config.speculative_config is not None:
        # vLLM rounds them after the model is made.
        tokens = 1 + (config.speculative_config.num_speculative_tokens or 0)
        sizes |= {-(-size // tokens) * tokens for size in sizes}
    return sorted(size for size in sizes if size <= config.scheduler_config.max_num_batched_tokens)


def normed(config: Any, invariant: bool) -> float | None:
    """The epsilon of norms that vLLM's compiler may leave to the op. Has it compile the rows of CUDA graphs for themselves.

    ``invariant``: whether a row has the same bits in graphs of all sizes.
    """
    compilation, rows = config.compilation_config, captured(config)
    eps = getattr(config.model_config.hf_text_config, "rms_norm_eps", None)
    if invariant or compilation.mode != _COMPILED or not rows or not compilation.compile_ranges_endpoints or eps is None:
        return None
    if rows[-1] not in compilation.compile_ranges_endpoints:
        compilation.compile_ranges_endpoints.append(rows[-1])
    return float(eps)


def unfit(config: Any) -> str | None:
    """What in the settings keeps vLLM's own layers; the same on every rank."""
    if config.compilation_config.pass_config.enable_sp:
        return "enable_sp looks for the all-reduces of vLLM"
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


def _connect(group: Any, config: Any) -> Communicator | None:
    from vllm import envs
    from vllm.platforms import current_platform

    reason = unfit(config) if current_platform.is_cuda() else "this is not CUDA"
    if reason is None:
        # vLLM makes its layers with the GPU as torch's default device. This group is the CPU's.
        with torch.device("cpu"):
            comm = init(
                group,
                max_m=config.scheduler_config.max_num_batched_tokens,
                timeout=_TIMEOUT,
                batch_invariant=envs.VLLM_BATCH_INVARIANT,
                device=torch.cuda.current_device(),
            )
        if comm.transport == "nvlink":
            _log.info("flux_tp: fuses row-parallel layers of %d ranks, %d rows at most", comm.world_size, comm.max_m)
            _check_steps()
            _fuse_norms()
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


def _prepare(layer: Any, comm: Communicator, rows: list[int], eps: float | None) -> frozenset[int]:
    """Builds the ops of a layer before a graph is captured; collective. As a layer is made, so that vLLM's profile counts their memory."""
    options = {"dtype": layer.params_dtype}
    if layer.flux_scales != "none":
        options |= {"dtype": "float8_e4m3fn", "scales": layer.flux_scales, "out_dtype": layer.params_dtype}
    # A model may take the bias from a layer that was made with it.
    biases = [False, True] if layer.bias is not None and not layer.skip_bias_add else [False]
    epilogues: list[dict[str, Any]] = [{"bias": bias} for bias in biases]
    if eps is not None:
        from ._vllm_norms import Epilogue

        epilogues += [{"bias": bias, "residual": True, "eps": eps} for bias in biases]
        _epilogues.update(Epilogue(comm.id, layer.output_size, layer.input_size_per_partition, layer.params_dtype, bias, eps) for bias in biases)
    for epilogue in epilogues:
        of = (comm.id, layer.output_size, layer.input_size, *options.values(), *epilogue.values(), tuple(rows))
        if of not in _prepared:
            prepare("matmul_all_reduce", layer.output_size, layer.input_size, rows=rows, group=comm, **options, **epilogue)
            _prepared.add(of)
    return frozenset(rows)


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


def _fuse_norms() -> None:
    """Has vLLM's compiler run the pass that leaves norms to the op, before its own that take norms."""
    from torch._higher_order_ops.auto_functionalize import auto_functionalized
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
        rows, dtype = captured(config), config.model_config.dtype
        if not rows or not _epilogues:
            return

        def native(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
            return RMSNorm.forward_static(input, eps, input.size(-1), dtype, weight, residual)

        def custom(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
            op = torch.ops._C.fused_add_rms_norm.default
            return auto_functionalized(op, input=input, residual=residual, weight=weight, epsilon=eps)[1:]

        fusion = type("FluxNormFusion", (NormFusion, InductorPass), {})([native, custom], dtype, _epilogues, rows[-1])
        manager.passes.insert(sum(isinstance(of, NoOpEliminationPass) for of in manager.passes), fusion)

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
