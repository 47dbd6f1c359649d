"""How the ranks of a job come together."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from . import _native
from ._comm import Communicator, adopt
from .errors import ConnectError, OperandError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["init"]


def init(
    group: ProcessGroup | None = None,
    transport: str = "auto",
    max_m: int = 8192,
    timeout: float = 30.0,
    sm_margin: int = 0,
    *,
    batch_invariant: bool = False,
    device: int | None = None,
    address: str | None = None,
) -> Communicator:
    """Connects the ranks; collective. The first communicator is the default of all ops until it is closed or broken.

    CUDA graphs need the transport ``nvlink``. Prepare every op before the first capture (:func:`prepare`): one that
    is built later may move the workspace, and a captured call does not follow. Delete all graphs before the
    communicator is closed and before the interpreter ends.

    Args:
        group: a torch ProcessGroup, of any size inside a larger job. ``None``: the ranks of the launcher
            (torchrun, srun, mpirun or ``flux-bench launch``), by its environment variables.
        transport: ``host`` (operands on the CPU), ``nvlink``, ``pcie``, ``nccl``, ``mixed`` or ``auto``: what the
            variable FLUX_TRANSPORT names, else the best that works.
        max_m: most rows of a call, of all ranks together.
        timeout: longest wait for a peer, in seconds, at most 24 hours. The ranks' start may take a minute even with less.
        sm_margin: SMs that calls leave to kernels on other streams which must run beside them.
        batch_invariant: whether a row of a result has the same bits whatever rows share its call.
        device: ordinal of the CUDA device. ``None``: torch's current device where torch uses CUDA, else the
            rank's number on its host.
        address: with ``group``, the IP address by which ranks of other hosts reach this one. ``None``: what the
            variable FLUX_ADDRESS names, else that of the default route.

    Raises:
        ConnectError: no launcher, ranks that cannot reach each other, or a transport that does not work here.
        TimeoutError: a rank did not come in time.
        DisagreedError: the ranks give different arguments.
    """
    if not 0 < max_m <= 1 << 24:
        raise OperandError(f"max_m = {max_m}: give a number of rows from 1 to {1 << 24}")
    if sm_margin < 0:
        raise OperandError(f"sm_margin = {sm_margin}: give a number of SMs from 0 on")
    limits = (max_m, sm_margin, batch_invariant)
    torch = sys.modules.get("torch")
    if device is None and torch is not None and torch.cuda.is_initialized():
        device = torch.cuda.current_device()
    if group is None:
        connected = _native.connect(transport, timeout, device, limits)
    else:
        connected = _connect_group(group, transport, timeout, device, address, limits)
    comm = Communicator(connected, limits, timeout, group)
    if torch is not None:
        from . import _torch  # noqa: F401 (registers the ops, so that torch.compile finds them)
    adopt(comm)
    return comm


def _connect_group(
    group: Any, transport: str, timeout: float, device: int | None, address: str | None, limits: tuple[int, int, bool]
) -> tuple[int, int, int, str, int | None]:
    """Has the ranks of a ProcessGroup meet by what the group carries."""
    import torch.distributed as dist

    # torch's own mark of a group that this process is not of is a number.
    if group is not dist.GroupMember.NON_GROUP_MEMBER and not isinstance(group, dist.ProcessGroup):
        remedy = "give mesh.get_group(), or of several dimensions mesh.get_group(name)" if hasattr(group, "get_group") else "give torch.distributed.new_group(ranks)"
        raise OperandError(f"group is a {type(group).__name__}, and init takes a torch ProcessGroup: {remedy}")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ConnectError("this process is not of the group: call flux_tp.init on the group's ranks only")

    def exchange(payload: bytes) -> list[bytes]:
        given: list[Any] = [None] * size
        dist.all_gather_object(given, payload, group=group)
        return given

    return _native.connect_group((rank, size), exchange, transport, timeout, (device, address), limits)
