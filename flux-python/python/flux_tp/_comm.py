"""Communicators, and which of them is the default.

Invariant: only the process that has made a communicator uses or closes it.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _native
from .errors import FluxError, OperandError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["Communicator", "Heads", "adopt", "check", "chosen", "default", "first", "works"]

_default: Communicator | None = None
_closes_at_exit: int | None = None
"""The process that leaves its communicators when it ends."""


class Heads(NamedTuple):
    """A rank's attention heads; :meth:`Communicator.heads` makes them."""

    query: slice
    """Of the query heads of all ranks."""
    kv: slice
    """Of the key and value heads of all ranks. Ranks may share some."""
    kv_count: int
    """Key and value heads of all ranks."""
    reads: list[int]
    """For each of this rank's query heads which of its KV heads it reads."""


class Communicator:
    """One rank's membership of a group that computes together; :func:`flux_tp.init` makes one.

    Every rank makes the same calls in the same order. Leaves the group when it is closed or collected.
    """

    id: int
    rank: int
    """This rank, from 0 to ``world_size - 1``."""
    world_size: int
    """Number of ranks, ``W``."""
    transport: str
    """The transport in use: ``host``, ``nvlink``, ``pcie``, ``nccl`` or ``mixed``."""
    device: int | None
    """Ordinal of the CUDA device, or ``None`` on the CPU."""
    max_m: int
    """Most rows of a call, of all ranks together."""
    timeout: float
    """Longest wait for a peer, in seconds."""
    sm_margin: int
    """SMs that calls leave to kernels on other streams."""
    batch_invariant: bool
    """Whether a row of a result has the same bits whatever rows share its call."""
    group: ProcessGroup | None
    """The torch ProcessGroup of the same ranks, where one was given."""

    def __init__(
        self,
        connected: tuple[int, int, int, str, int | None],
        limits: tuple[int, int, bool],
        timeout: float,
        group: ProcessGroup | None,
    ) -> None:
        self.id, self.rank, self.world_size, self.transport, self.device = connected
        self.max_m, self.sm_margin, self.batch_invariant = limits
        self.timeout = timeout
        self.group = group
        self._process = os.getpid()
        _close_at_exit()

    def check(self) -> None:
        """Raises the fault that broke the communicator; see :func:`check`."""
        _native.check(self.id)

    def barrier(self) -> None:
        """Returns when every rank has come here, on the host only."""
        _native.barrier(self.id)

    def explain(self) -> str:
        """The transport and why it was chosen, in words."""
        return _native.explain(self.id)

    def features(self, count: int, rank: int | None = None, *, multiple: int = 8) -> slice:
        """The features of ``count`` that a rank has: ``n`` of ``all_gather_matmul``, ``k`` of the other ops.

        They are split in groups of 8. For 8-bit operands ``multiple`` is 16, with scales of blocks 128.
        The first ranks may have a group more. The weight of ``rank`` is ``full[comm.features(n)]``, or
        ``full[:, comm.features(k)]``. ``rank=None``: of this rank.
        """
        rank = _rank_of(self, rank)
        if multiple not in (8, 16, 128):
            raise OperandError(f"multiple = {multiple}: give 8, for 8-bit operands 16, with scales of blocks 128")
        groups, rest = divmod(count, multiple)
        if rest or groups < self.world_size:
            padded = multiple * max(-(-count // multiple), self.world_size)
            raise OperandError(f"{count} features are split over {self.world_size} ranks in groups of {multiple}: pad them to {padded}")
        each, more = divmod(groups, self.world_size)
        first = rank * each + min(rank, more)
        return slice(multiple * first, multiple * (first + each + (rank < more)))

    def heads(self, count: int, kv: int | None = None, rank: int | None = None) -> Heads:
        """The attention heads of a rank, of ``count`` query heads that ``kv`` key and value heads serve in equal groups.

        Each rank has as many query heads, and the KV heads that these read: ``kv / W`` of them, or where there are fewer than
        ranks a copy of one. Where neither divides the other, ranks that share a group have its KV head each, and all ranks have
        as many as the rank with the most. ``kv=None``: each query head has its own. ``rank=None``: of this rank.
        """
        rank, kv = _rank_of(self, rank), count if kv is None else kv
        if count < 1 or count % self.world_size:
            padded = self.world_size * max(1, -(-count // self.world_size))
            raise OperandError(f"{count} heads: {self.world_size} ranks take equal numbers of query heads, pad them to {padded}")
        if kv < 1 or count % kv:
            raise OperandError(f"kv = {kv}: {count} query heads are no multiple of it, give the number of key and value heads of the model")
        own, group = count // self.world_size, count // kv
        firsts = [peer * own // group for peer in range(self.world_size)]
        most = max(((peer + 1) * own - 1) // group + 1 - first for peer, first in enumerate(firsts))
        first = min(firsts[rank], kv - most)
        query = slice(rank * own, (rank + 1) * own)
        return Heads(query, slice(first, first + most), kv, [head // group - first for head in range(query.start, query.stop)])

    def close(self) -> None:
        """Leaves the group, when the calls in progress have ended. Peers' later calls raise PeerLeftError."""
        global _default
        # First: a forked child touches no lock that a thread of its parent may hold.
        if self._process == os.getpid():
            _native.close(self.id)
            if _default is self:
                _default = None

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Without an attribute where `__init__` has failed; without modules at the interpreter's end.
        if os is not None and _native is not None and getattr(self, "_process", None) == os.getpid():
            _native.close(self.id)

    def __copy__(self) -> Communicator:
        # A copy that is collected would close the group under the original.
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Communicator:
        return self

    def __reduce__(self) -> Any:
        raise FluxError(
            "a communicator is of this process and cannot be pickled: save a module's state_dict(), and call flux_tp.init "
            "and make the module anew in the process that loads it"
        )

    def __repr__(self) -> str:
        place = "cpu" if self.device is None else f"cuda:{self.device}"
        return f"<flux_tp.Communicator rank {self.rank} of {self.world_size} over {self.transport} on {place}>"


def _rank_of(comm: Communicator, rank: int | None) -> int:
    """A rank that the caller names, or the own one."""
    rank = comm.rank if rank is None else rank
    if not 0 <= rank < comm.world_size:
        raise OperandError(f"rank = {rank}: there are {comm.world_size} ranks")
    return rank


def adopt(comm: Communicator) -> None:
    """Makes it the default of all ops, unless an earlier one works."""
    global _default
    if not works(_default):
        _default = comm


def works(comm: Communicator | None) -> bool:
    """Whether there is one that is neither closed nor broken."""
    if comm is None:
        return False
    if comm._process != os.getpid():
        return False
    try:
        comm.check()
    except FluxError:
        return False
    return True


def default() -> Communicator:
    """The first communicator that is neither closed nor found broken by a later :func:`flux_tp.init`."""
    if _default is None:
        raise FluxError("there is no communicator: call flux_tp.init() on every rank first")
    return _default


def chosen(group: Any) -> Communicator:
    """The communicator of a call: ``group``, or the default."""
    if group is None:
        return default()
    if not isinstance(group, Communicator):
        raise OperandError(
            f"group is a {type(group).__name__}: give a communicator, as flux_tp.init(group) makes of a torch ProcessGroup, or None for the first one"
        )
    return group


def first() -> Communicator | None:
    """The default of all ops, where there is one."""
    return _default


def check(comm: Communicator | None = None) -> None:
    """Raises the fault that broke the communicator; returns where it works. Waits for no call.

    The first to find a fault asks the peers what they do, for 0.25 s at most.
    A result on a GPU is valid only if this returns after the stream has come past its call: ask once a step,
    after a synchronization.

    Raises:
        PeerLostError, PeerLeftError, TimeoutError, DisagreedError, AbortedError: see :mod:`flux_tp.errors`.
    """
    chosen(comm).check()


def _close_at_exit() -> None:
    """Has the process that connects leave in good order, by whatever way it ends well."""
    global _closes_at_exit
    process = os.getpid()
    if _closes_at_exit == process:
        return
    _closes_at_exit = process
    atexit.register(_close_all, process)
    # A worker of multiprocessing runs its own finalizers only, and nothing that it has inherited.
    if util := sys.modules.get("multiprocessing.util"):
        util.Finalize(None, _close_all, args=(process,), exitpriority=0)


def _close_all(process: int) -> None:
    # A child of a fork has inherited this, and leaves nothing that its parent has connected.
    if process == os.getpid():
        _native.close_all()
