"""``python -m flux_tp.bench``: starts the ranks where no launcher has, and measures."""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import subprocess
import sys
from pathlib import Path

from .models import MODELS
from .options import ENGINES, OF_MODELS, PHASES, Options

_LARGE = ["gpt3", "llama3-70b", "qwen3-32b"]
"""Models that are measured on GPUs unless others are named."""
_MODES = "none,ar,one_shot,two_shot,sp,async_tp,flux"
_OF_DTYPES = {"bf16": (list(PHASES), _MODES.split(",")), "fp8": (["prefill", "decode"], f"{_MODES},flux_bf16".split(","))}
"""Phases and modes that are measured unless others are named."""
GRACE = 90.0
"""Seconds past the time limit after which a rank ends itself, and twice that, after which the ranks are given up."""


def _words(known: list[str]):
    def parse(text: str) -> list[str]:
        words = text.split(",")
        for word in words:
            if word not in known:
                raise argparse.ArgumentTypeError(f"{word!r} is none of {', '.join(known)}")
        return words

    return parse


def _rows(text: str) -> list[int]:
    rows = [int(word) for word in text.split(",")]
    if min(rows) < 1:
        raise argparse.ArgumentTypeError(f"{min(rows)} rows: give 1 or more")
    return rows


def _positive(text: str) -> int:
    return _rows(text)[0]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m flux_tp.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    layers = commands.add_parser("layers", help="time whole layers")
    phases = list(PHASES)
    layers.add_argument("--phases", type=_words(phases), help=f"of {', '.join(phases)}; fp8 has no train")
    modes = [*_MODES.split(","), "flux_bf16", "flux_ar", "flux_sp", "flux_kept"]
    layers.add_argument("--modes", type=_words(modes), help=f"of {', '.join(modes)}; flux_bf16 beside fp8 alone")
    layers.add_argument("--dtype", choices=_OF_DTYPES, default="bf16", help="of the linear layers' operands (bf16)")
    layers.add_argument("--scales", choices=["tensor", "row", "block"], help="of fp8 operands (row)")
    training = commands.add_parser("megatron", help="train a GPT of Megatron-Core with its linear layers and with flux_tp's")
    training.set_defaults(phases=["train"], modes=[])
    whole = commands.add_parser("models", help="train a Llama of transformers, and decode, split by flux_tp and by PyTorch's own styles")
    phases, modes = list(OF_MODELS), ["torch", "torch_compiled", "async_tp", "flux", "flux_compiled"]
    whole.add_argument("--phases", type=_words(phases), default=phases, help=f"of {', '.join(phases)}")
    whole.add_argument("--modes", type=_words(modes), default=modes, help=f"of {', '.join(modes)}")
    models = list(MODELS)
    for command, usual in ((layers, _LARGE), (training, _LARGE), (whole, ["llama3-8b", "llama3-70b"])):
        command.set_defaults(usual=usual)
        command.add_argument("--models", type=_words(models), help=f"of {', '.join(models)} ({', '.join(usual)}; tiny on a host without GPUs)")
        command.add_argument("--ms", type=_rows, help="rows of every phase, or prompts; by default each phase has its own")
        command.add_argument("--layers", type=_positive, default=4, help="layers of the stack (4)")
        command.add_argument("--tp", type=_positive, help="ranks to start (all GPUs; 2 on the CPU)")
        command.add_argument("--transport", default="auto", help="as of flux_tp.init; with pcie, NCCL has no peer access either")
        command.add_argument("--samples", type=_positive, default=15, help="rounds that are counted (15)")
        command.add_argument("--json", type=Path, help="where the record goes")
        command.add_argument("--time-limit", type=float, default=3600.0, help="seconds after which no further row begins (3600)")
    serving = commands.add_parser("vllm", help="time vLLM's engine with its own layers and with flux_tp's")
    engines = list(ENGINES)
    serving.add_argument("--models", type=_words(["llama3-70b"]), default=["llama3-70b"], help="llama3-70b")
    serving.add_argument("--modes", type=_words(engines), default=engines, help=f"of {', '.join(engines)}")
    serving.add_argument("--dtype", choices=_OF_DTYPES, default="bf16", help="of the linear layers' operands; fp8 as vLLM quantises bf16 weights (bf16)")
    serving.add_argument("--layers", type=_positive, default=8, help="layers of the model (8)")
    serving.add_argument("--tp", type=_positive, help="ranks of an engine (all GPUs)")
    serving.add_argument("--samples", type=_positive, default=7, help="calls that are counted (7)")
    serving.add_argument("--json", type=Path, help="where the record goes")
    serving.add_argument("--time-limit", type=float, default=600.0, help="seconds after which an engine is given up (600)")
    show = commands.add_parser("show", help="print records as tables")
    show.add_argument("--summary", action="store_true", help="one table: the bound, the base and flux")
    show.add_argument("files", type=Path, nargs="+")
    found = parser.parse_args()
    if found.command == "layers":
        _complete(found, layers)
    return found


def _complete(found: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Refuses words that do not go together, and sets those that are missing."""
    phases, modes = _OF_DTYPES[found.dtype]
    found.phases, found.modes = found.phases or phases, found.modes or modes
    if found.dtype == "bf16":
        for word, given in (("--scales", found.scales), ("flux_bf16", "flux_bf16" in found.modes)):
            if given:
                parser.error(f"{word} with --dtype bf16: it is for --dtype fp8")
        return
    for word, given in (("train", found.phases), ("flux_kept", found.modes)):
        if word in given:
            parser.error(f"{word} with --dtype fp8: 8-bit operands have no gradients")
    found.scales = found.scales or "row"


def _variables(transport: str) -> dict[str, str]:
    # Multicast may fail a whole host's links, and no mode uses it.
    variables = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    if transport == "pcie":
        variables["NCCL_P2P_DISABLE"] = "1"
    return variables


def _gpus(transport: str) -> int:
    import torch

    return 0 if transport == "host" else torch.cuda.device_count()


def _options(a: argparse.Namespace) -> Options:
    models = a.models or (a.usual if _gpus(a.transport) else ["tiny"])
    scales = getattr(a, "scales", None)
    return Options(models, a.phases, a.ms, a.modes, a.layers, a.transport, a.samples, a.json, a.time_limit, scales)


def _start(arguments: argparse.Namespace) -> int:
    """Starts the ranks by torchrun."""
    from .memory import free_on_host, refusal

    gpus = _gpus(arguments.transport)
    world = arguments.tp or gpus or 2
    if gpus and world > gpus:
        print(f"--tp {world}: there are {gpus} GPUs", file=sys.stderr)
        return 2
    why = None if gpus else refusal(_options(arguments), world, free_on_host(), world)
    if why is not None:
        print(why, file=sys.stderr)
        return 2
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    environment = {"OMP_NUM_THREADS": "1"} | os.environ
    try:
        ended = subprocess.run([*command, "-m", "flux_tp.bench", *sys.argv[1:]], env=environment, timeout=arguments.time_limit + 2 * GRACE)
    except subprocess.TimeoutExpired:
        print(f"the ranks have not ended {2 * GRACE:.0f} s after the time limit", file=sys.stderr)
        return 1
    return ended.returncode


def _vllm(a: argparse.Namespace) -> int:
    """Starts an engine of each mode."""
    import importlib.util

    if importlib.util.find_spec("vllm") is None:
        print("vllm is not installed", file=sys.stderr)
        return 2
    import torch

    from .vllm import run

    gpus = torch.cuda.device_count()
    tp = a.tp or gpus
    if not 2 <= tp <= gpus:
        print(f"--tp {tp}: there are {gpus} GPUs, and an engine of several ranks takes 2 or more", file=sys.stderr)
        return 2
    os.environ.update(_variables("nvlink"))
    return run(Options(a.models, ["vllm"], None, a.modes, a.layers, "nvlink", a.samples, a.json, a.time_limit, "row" if a.dtype == "fp8" else None), tp)


def _trace_stops(limit: float) -> None:
    """Has a rank tell where it is when it crashes, when torchrun ends it as another has failed, and after ``limit`` s, when it ends."""
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, chain=True)
    faulthandler.dump_traceback_later(limit, exit=True)


def main() -> int:
    arguments = _arguments()
    if arguments.command == "show":
        from .show import show

        show(arguments.files, arguments.summary)
        return 0
    if arguments.command == "vllm":
        return _vllm(arguments)
    os.environ.update(_variables(arguments.transport))
    if "RANK" not in os.environ:
        return _start(arguments)
    if arguments.command == "megatron":
        from .megatron import run
    elif arguments.command == "models":
        from .llama import run
    else:
        from .layers import run

    _trace_stops(arguments.time_limit + GRACE)
    run(_options(arguments))
    faulthandler.cancel_dump_traceback_later()
    return 0


if __name__ == "__main__":
    sys.exit(main())
