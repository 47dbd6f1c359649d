"""This rank among the others: its device, its groups, and what all ranks agree on.

Invariant: NVLink multicast is off in every library that could use it.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import flux_tp

__all__ = ["Ranks", "say"]

TIMEOUT = 60.0
"""Seconds for which a rank waits for the others."""


class Ranks:
    """The process groups of this run; :meth:`close` leaves them."""

    def __init__(self, transport: str, max_m: int) -> None:
        self._began = time.monotonic()
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        cuda = transport != "host" and torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        if cuda:
            torch.cuda.set_device(self.device)
        device_id = self.device if cuda else None
        dist.init_process_group("nccl" if cuda else "gloo", timeout=timedelta(seconds=TIMEOUT), device_id=device_id)
        self.group: str = dist.group.WORLD.group_name
        self.comm = flux_tp.init(transport=transport if cuda else "host", max_m=max_m, timeout=TIMEOUT, device=self.device.index)
        self._symmetric: Tensor | None = None

    def own(self, m: int) -> slice:
        """This rank's rows of ``m``, as ``torch.tensor_split`` cuts them."""
        rows, more = divmod(m, self.world)
        first = self.rank * rows + min(self.rank, more)
        return slice(first, first + rows + (self.rank < more))

    def symmetric(self, rows: int, cols: int) -> Tensor:
        """A matrix in memory that the other ranks reach; the same on every call."""
        import torch.distributed._symmetric_memory as symm_mem

        if self._symmetric is None or self._symmetric.numel() < rows * cols:
            self._symmetric = symm_mem.empty(rows * cols, dtype=torch.bfloat16, device=self.device)
            symm_mem.rendezvous(self._symmetric, self.group)
        return self._symmetric[: rows * cols].view(rows, cols)

    def why_no_symmetric_memory(self) -> str | None:
        """Why PyTorch's symmetric memory must not or cannot be used, or ``None``."""
        if self.device.type != "cuda":
            return "it needs GPUs"
        if self.comm.transport != "nvlink":
            return "it needs peer access"
        import torch.distributed._symmetric_memory  # declares the ops
        from torch._C._autograd import DeviceType
        from torch._C._distributed_c10d import _SymmetricMemory

        if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, self.device.index):
            return "NVLink multicast is not switched off in this PyTorch"
        return None

    def largest(self, values: list[float]) -> list[float]:
        """Each value's largest of all ranks."""
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        return tensor.tolist()

    def past(self, seconds: float) -> bool:
        """Whether a rank has run longer than that."""
        return self.largest([time.monotonic() - self._began])[0] > seconds

    def first_word(self, word: str | None) -> str | None:
        """What the first rank says that says something."""
        words: list[str | None] = [None] * self.world
        dist.all_gather_object(words, word)
        return next((word for word in words if word is not None), None)

    def close(self) -> None:
        self.comm.close()
        dist.destroy_process_group()


def say(ranks: Ranks, step: str) -> None:
    """Tells the step that begins, on rank 0."""
    if ranks.rank == 0:
        print(step, file=sys.stderr, flush=True)
