"""A Llama of transformers that is trained and decodes, split by flux_tp and by PyTorch's own styles.

Invariant: all modes have the same initial weights and tokens, and make the same number of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers import __version__ as transformers

import flux_tp

from . import styles
from .clock import WARM_UP, Clock, captured, figures
from .layers import attempt
from .measure import measure
from .models import MODELS
from .options import Options
from .ranks import Ranks, say
from .record import Record
from .stack import difference

__all__ = ["run"]

VOCABULARY = 128256
"""Llama 3's."""
PROMPT = 128
"""Tokens of a prompt."""
RATE = 1e-4
"""AdamW's learning rate."""
TOLERANCES = {"steps": 2.0**-7, "prompt": 2.0**-4, "generate": 2.0**-4}
"""Largest relative differences: of two losses, a unit in the last place of bf16; of logits, which have some 60 roundings
of 2^-9 behind them on both sides."""
LEAST_LOSS = 2.0**-5
"""Part of the first loss that a later one counts at least."""


class _Mode(NamedTuple):
    """How a model is split."""

    parallelize: Callable[..., nn.Module]
    compiled: bool = False
    overlapped: bool = False
    """Whether torch.compile overlaps GEMMs and collectives."""


MODES = {
    "torch": _Mode(styles.parallelize),
    "torch_compiled": _Mode(styles.parallelize, compiled=True),
    "async_tp": _Mode(styles.parallelize, compiled=True, overlapped=True),
    "flux": _Mode(flux_tp.parallelize),
    "flux_compiled": _Mode(flux_tp.parallelize, compiled=True),
}


def run(options: Options) -> None:
    """Measures as a rank of torchrun's."""
    tokens = {"generate": PROMPT}
    ranks = Ranks(options.transport, max(tokens.get(phase, 1) * max(options.rows(phase)) for phase in options.phases))
    mesh = init_device_mesh(ranks.device.type, (ranks.world,), mesh_dim_names=("tp",))
    own = {"layers": options.layers, "prompt": PROMPT, "tolerances": TOLERANCES, "transformers": transformers}
    record = Record(ranks, "models", options, own) if ranks.rank == 0 else None
    cases = ((name, phase, count) for name in options.models for phase in options.phases for count in options.rows(phase))
    measure(ranks, options, record, ((" ".join(map(str, case)), partial(_row, ranks, mesh, options, *case)) for case in cases))
    ranks.close()


def _row(ranks: Ranks, mesh: DeviceMesh, options: Options, name: str, phase: str, count: int) -> dict[str, Any]:
    """``count``: tokens of a step or of a prompt, or prompts."""
    # Of another number of rows, which would be compiled as one of any.
    torch._dynamo.reset()
    made: dict[str, _Training | _Prompt | _Decoding] = {}
    calls: dict[str, Callable[[], object]] = {}
    why: dict[str, str] = {}
    for label in options.modes:
        say(ranks, f"{name} {phase} {count}: first passes of {label}")
        mode, found = MODES[label], []
        reason = _why_not(ranks, mode, phase)
        if reason is None:
            kind = _KINDS[phase]
            reason = attempt(ranks, lambda: found.append(kind(ranks, mesh, mode, options, name, count)))
            reason = reason or attempt(ranks, lambda: [found[0].step() for _ in range(2)])
            # Into a graph, on GPUs: its own call is another one.
            reason = reason or attempt(ranks, lambda: found.append(found[0].call()))
        if reason is None:
            made[label], calls[label] = found
        else:
            why[label] = reason
    say(ranks, f"{name} {phase} {count}: {options.samples} rounds of {', '.join(calls)}")
    times = Clock(ranks, options.samples).rounds(calls) if calls else {}
    results = {label: of.results() for label, of in made.items()}
    base = next(iter(results), None)
    differences = {label: ranks.largest([of_base(results[base], of)])[0] for of_base in [_DIFFERENCES[phase]] for label, of in results.items()}
    ranks.comm.check()
    return {
        "model": name,
        "phase": phase,
        **({"batch": count} if phase == "generate" else {"m": count}),
        "tp": ranks.world,
        "transport": ranks.comm.transport,
        "layers": options.layers,
        **figures(times),
        **({"losses": results} if phase == "steps" else {}),
        "differences": differences,
        # A mode is compared with another.
        "verified": len(differences) > 1 and max(differences.values()) <= TOLERANCES[phase],
        "why": why,
    }


def _why_not(ranks: Ranks, mode: _Mode, phase: str) -> str | None:
    if mode.overlapped and phase != "steps":
        return "rows are whole on every rank in inference: there are no collectives that async-TP overlaps"
    return ranks.why_no_symmetric_memory() if mode.overlapped else None


def _split(ranks: Ranks, mesh: DeviceMesh, mode: _Mode, options: Options, name: str, use: str, max_m: int) -> nn.Module:
    model = MODELS[name]
    config = LlamaConfig(
        hidden_size=model.hidden,
        intermediate_size=model.inner,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        head_dim=model.head_dim,
        num_hidden_layers=options.layers,
        vocab_size=512 if name == "tiny" else VOCABULARY,
    )
    torch.manual_seed(0)
    with ranks.device:
        whole = LlamaForCausalLM(config).to(torch.bfloat16)
    return mode.parallelize(whole, mesh, use, max_m=max_m, verbose=False)


def _compile(model: nn.Module, mode: _Mode) -> None:
    """Has each layer compiled in its next call, where the mode is."""
    if mode.compiled:
        # By an option: under a setting of all, torch takes one compiled otherwise for this one.
        for layer in model.model.layers:
            layer.compile(options={"_micro_pipeline_tp": mode.overlapped})


class _Training:
    """A model and its steps."""

    def __init__(self, ranks: Ranks, mesh: DeviceMesh, mode: _Mode, options: Options, name: str, m: int) -> None:
        self.model = _split(ranks, mesh, mode, options, name, "training", m)
        if mode.overlapped:
            styles.enable_overlap(mesh)
        _compile(self.model, mode)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE)
        torch.manual_seed(1)
        # One sequence: torch.compile refuses several that PyTorch's styles split.
        self.ids = torch.randint(self.model.config.vocab_size, (1, m)).to(ranks.device)
        self.losses: list[Tensor] = []

    def step(self) -> None:
        """Forward, backward, clipping and update."""
        loss = self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.detach())

    def call(self) -> Callable[[], object]:
        return self.step

    def results(self) -> list[float]:
        return [loss.item() for loss in self.losses]


class _Prompt:
    """A model that reads one prompt, without a cache."""

    def __init__(self, ranks: Ranks, mesh: DeviceMesh, mode: _Mode, options: Options, name: str, m: int) -> None:
        self.model = _split(ranks, mesh, mode, options, name, "inference", m).eval().requires_grad_(False)
        _compile(self.model, mode)
        torch.manual_seed(1)
        self.ids = torch.randint(self.model.config.vocab_size, (1, m)).to(ranks.device)

    @torch.inference_mode()
    def step(self) -> Tensor:
        """The logits of the token behind the prompt."""
        return self.model(input_ids=self.ids, use_cache=False, logits_to_keep=1).logits

    def call(self) -> Callable[[], object]:
        return self.step

    def results(self) -> list[Tensor]:
        return [self.step().float()]


class _Decoding:
    """A model with the caches of prompts, and the likeliest next token of each."""

    def __init__(self, ranks: Ranks, mesh: DeviceMesh, mode: _Mode, options: Options, name: str, batch: int) -> None:
        self.model = _split(ranks, mesh, mode, options, name, "inference", batch * PROMPT)
        # Frozen weights are constant, and a kernel may load them before the one ahead has ended.
        self.model.eval().requires_grad_(False)
        torch.manual_seed(1)
        prompt = torch.randint(self.model.config.vocab_size, (batch, PROMPT)).to(ranks.device)
        # First passes, those that find how long a call takes, and rounds.
        self.cache = StaticCache(self.model.config, max_cache_len=PROMPT + 16 + WARM_UP + options.samples)
        self.forced = prompt[:, :1]
        self.token = self.forced.clone()
        self.places = torch.arange(self.cache.layers[0].max_cache_len, device=ranks.device)
        self.logits = [self._forward(prompt).float()]
        # For a token: compiled with the prompts first, layers would be of any number of rows.
        _compile(self.model, mode)

    @torch.inference_mode()
    def _forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        # By the name that older versions of transformers know, too: they ignore others.
        return self.model(input_ids=ids, attention_mask=mask, past_key_values=self.cache, use_cache=True, logits_to_keep=1).logits

    @torch.inference_mode()
    def step(self) -> Tensor:
        """The next token of each prompt, and the logits that it is the likeliest of."""
        # A mask of its own: transformers makes one in captures alone, for which torch.compile
        # would compile layers anew, and a capture forbids that.
        mask = (self.places <= self.cache.layers[0].cumulative_length).expand(len(self.token), 1, 1, -1)
        logits = self._forward(self.token, mask)
        self.token.copy_(logits.argmax(-1))
        return logits

    def call(self) -> Callable[[], object]:
        """A step, on GPUs as a graph."""
        self.timed = captured(self.step) if self.token.is_cuda else self.step
        self._keep()
        return self.timed

    @torch.inference_mode()
    def _keep(self) -> None:
        """Keeps the logits of the timed call behind the prompts, for a token that is the same in all modes."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(PROMPT)
        self.token.copy_(self.forced)
        self.logits.append(self.timed().float())

    def results(self) -> list[Tensor]:
        """Logits of the prompts, and of the timed call before the timing and after it."""
        self._keep()
        return self.logits


def _of_logits(ones: list[Tensor], others: list[Tensor]) -> float:
    found = [(other - one).norm() / one.norm() for one, other in zip(ones, others, strict=True)]
    return torch.stack(found).nan_to_num(nan=float("inf")).max().item()


_KINDS = {"steps": _Training, "prompt": _Prompt, "generate": _Decoding}
_DIFFERENCES: dict[str, Callable[[Any, Any], float]] = {"steps": partial(difference, least=LEAST_LOSS), "prompt": _of_logits, "generate": _of_logits}
"""How far the results of a mode are from those of the first."""
