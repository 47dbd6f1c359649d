"""Communicators of vLLM's tensor-parallel groups.

Invariant: all ranks of a group have one, or none has. A fault is raised before tokens leave the worker's step.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from .._comm import Communicator
from .._init import init
from ._vllm_config import least_split, unfit
from ._vllm_passes import add_passes

__all__ = ["checked", "communicator", "graph_key", "log"]

# A child of vLLM's logger, whose handlers and level it has.
log = logging.getLogger("vllm.flux_tp")
_TIMEOUT = 600.0
"""Seconds, as of torch's NCCL groups: a rank may load or compile much longer than its peers."""

# By the name of a tensor-parallel group; None where its ranks cannot use one.
_communicators: dict[str, Communicator | None] = {}


def communicator(group: Any, config: Any) -> Communicator | None:
    """That of a tensor-parallel group of vLLM. Connects its ranks for the first of their layers: collective."""
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
                # With enable_sp vLLM pads rows to a multiple of the ranks.
                max_m=-(-config.scheduler_config.max_num_batched_tokens // group.size()) * group.size(),
                timeout=_TIMEOUT,
                batch_invariant=envs.VLLM_BATCH_INVARIANT,
                device=torch.cuda.current_device(),
            )
        if comm.transport == "nvlink":
            split = config.compilation_config.pass_config.enable_sp
            kind = f"layers with rows split from {least_split(config)} on," if split else "row-parallel layers"
            log.info("flux_tp: fuses %s of %d ranks, %d rows at most", kind, comm.world_size, comm.max_m)
            _check_steps()
            add_passes()
            return comm
        reason = f"the transport is {comm.transport}, and CUDA graphs need nvlink"
        comm.close()
    split = config.compilation_config.pass_config.enable_sp
    theirs = f"; vLLM splits rows from {least_split(config)} on, or from sp_min_token_num on" if split else ""
    log.warning("flux_tp: the layers stay vLLM's, as %s%s", reason, theirs)
    return None


def graph_key() -> str:
    """What in compiled graphs is of flux_tp, the same on every rank: the last number of a layer, and those of communicators, which end with the rank."""
    from .. import __version__
    from ._vllm_linear import count

    return f"{__version__} {count()} {[(name, comm and comm.id - comm.rank) for name, comm in sorted(_communicators.items())]}"


def _check_steps() -> None:
    """Has vLLM's workers check the communicators before tokens leave them: a graph's calls raise nothing themselves."""
    from vllm.v1.worker.gpu_worker import Worker

    for name in ("execute_model", "sample_tokens"):
        step = getattr(Worker, name)
        if not hasattr(step, "flux_checked"):
            setattr(Worker, name, checked(step))


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
