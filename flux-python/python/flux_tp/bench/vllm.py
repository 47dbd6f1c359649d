"""Latency of vLLM with random weights: its own layers, its async-TP pass, and flux_tp's plugin with whole and with split rows.

Each mode is an engine of its own, in a process of its own: ``python -m flux_tp.bench.vllm MODE ...``, which the command
``python -m flux_tp.bench vllm`` starts. Invariant: all modes get the same prompts in the same order.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from .models import MODELS, Model
from .options import Options

__all__ = ["CASES", "random_weights", "rows_of", "run"]

# Name, batch, input tokens, output tokens.
CASES = [("prefill", 4, 2048, 1)] + [("decode", batch, 128, 32) for batch in (1, 16, 64, 256)]
WARMUPS = 2
FUSED = {"flux": 2, "flux_sp": 4}
"""Modes of flux_tp's plugin, with how many linear layers of a decoder layer it computes."""
# Greedy tokens that modes are compared by.
PROMPTS, TOKENS = 16, 16


def run(options: Options, tp: int) -> int:
    """Runs an engine for each mode, and writes the record, which has each engine once it has ended. Returns the exit status."""
    from .show import line

    model, found = options.models[0], {}
    with tempfile.TemporaryDirectory() as folder:
        _write_config(Path(folder), MODELS[model], options.layers)
        for mode in options.modes:
            why = _engine(mode, (tp, folder, options.samples, options.scales or "none"), options.time_limit)
            if why is not None:
                print(f"{mode} not run: {why}", file=sys.stderr)
                continue
            found[mode] = json.loads((Path(folder) / f"{mode}.json").read_text(encoding="utf-8"))
            _record(options, tp, found)
            for row in rows_of({mode: found[mode]}, model, tp, options.scales):
                print(line(row), flush=True)
    return 0 if found else 1


def _record(options: Options, tp: int, found: dict[str, dict[str, Any]]) -> None:
    """Writes the record of the engines that have ended."""
    from importlib.metadata import version

    import torch

    from .record import Record

    ranks: Any = SimpleNamespace(device=torch.device("cuda"), world=tp, comm=SimpleNamespace(transport="nvlink"))
    own = {"vllm": version("vllm"), "layers": options.layers, "scales": options.scales, "compared": _compared(found)}
    record = Record(ranks, "vllm", options, own)
    for row in rows_of(found, options.models[0], tp, options.scales):
        record.add(row)


def rows_of(found: dict[str, dict[str, Any]], model: str, tp: int, scales: str | None = None) -> list[dict[str, Any]]:
    """A row for each case, of what each mode's engine has found."""
    rows = []
    for at, (name, batch, given, count) in enumerate(CASES):
        cases = {mode: engine["cases"][at] for mode, engine in found.items()}
        row = {"model": model, "phase": "vllm", "case": name, "batch": batch, "input": given, "output": count, "tp": tp}
        row |= {"dtype": f"e4m3.{scales}:bf16"} if scales else {}
        row["ms"] = {mode: statistics.median(case["ms"]) for mode, case in cases.items()}
        row["spread"] = {mode: [min(case["ms"]), max(case["ms"])] for mode, case in cases.items()}
        if count > 1:
            # Without the prefill and the handling of requests.
            row["step_ms"] = {mode: (row["ms"][mode] - statistics.median(case["first_ms"])) / (count - 1) for mode, case in cases.items()}
        rows.append(row)
    return rows


def _compared(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Shares of tokens that are those of the first mode. A sequence goes its own way after its first other token."""
    base, *others = found
    shares = {}
    for mode in others:
        pairs = list(zip(found[base]["tokens"], found[mode]["tokens"], strict=True))
        tokens = [one == other for ours, theirs in pairs for one, other in zip(ours, theirs, strict=True)]
        shares[mode] = {"equal_first_tokens": sum(a[0] == b[0] for a, b in pairs) / len(pairs), "equal_tokens": sum(tokens) / len(tokens)}
    return shares


def _write_config(folder: Path, model: Model, layers: int) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": model.hidden,
        "intermediate_size": model.inner,
        "max_position_embeddings": 8192,
        "num_attention_heads": model.heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": model.kv_heads,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _engine(mode: str, of: Sequence[Any], limit: float) -> str | None:
    """Runs a mode's engine in a session of its own, all of which ends with it. Returns why it failed, or ``None``."""
    environment = os.environ | {
        "FLUX_VLLM": "1" if mode in FUSED else "0",
        # No mode has multicast, nor another's compiled graphs.
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
        "VLLM_CACHE_ROOT": str(Path(of[1]) / f"cache-{mode}"),
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # For `random_weights`, which goes to the workers.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "flux_tp.bench.vllm", mode, *map(str, of)]
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        status = process.wait(timeout=limit)
        return f"its engine ended with {status}" if status else None
    except subprocess.TimeoutExpired:
        return f"it took longer than {limit:.0f} s"
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def random_weights(model: Any) -> int:
    """Norms of one, biases of zero, embeddings of deviation 1 and linear layers of deviation 0.02: under vLLM's dummy weights, which are below 0.001, layers add nothing.

    Row-parallel layers have that of GPT-2's initial values, 0.02 over the root of twice the number of layers, so that residuals
    do not grow with that number. Returns how many layers flux_tp computes.
    """
    largest, usual = 1e-3, 0.02
    residuals = 2 * model.config.num_hidden_layers
    for name, parameter in model.named_parameters():
        deviation = usual / residuals**0.5 if "o_proj" in name or "down_proj" in name else usual
        deviation = 1.0 if "embed_tokens" in name else deviation
        if parameter.dim() == 1 and not name.endswith("weight_scale"):
            parameter.data.fill_(0.0 if name.endswith("bias") else 1.0)
        # 8-bit weights have scales.
        elif name.endswith("weight_scale") or parameter.dtype.itemsize > 1:
            parameter.data.mul_(deviation * 3**0.5 / largest)
    return sum(getattr(module, "flux_fused", False) for module in model.modules())


def _measure(mode: str, tp: int, folder: Path, samples: int, scales: str) -> None:
    import numpy as np
    from vllm import LLM, SamplingParams

    # By its importable name: this module is `__main__`.
    from flux_tp.bench.vllm import random_weights as weights

    options: dict[str, Any] = {}
    if mode == "async_tp":
        options["compilation_config"] = {"pass_config": {"enable_sp": True, "fuse_gemm_comms": True}}
    if mode == "flux_sp":
        options["compilation_config"] = {"pass_config": {"enable_sp": True}}
    if scales != "none":
        # Scales of rows of the input, and one of the weight.
        options["quantization"] = "fp8"
    llm = LLM(
        model=str(folder),
        tensor_parallel_size=tp,
        dtype="bfloat16",
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=4096,
        max_num_batched_tokens=8192,
        max_num_seqs=256,
        enable_prefix_caching=False,
        distributed_executor_backend="mp",
        disable_log_stats=True,
        seed=0,
        **options,
    )
    fused = llm.apply_model(weights)
    print(f"{mode}: flux_tp computes {fused[0]} layers of each rank", flush=True)
    expected = FUSED.get(mode, 0) * json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    if fused[0] != expected:
        raise SystemExit(f"{mode}: flux_tp computes {fused[0]} layers, and {expected} are to be")
    numbers = np.random.default_rng(0)

    def prompts(batch: int, length: int) -> list[dict[str, Any]]:
        return [{"prompt_token_ids": ids} for ids in numbers.integers(100, 100_000, (batch, length)).tolist()]

    def generate(given: list[dict[str, Any]], count: int) -> Any:
        sampling = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False)
        return llm.generate(given, sampling, use_tqdm=False)

    def times(batch: int, length: int, count: int) -> list[float]:
        taken = []
        for _ in range(WARMUPS + samples):
            given = prompts(batch, length)
            began = time.perf_counter()
            generate(given, count)
            taken.append(1e3 * (time.perf_counter() - began))
        return taken[WARMUPS:]

    tokens = [list(output.outputs[0].token_ids) for output in generate(prompts(PROMPTS, 128), TOKENS)]
    cases = []
    for _, batch, length, count in CASES:
        case = {"ms": times(batch, length, count)}
        if count > 1:
            case["first_ms"] = times(batch, length, 1)
        cases.append(case)
    (folder / f"{mode}.json").write_text(json.dumps({"tokens": tokens, "cases": cases}), encoding="utf-8")


if __name__ == "__main__":
    _measure(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
