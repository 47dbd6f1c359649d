"""Parameters as DTensors on a mesh of one dimension, and the local tensors that modules compute with.

Invariant: a parameter's gradient has the parameter's placements, and each rank has the gradient of all rows and heads for it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard, distribute_tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .._comm import Communicator, first, works
from .._init import init
from .._rows import all_reduce
from ..errors import OperandError

__all__ = ["arrange", "check_divides", "communicator", "distribute", "local", "present", "summed"]


# By ranks, and whether they compute on the CPU; the last one first. Held: ranks would collect them
# at different times, and must agree on a new one.
_of_meshes: dict[tuple[tuple[int, ...], bool], list[Communicator]] = {}


def communicator(mesh: DeviceMesh, **options: Any) -> Communicator:
    """The communicator of a mesh's ranks: the last one of such a mesh, the default of all ops, or a new one; then it is collective.

    ``options``: those of :func:`flux_tp.init`. There is a new one where those found have other options, or a smaller ``max_m``.
    """
    if mesh.ndim != 1:
        raise OperandError(f"the mesh has {mesh.ndim} dimensions {mesh.mesh_dim_names or ''}: give one of them, as mesh['tp']")
    group, on_host = mesh.get_group(), mesh.device_type == "cpu"
    named = options.get("transport", "auto")
    if named != "auto" and (named == "host") != on_host:
        raise OperandError(f"transport = {named!r}: the mesh is of {mesh.device_type}, leave the transport out")
    options |= {"transport": "host"} if on_host else {}
    ranks = dist.get_process_group_ranks(group)
    known = _of_meshes.setdefault((tuple(ranks), on_host), [])
    for comm in (*known, first()):
        if works(comm) and (comm.device is None) == on_host and _has(comm, options) and _ranks(comm) == ranks:
            break
    else:
        comm = init(group, **options)
    # Styles of a model's layers ask without options for that of the model.
    known[:] = [comm, *(other for other in known if other is not comm and works(other))]
    return comm


def _has(comm: Communicator, options: dict[str, Any]) -> bool:
    """Whether a communicator has these options of :func:`flux_tp.init`; its ``max_m`` may be larger."""

    def has(name: str, value: Any) -> bool:
        if name == "max_m":
            return comm.max_m >= value
        # An address matters only while the ranks connect, and `init` chooses what is left to it.
        if name == "address" or (name, value) in (("transport", "auto"), ("device", None)):
            return True
        return getattr(comm, name, None) == value

    return all(has(name, value) for name, value in options.items())


def _ranks(comm: Communicator) -> list[int] | None:
    """The global ranks of a communicator, as torch.distributed counts them."""
    if comm.group is not None:
        return dist.get_process_group_ranks(comm.group)
    of_all = (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.world_size)
    return list(range(comm.world_size)) if of_all else None


def check_divides(name: str, count: int, world: int) -> None:
    """Refuses features that a DTensor does not split evenly, in the ops' groups of 8."""
    if count % (8 * world):
        padded = -(-count // (8 * world)) * 8 * world
        raise OperandError(
            f"{name} = {count}: a DTensor has equal parts, of groups of 8 features for each of {world} ranks; pad it to {padded}, "
            "or take flux_tp.ColumnParallelLinear and RowParallelLinear, whose parts may be unequal and are no DTensors"
        )


# The DTensor of a parameter, so that tied parameters stay one.
_distributed = WeakTensorKeyDictionary()


def distribute(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement, source: int | None) -> None:
    """Replaces a module's parameter by a DTensor; ``source``: the rank of the mesh whose values it has, or ``None`` for the own."""
    parameter = getattr(module, name)
    if parameter is None:
        return
    found = _distributed.get(parameter)
    if found is None:
        part = distribute_tensor(parameter, mesh, [placement], src_data_rank=source)
        _distributed[parameter] = found = nn.Parameter(part, requires_grad=parameter.requires_grad)
    elif found.placements != (placement,) or found.device_mesh != mesh:
        raise OperandError(f"{name} of {module} is tied to a parameter placed as {found.placements}, and {placement} is asked for: untie them")
    module.register_parameter(name, found)


def local(parameter: DTensor | None) -> Tensor | None:
    """A parameter's part of this rank."""
    if parameter is None:
        return None
    part = parameter.to_local(grad_placements=parameter.placements)
    if not (parameter.requires_grad or torch.is_grad_enabled() or torch.compiler.is_compiling()):
        # The ops take frozen parameters as constant weights.
        return nn.Parameter(part, requires_grad=False)
    return part


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Communicator) -> Tensor:
        ctx.comm = comm
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return all_reduce(dy, "sum", ctx.comm), None


def summed(x: Tensor | None, comm: Communicator) -> Tensor | None:
    """The same tensor, whose gradient is the sum of the ranks'."""
    if x is None or comm.world_size == 1 or not torch.is_grad_enabled():
        return x
    return _Summed.apply(x, comm)


def _of(placement: Placement, dims: int) -> Placement:
    return Shard(placement.dim % dims) if isinstance(placement, Shard) else placement


def arrange(x: Tensor, mesh: DeviceMesh, given: Placement, wanted: Placement) -> Tensor:
    """The local tensor of an input with a placement; ``given``: that of an input which is no DTensor."""
    given, wanted = _of(given, x.ndim), _of(wanted, x.ndim)
    if not isinstance(x, DTensor):
        if given == wanted:
            return x
        x = DTensor.from_local(x, mesh, [given], run_check=False)
    return x.redistribute(placements=[wanted]).to_local()


def present(y: Tensor, mesh: DeviceMesh, given: Placement, wanted: Placement, use_local: bool) -> Tensor:
    """An output placed as ``wanted``, of a local tensor placed as ``given``."""
    given, wanted = _of(given, y.ndim), _of(wanted, y.ndim)
    if given == wanted and use_local:
        return y
    y = DTensor.from_local(y, mesh, [given], run_check=False).redistribute(placements=[wanted])
    return y.to_local() if use_local else y
