"""Records as tables of Markdown."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .models import MODELS
from .options import ENGINES, OF_MODELS

__all__ = ["line", "show"]

TITLES = {
    "none": "no collectives",
    "torch": "PyTorch's styles",
    "torch_compiled": "PyTorch's styles, compiled",
    "ar": "AllReduce",
    "one_shot": "one-shot",
    "two_shot": "two-shot",
    "sp": "AG, RS",
    "async_tp": "async-TP",
    "flux": "flux",
    "flux_ar": "flux, AR",
    "flux_sp": "flux, AG and RS",
    "flux_kept": "flux, gathered x kept",
    "flux_bf16": "flux, bf16",
    "flux_compiled": "flux, compiled",
}
BASES = {"prefill": "ar", "decode": "ar", "train": "sp"}
"""What each phase is compared with."""
CAPTION = "Share hidden: (base - flux) / (base - no collectives). Elementwise work that flux fuses counts as hidden, too."


def share_hidden(row: dict[str, Any], mode: str = "flux") -> float | None:
    """``(base - mode) / (base - none)``: the part of the exposed communication that a mode hides, and elementwise work that it fuses."""
    ms, base = row["ms"], BASES[row["phase"]]
    if not {mode, base, "none"} <= set(ms) or ms[base] <= ms["none"]:
        return None
    return (ms[base] - ms[mode]) / (ms[base] - ms["none"])


def _over(row: dict[str, Any], base: str, mode: str = "flux") -> float | None:
    return row["ms"][base] / row["ms"][mode] if {base, mode} <= set(row["ms"]) else None


def _best_other(row: dict[str, Any]) -> float | None:
    others = [row["ms"][mode] for mode in ("ar", "one_shot", "two_shot", "sp", "async_tp") if mode in row["ms"]]
    return min(others) / row["ms"]["flux"] if others and "flux" in row["ms"] else None


def _number(value: float | None, digits: int, end: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{end}"


def _of_dtype(row: dict[str, Any]) -> str:
    return f", {row['dtype']}" if "dtype" in row else ""


def line(row: dict[str, Any]) -> str:
    """A row as one line."""
    if row["phase"] == "megatron":
        times = f"megatron {row['ms']['megatron']:.1f}  flux {row['ms']['flux']:.1f} ms a step"
        judged = "" if row["verified"] else "  NOT VERIFIED"
        steps = len(row["losses"]["flux"])
        return f"{row['model']} m={row['m']} tp={row['tp']} {row['transport']}: {times}, losses of {steps} steps within {row['difference']:.1e}{judged}"
    if row["phase"] in OF_MODELS:
        times = "  ".join(f"{mode} {ms:.2f}" for mode, ms in row["ms"].items())
        words = f"{row['model']} {row['phase']} {_size(row)} tp={row['tp']} {row['transport']}: {times} ms, "
        words += f"within {max(row['differences'].values(), default=float('inf')):.1e}{'' if row['verified'] else '  NOT VERIFIED'}"
        return words + "".join(f"\n    {mode} not run: {reason}" for mode, reason in row["why"].items())
    if row["phase"] == "vllm":
        times = "  ".join(f"{mode} {ms:.1f}" for mode, ms in row["ms"].items())
        return f"{row['model']} {row['case']} batch={row['batch']} tp={row['tp']}: {times} ms"
    times = "  ".join(f"{mode} {ms:.3f}" for mode, ms in row["ms"].items())
    words = f"{row['model']} {row['phase']}{_of_dtype(row)} m={row['m']} tp={row['tp']} {row['transport']}: {times} ms a layer"
    words += "" if row["verified"] else f"  NOT VERIFIED {row['error']}, {row['largest_error']:.1e} at most"
    for name, reasons in (("not run", row["why"]), ("without graph", row["eager"])):
        words += "".join(f"\n    {mode} {name}: {reason}" for mode, reason in reasons.items())
    return words


def _set_up(record: dict[str, Any]) -> str:
    machine = record["device"] if not record["gpus"] else f"{record['gpus']} x {record['device']}"
    p2p = "" if record["nccl_p2p"] else ", NCCL without peer access"
    return (
        f"{machine}, {record['transport']}{p2p}, torch {record['torch']}, NCCL {record['nccl']}, driver {record['driver']}, "
        f"commit {record['commit']}, {record['date'][:10]}"
    )


def _table(head: list[str], rows: Iterable[list[str]]) -> Iterable[str]:
    yield f"| {' | '.join(head)} |"
    yield f"|{'--:|' * len(head)}"
    yield from (f"| {' | '.join(row)} |" for row in rows)


def _rows_label(row: dict[str, Any]) -> str:
    return f"{row['m']}" + ("" if row["verified"] else " (not verified)")


def _gains(row: dict[str, Any]) -> list[str]:
    return [_number(_over(row, BASES[row["phase"]]), 2, "x"), _number(_best_other(row), 2, "x"), _number(share_hidden(row), 2)]


def _full(record: dict[str, Any]) -> Iterable[str]:
    """A table of all modes for each phase and model."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in record["rows"]:
        groups.setdefault((row["phase"], row["model"]), []).append(row)
    for (phase, model), rows in groups.items():
        modes = [mode for mode in TITLES if any(mode in row["ms"] for row in rows)]
        yield f"\n{MODELS[model].title}, {phase}{_of_dtype(rows[0])}, TP {rows[0]['tp']}, ms a layer\n"
        head = ["m", *(TITLES[mode] for mode in modes), f"over {TITLES[BASES[phase]]}", "over the best other", "share hidden"]

        def time(row: dict[str, Any], mode: str) -> str:
            return _number(row["ms"].get(mode), 3) + (" (no graph)" if mode in row["eager"] else "")

        yield from _table(head, ([_rows_label(row), *(time(row, mode) for mode in modes), *_gains(row)] for row in rows))
        reasons = sorted({f"{TITLES[mode]}: {reason}" for row in rows for mode, reason in row["why"].items()})
        if reasons:
            yield f"\nNot run: {'; '.join(reasons)}."
    yield f"\n{CAPTION}"


def _summary(record: dict[str, Any]) -> Iterable[str]:
    """One table of all rows: the bound, the base, flux, and what flux gains."""
    yield ""
    head = ["model", "phase", "TP", "m", "no collectives", "base", "flux", "over the base", "over the best other", "share hidden"]

    def cells(row: dict[str, Any]) -> list[str]:
        base = BASES[row["phase"]]
        times = [_number(row["ms"].get(mode), 3) for mode in ("none", base, "flux")]
        times[1] = f"{TITLES[base]} {times[1]}"
        return [MODELS[row["model"]].title, f"{row['phase']}{_of_dtype(row)}", str(row["tp"]), _rows_label(row), *times, *_gains(row)]

    yield from _table(head, (cells(row) for row in record["rows"]))
    yield f"\n{CAPTION}"


def _megatron(record: dict[str, Any]) -> Iterable[str]:
    """One table of all rows: times of a step, and how far losses differ."""
    yield f"megatron-core {record['megatron_core']}\n"
    head = ["model", "layers", "TP", "m", "Megatron-Core, ms a step", "flux, ms a step", "over Megatron-Core", "steps", "largest difference of losses"]

    def cells(row: dict[str, Any]) -> list[str]:
        ms = row["ms"]
        words = [MODELS[row["model"]].title, str(row["layers"]), str(row["tp"]), _rows_label(row)]
        words += [_number(ms["megatron"], 1), _number(ms["flux"], 1), _number(ms["megatron"] / ms["flux"], 2, "x")]
        return [*words, str(len(row["losses"]["flux"])), f"{row['difference']:.1e}"]

    yield from _table(head, (cells(row) for row in record["rows"]))


def _size(row: dict[str, Any]) -> str:
    return f"m={row['m']}" if "m" in row else f"batch={row['batch']}"


def _models(record: dict[str, Any]) -> Iterable[str]:
    """One table of all rows: times of a step or a token, and how far results differ."""
    yield f"transformers {record['transformers']}, {record['layers']} layers\n"
    modes = [mode for mode in TITLES if any(mode in row["ms"] for row in record["rows"])]
    head = ["model", "phase", "TP", "m or batch", *(f"{TITLES[mode]}, ms" for mode in modes), "largest difference"]

    def cells(row: dict[str, Any]) -> list[str]:
        words = [MODELS[row["model"]].title, row["phase"], str(row["tp"]), _size(row) + ("" if row["verified"] else " (not verified)")]
        return [*words, *(_number(row["ms"].get(mode), 2) for mode in modes), f"{max(row['differences'].values()):.1e}"]

    yield from _table(head, (cells(row) for row in record["rows"]))
    reasons = sorted({f"{TITLES[mode]}, {row['phase']}: {reason}" for row in record["rows"] for mode, reason in row["why"].items()})
    if reasons:
        yield f"\nNot run: {'; '.join(reasons)}."


def _vllm(record: dict[str, Any]) -> Iterable[str]:
    """One table of all cases: times of an answer, and of a decoded token."""
    yield f"vllm {record['vllm']}, {record['layers']} layers{', fp8' if record.get('scales') else ''}\n"
    modes = [mode for mode in ENGINES if any(mode in row["ms"] for row in record["rows"])]
    head = ["case", "batch", "input", "output", *(f"{mode}, ms" for mode in modes), *(f"{mode}, ms a token" for mode in modes), "speed-up"]

    def cells(row: dict[str, Any]) -> list[str]:
        ms, steps = row["ms"], row.get("step_ms", {})
        words = [row["case"], *(str(row[field]) for field in ("batch", "input", "output"))]
        words += [*(_number(ms.get(mode), 1) for mode in modes), *(_number(steps.get(mode), 2) for mode in modes)]
        return [*words, _number(_over(row, "default"), 2, "x")]

    yield from _table(head, (cells(row) for row in record["rows"]))
    for mode, shares in record["compared"].items():
        first, all_tokens = (round(100 * shares[f"equal_{what}"]) for what in ("first_tokens", "tokens"))
        yield f"\nGreedy tokens of {mode} that are those of the first mode: {first} % of the first ones, {all_tokens} % of all."


def show(paths: Iterable[Path], summary: bool) -> None:
    """Prints records."""
    kinds = {"layers": _summary if summary else _full, "megatron": _megatron, "models": _models, "vllm": _vllm}
    for path in paths:
        record = json.loads(path.read_text(encoding="utf-8"))
        tables = kinds.get(record.get("kind")) if isinstance(record, dict) else None
        if tables is None:
            raise SystemExit(f"{path} is no record of python -m flux_tp.bench: flux-bench show prints those of flux-bench bench")
        print("\n".join([_set_up(record), *tables(record)]))
