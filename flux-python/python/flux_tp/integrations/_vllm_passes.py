"""The passes that fuse layers, in vLLM's compiler.

Invariant: they run behind vLLM's pass that splits rows, and before its own passes that take norms.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from ._vllm_config import captured

__all__ = ["add_passes", "built"]

built: set[Any] = set()
"""Ops with residual and norm that are built."""


def add_passes() -> None:
    """Has vLLM's compiler run the passes that fuse layers."""
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
        if not split and not (rows and built):
            return

        def native(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
            return RMSNorm.forward_static(input, eps, input.size(-1), dtype, weight, residual)

        def custom(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
            op = torch.ops._C.fused_add_rms_norm.default
            return auto_functionalized(op, input=input, residual=residual, weight=weight, epsilon=eps)[1:]

        most = config.scheduler_config.max_num_batched_tokens if split else rows[-1]
        fusion = type("FluxNormFusion", (NormFusion, InductorPass), {})([native, custom], dtype, built, most)
        if split:
            from ._vllm_sp import SplitRows

            fusion = type("FluxSplitRows", (SplitRows, InductorPass), {})(fusion)
        first = sum(isinstance(of, (NoOpEliminationPass, SequenceParallelismPass)) for of in manager.passes)
        manager.passes.insert(first, fusion)

    run.flux_fuses = True
    PostGradPassManager.configure = run
