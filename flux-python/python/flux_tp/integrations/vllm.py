"""vLLM's linear layers computed by flux_tp: row-parallel ones, and with ``enable_sp`` column-parallel ones, too.

The wheel's entry point ``vllm.general_plugins`` calls :func:`register` in every process of vLLM. It does nothing without
the environment variable FLUX_VLLM=1::

    FLUX_VLLM=1 vllm serve MODEL --tensor-parallel-size 4

Invariant: every rank of a tensor-parallel group fuses the same layers and the same calls. Written for vllm 0.20.0.
"""

from __future__ import annotations

import os

from ..errors import FluxError
from ._vllm_groups import graph_key, log
from ._vllm_layers import ColumnParallel, RowParallel

__all__ = ["ColumnParallel", "RowParallel", "register"]



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

    theirs = linear.RowParallelLinear
    known = op_registry_oot.get(theirs.__name__)
    if known is None:
        theirs.register_oot(type("FluxRowParallelLinear", (RowParallel, theirs), {}))
    elif not issubclass(known, RowParallel):
        log.warning("flux_tp: %s.%s has the place of RowParallelLinear, nothing is fused", known.__module__, known.__name__)
        return
    columns = linear.ColumnParallelLinear
    if not hasattr(columns.__init__, "flux_takes"):
        kinds = columns, linear.MergedColumnParallelLinear, linear.QKVParallelLinear
        columns.__init__ = ColumnParallel.taking(columns.__init__, kinds)
    if current_platform.is_cuda():
        from vllm.compilation.passes.fusion import sequence_parallelism

        # vLLM's own collectives gain with many rows alone. The user's number has precedence.
        sequence_parallelism.get_sequence_parallelism_threshold = lambda *_, **__: 1
    # vLLM finds compiled graphs on disk by these, and a graph has the numbers of communicators.
    envs.environment_variables["FLUX_VLLM"] = graph_key
