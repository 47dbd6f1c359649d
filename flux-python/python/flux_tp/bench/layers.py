"""The measurement: all modes of a model, phase and ``m`` in one process group, on the same weights and inputs.

Invariant: every rank takes the same decisions, so all make the same calls in the same order.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch

from .attention import KV_LENGTH, SEQUENCE, causal, decoding
from .clock import Clock, captured, figures
from .fp8 import quantized_layer, with_scales_of_inputs
from .measure import measure
from .memory import free_on_host, least_bytes, refusal
from .models import MODELS
from .modes import MODES, AllReduce, Calibrating, Dequantised, Mode
from .options import Options
from .ranks import Ranks, say
from .record import Record
from .stack import TOLERANCE, Inputs, Step, reference, step, worst_row
from .weights import Layer, random_layer

__all__ = ["attempt", "run", "verified"]


def verified(errors: Mapping[str, float], bound: float) -> bool:
    """Whether a mode was compared, and none is above the bound. ``none`` computes wrong results; a NaN of ``ar`` makes no bound."""
    compared = [error for mode, error in errors.items() if mode != "none"]
    return bool(compared) and math.isfinite(bound) and all(error <= bound for error in compared)


def run(options: Options) -> None:
    """Measures as a rank of torchrun's."""
    ranks = Ranks(options.transport, max(max(options.rows(phase)) for phase in options.phases))
    why = ranks.first_word(refusal(options, ranks.world, *_free(ranks)))
    if why is not None:
        ranks.close()
        raise SystemExit(why)
    own = {"layers": options.layers, "sequence": SEQUENCE, "kv_length": KV_LENGTH, "tolerance": TOLERANCE}
    record = Record(ranks, "layers", options, own) if ranks.rank == 0 else None
    if record:
        print(f"{ranks.comm.explain()}\n", flush=True)
    measure(ranks, options, record, _cases(ranks, options))
    ranks.close()


def _cases(ranks: Ranks, options: Options) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Every model, phase and ``m``; the layers of one model at a time."""
    for name in options.models:
        say(ranks, f"{name}: random weights of {options.layers} layers")
        torch.manual_seed(1 + ranks.rank)
        layers = [random_layer(MODELS[name], ranks.world, ranks.device) for _ in range(options.layers)]
        narrow = [quantized_layer(layer, options.scales) for layer in layers] if options.scales else None
        for phase, m in ((phase, m) for phase in options.phases for m in options.rows(phase)):
            yield f"{name} {phase} m = {m}", partial(_row, ranks, options, name, layers, narrow, phase, m)
        del layers, narrow


def _free(ranks: Ranks) -> tuple[int, int]:
    """Bytes that are free for this rank, and how many ranks share them."""
    if ranks.device.type == "cuda":
        return torch.cuda.mem_get_info(ranks.device)[0], 1
    return free_on_host(), int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))


def _row(
    ranks: Ranks, options: Options, name: str, layers: list[Layer], narrow: list[Layer] | None, phase: str, m: int
) -> dict[str, Any]:
    """``narrow``: the layers in 8 bits, if these are measured."""
    model, form, row = MODELS[name], options.scales, f"{name} {phase} m = {m}"
    held = least_bytes(model, ranks.world, len(layers), phase, m, form)
    say(ranks, f"{row}: reference in fp32, {held / 1e9:.1f} GB or more a rank")
    inputs = Inputs(model, m, phase == "train", ranks)
    if phase == "decode":
        attend = decoding(model, ranks.world, m, len(layers), ranks.device)
    else:
        attend = causal(model, ranks.world, m)
    wide = Calibrating(ranks, m, model) if form == "tensor" else AllReduce(ranks, m, model)
    exact = reference(layers, inputs, wide, attend)
    if form == "tensor":
        narrow = with_scales_of_inputs(narrow, wide.largest, ranks)
    if ranks.device.type == "cuda":
        # What the fp32 pass leaves in torch's cache NCCL, symmetric memory and flux_tp cannot use.
        torch.cuda.empty_cache()

    def prepared(kind: type[Mode], form: str | None = form) -> tuple[Mode, Step]:
        mode = kind(ranks, m, model, form)
        return mode, step(narrow if form else layers, inputs, mode, attend)

    def error_of(mode: Mode, call: Callable[[], Any]) -> float:
        return ranks.largest([worst_row(call(), exact, mode, inputs.own)])[0]

    modes: dict[str, Mode] = {}
    calls: dict[str, Callable[[], Any]] = {}
    why: dict[str, str] = {}
    eager: dict[str, str] = {}
    for label in options.modes:
        say(ranks, f"{row}: first passes of {label}")
        kind, of_mode = MODES[label](phase), None if label == "flux_bf16" else form
        reason = kind.why_not(ranks, m, phase, of_mode)
        if reason is None:
            made: list[tuple[Mode, Step]] = []
            reason = attempt(ranks, lambda: (made.append(prepared(kind, of_mode)), made[0][1](), made[0][1]()))
        if reason is not None:
            why[label] = reason
            continue
        modes[label], calls[label] = made[0]
        if phase == "decode" and ranks.device.type == "cuda":
            graphs: list[Callable[[], Any]] = []
            reason = attempt(ranks, lambda: graphs.append(captured(calls[label])))
            if reason is None:
                calls[label] = graphs[0]
            else:
                eager[label] = reason
    bound = TOLERANCE * error_of(*prepared(Dequantised if form else AllReduce))
    say(ranks, f"{row}: {options.samples} rounds of {', '.join(calls)}")
    times = Clock(ranks, options.samples).rounds(calls) if calls else {}
    # After the timing, so that what replays and repetition spoil is seen.
    errors = {label: error_of(modes[label], call) for label, call in calls.items()}
    ranks.comm.check()
    return {
        "model": name,
        "phase": phase,
        "m": m,
        **({"dtype": f"e4m3.{form}:bf16"} if form else {}),
        "tp": ranks.world,
        "transport": ranks.comm.transport,
        "layers": len(layers),
        # A layer's part of the stack's time.
        **figures(times, len(layers)),
        "error": errors,
        "largest_error": bound,
        "verified": verified(errors, bound),
        "why": why,
        "eager": eager,
    }


def attempt(ranks: Ranks, call: Callable[[], Any]) -> str | None:
    """Calls on every rank; why it fails on one, or ``None``."""
    word = None
    try:
        call()
        if ranks.device.type == "cuda":
            torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001 (whatever a library's op raises is the reason)
        word = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return ranks.first_word(word)
