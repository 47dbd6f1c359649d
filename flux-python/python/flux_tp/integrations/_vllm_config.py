"""What is read from vLLM's configuration, and the compiled sizes that are added to it.

Invariant: what is found depends on the settings alone. They are the same on every rank.
"""

from __future__ import annotations

from typing import Any

__all__ = ["captured", "least_split", "normed", "unfit"]

# vLLM's CompilationMode.VLLM_COMPILE.
_COMPILED = 3


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
    if config.compilation_config.pass_config.enable_sp and config.lora_config is not None:
        return "LoRA does not know layers with split rows"
    if config.parallel_config.use_ubatching:
        return "micro-batches run on two streams"
    if config.offload_config.uva.cpu_offload_gb > 0 or config.offload_config.prefetch.offload_group_size > 0:
        return "weights are in host memory"
    return None
