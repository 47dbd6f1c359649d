"""Times of passes: on the device, all ranks lined up, every mode once a round."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from .ranks import Ranks

__all__ = ["Clock", "captured", "figures", "in_round", "in_time"]

WARM_UP = 3
"""Rounds that are not counted."""
LEAST_SPIN_US = 100.0


def in_round(names: Sequence[str], index: int) -> list[str]:
    """The modes in the order of a round.

    In as many rounds as there are modes, each follows each other once; with an odd number, twice in twice as many.
    Source: Williams, "Experimental designs balanced for the estimation of residual effects of treatments", 1949.
    """
    count = len(names)
    # 0, 1, n - 1, 2, n - 2, ...
    order = [(at + 1) // 2 if at % 2 else -at // 2 for at in range(count)]
    if count % 2 and index // count % 2:
        order.reverse()
    return [names[(place + index) % count] for place in order]


def in_time(times: Sequence[float], late: Sequence[float]) -> list[float]:
    """The times of rounds in which no host was late; of all rounds where most are late, as in flux-bench."""
    if sum(map(bool, late)) > len(times) // 2:
        return list(times)
    return [time for time, was_late in zip(times, late, strict=True) if not was_late]


@cache
def cycles_per_us(device: torch.device) -> float:
    """Cycles that ``torch.cuda._sleep`` counts in a microsecond at the device's highest clock, so that no spin is too short."""
    # In kHz, in versions of torch that have it.
    rate = getattr(torch.cuda.get_device_properties(device), "clock_rate", None)
    if rate:
        return rate / 1e3
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    cycles, shortest = 10_000_000, float("inf")
    for _ in range(5):
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        shortest = min(shortest, start.elapsed_time(end))
    return cycles / (shortest * 1e3)


def figures(times: Mapping[str, Mapping[str, float]], layers: int = 1) -> dict[str, Any]:
    """What a record's row has of the :meth:`Clock.rounds` of calls with so many equal layers."""
    return {
        "ms": {label: of["median"] / layers for label, of in times.items()},
        "spread": {label: [of[end] / layers for end in ("p10", "p90")] for label, of in times.items()},
        "late": {label: int(of["late"]) for label, of in times.items()},
    }


class Clock:
    """Measures calls of this rank together with the other ranks."""

    def __init__(self, ranks: Ranks, samples: int) -> None:
        self.ranks, self.samples = ranks, samples
        self._cuda = ranks.device.type == "cuda"
        self._word = torch.zeros(1, dtype=torch.int32, device=ranks.device)
        if self._cuda:
            self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._cycles_per_us = cycles_per_us(ranks.device)

    def rounds(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, dict[str, float]]:
        """Milliseconds of the slowest rank: median, 10th and 90th percentile over the rounds.

        ``late`` counts the rounds in which some host enqueues the call too late; see :func:`in_time`.
        """
        names = list(calls)
        spins = {name: self._spin_for(call) for name, call in calls.items()}
        times: dict[str, list[float]] = {name: [] for name in names}
        late: dict[str, list[float]] = {name: [] for name in names}
        for index in range(WARM_UP + self.samples):
            for name in in_round(names, index):
                elapsed, was_late = self._sample(calls[name], spins[name])
                if index >= WARM_UP:
                    times[name].append(elapsed)
                    late[name].append(float(was_late))
        return {name: self._summary(times[name], late[name]) for name in names}

    def _summary(self, times: list[float], late: list[float]) -> dict[str, float]:
        """Of one mode, over all ranks."""
        slowest, late = self.ranks.largest(times), self.ranks.largest(late)
        kept = sorted(in_time(slowest, late))
        last = len(kept) - 1
        ends = {"p10": kept[round(0.1 * last)], "p90": kept[round(0.9 * last)]}
        return ends | {"median": statistics.median(kept), "late": sum(late)}

    def _line_up(self) -> None:
        if self._cuda:
            dist.all_reduce(self._word)
        else:
            dist.barrier()

    def _sample(self, call: Callable[[], object], spin_us: float) -> tuple[float, bool]:
        """Milliseconds of a call, and whether the device had to wait for the host."""
        self._line_up()
        began = time.perf_counter()
        if not self._cuda:
            call()
            return (time.perf_counter() - began) * 1e3, False
        # The device waits until the host has enqueued the call.
        torch.cuda._sleep(int(spin_us * self._cycles_per_us))
        self._start.record()
        call()
        self._end.record()
        enqueued = time.perf_counter() - began
        self._end.synchronize()
        return self._start.elapsed_time(self._end), enqueued * 1e6 > spin_us

    def _spin_for(self, call: Callable[[], object]) -> float:
        """Microseconds in which the slowest rank enqueues a call, and half as much again."""
        if not self._cuda:
            return 0.0
        longest = 0.0
        for index in range(4):
            self._line_up()
            torch.cuda.synchronize()
            began = time.perf_counter()
            call()
            # The first call may load what is loaded lazily.
            longest = max(longest, time.perf_counter() - began) if index else 0.0
            torch.cuda.synchronize()
        return max(LEAST_SPIN_US, 1.5e6 * self.ranks.largest([longest])[0])


def captured(call: Callable[[], object]) -> Callable[[], object]:
    """The call as a CUDA graph, which writes the same results on each replay."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    torch.cuda.synchronize()
    reasons: list[Exception] = []
    try:
        # NCCL's watchdog calls the driver meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            try:
                results = call()
            except Exception as error:
                reasons.append(error)
                raise
    except Exception as error:
        # The end of a capture that has failed fails, too. It leaves its stream current and hides
        # why, and the default generator goes on taking its calls for captured ones.
        torch.cuda.set_stream(stream)
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.graphsafe_set_state(torch.Generator(generator.device).graphsafe_get_state())
        raise (reasons or [error])[0] from None

    def replay() -> object:
        graph.replay()
        return results

    return replay
