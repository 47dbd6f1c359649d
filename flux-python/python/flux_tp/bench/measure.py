"""The cases of a run, one after the other, until its time limit."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .options import Options
from .ranks import Ranks, say
from .record import Record
from .show import line

__all__ = ["measure"]


def measure(ranks: Ranks, options: Options, record: Record | None, cases: Iterable[tuple[str, Callable[[], dict[str, Any]]]]) -> None:
    """Adds the row of each case to the record, which rank 0 has, and prints it. A case has its name, and measures its row on all ranks."""
    for name, row in cases:
        if ranks.past(options.time_limit):
            return say(ranks, f"the time limit of {options.time_limit:.0f} s is reached before {name}")
        measured = row()
        # The next case is made when nothing holds the tensors of this one.
        del row
        if record:
            record.add(measured)
            print(line(measured), flush=True)
        # Graphs and compiled models refer to themselves.
        gc.collect()
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
