"""A GPT of Megatron-Core trained twice on the same weights and tokens: with its own linear layers, and with flux_tp's.

Invariant: both make the same number of steps in the same order, so that their losses can be compared one by one.
"""

from __future__ import annotations

import contextlib
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

# Megatron-Core says at import which other libraries it does without.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from megatron.core import __version__, parallel_state, tensor_parallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.spec_utils import ModuleSpec

    from ..integrations import megatron

from .attention import SEQUENCE
from .clock import Clock, figures
from .measure import measure
from .models import MODELS, Model
from .options import Options
from .ranks import Ranks
from .record import Record
from .stack import difference

__all__ = ["Attention", "run", "start"]

VOCABULARY = 8192
"""Small, so that the layers take the time."""
RATE = 0.01
"""Learning rate of plain gradient descent."""
TOLERANCE = 2.0**-7
"""Largest difference of two losses, relative: a unit in the last place of bf16, in which both models compute."""


class Attention(torch.nn.Module):
    """PyTorch's attention in place of Megatron-Core's unfused one, for both models."""

    def __init__(self, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """Takes ``[sequence, batch, heads, head_dim]``, returns ``[sequence, batch, heads * head_dim]``."""
        q, k, v = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.softmax_scale, enable_gqa=grouped)
        return y.permute(2, 0, 1, 3).flatten(2)


def start(world: int, device: torch.device) -> None:
    """Has Megatron-Core know the ranks of torch.distributed, all of which compute together."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world)
    if device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(1)
    else:
        # Megatron-Core asks for the CUDA device and its generators on the CPU, too.
        torch.cuda.current_device = lambda: "cpu"
        CudaRNGStatesTracker.fork = lambda self, name=None: contextlib.nullcontext()


def _configured(model: Model, layers: int, ranks: Ranks) -> TransformerConfig:
    return TransformerConfig(
        num_layers=layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        kv_channels=model.head_dim,
        ffn_hidden_size=model.inner,
        gated_linear_unit=model.gated,
        activation_func=F.silu if model.gated else F.gelu,
        normalization="RMSNorm" if model.gated else "LayerNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=ranks.world,
        sequence_parallel=True,
        gradient_accumulation_fusion=False,
        use_cpu_initialization=ranks.device.type == "cpu",
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
    )


class _Training:
    """One model with its steps."""

    def __init__(self, config: TransformerConfig, spec: ModuleSpec, length: int, ranks: Ranks) -> None:
        model = GPTModel(
            config,
            megatron.block(spec, config),
            vocab_size=VOCABULARY,
            max_sequence_length=length,
            position_embedding_type="rope" if config.gated_linear_unit else "learned_absolute",
        )
        self.model = model.to(ranks.device, torch.bfloat16)
        self.losses: list[Tensor] = []

    def step(self, tokens: Tensor, labels: Tensor, positions: Tensor) -> None:
        """Forward, backward and update."""
        loss = self.model(tokens, positions, None, labels=labels).mean()
        loss.backward()
        with torch.no_grad():
            for parameter in self.model.parameters():
                if getattr(parameter, "sequence_parallel", False):
                    dist.all_reduce(parameter.grad)
                parameter.sub_(parameter.grad, alpha=RATE)
        self.model.zero_grad()
        self.losses.append(loss.detach())


def run(options: Options) -> None:
    """Measures as a rank of torchrun's."""
    ranks = Ranks(options.transport, max(options.rows("train")))
    start(ranks.world, ranks.device)
    own = {"layers": options.layers, "sequence": SEQUENCE, "vocabulary": VOCABULARY, "tolerance": TOLERANCE, "megatron_core": __version__}
    record = Record(ranks, "megatron", options, own) if ranks.rank == 0 else None
    with megatron.connect(transport=ranks.comm.transport, max_m=max(options.rows("train")), device=ranks.device.index):
        cases = ((name, m) for name in options.models for m in options.rows("train"))
        measure(ranks, options, record, ((f"{name} m = {m}", partial(_row, ranks, options, name, m)) for name, m in cases))
    ranks.close()


def _row(ranks: Ranks, options: Options, name: str, m: int) -> dict[str, Any]:
    length = SEQUENCE if m % SEQUENCE == 0 else m
    config, spec = _configured(MODELS[name], options.layers, ranks), get_gpt_layer_local_spec(normalization=None)
    spec.submodules.self_attention.submodules.core_attention = Attention
    trainings = {label: _Training(config, of, length, ranks) for label, of in (("megatron", spec), ("flux", megatron.fused(spec)))}
    trainings["flux"].model.load_state_dict(trainings["megatron"].model.state_dict())
    torch.manual_seed(0)
    text = torch.randint(VOCABULARY, (m // length, length + 1)).to(ranks.device)
    tokens, labels = text[:, :-1].contiguous(), text[:, 1:].contiguous()
    positions = torch.arange(length, device=ranks.device).expand_as(tokens)
    calls = {label: lambda one=one: one.step(tokens, labels, positions) for label, one in trainings.items()}
    times = Clock(ranks, options.samples).rounds(calls)
    losses = {label: torch.stack(one.losses).float().tolist() for label, one in trainings.items()}
    largest = ranks.largest([difference(losses["megatron"], losses["flux"])])[0]
    ranks.comm.check()
    return {
        "model": name,
        "phase": "megatron",
        "m": m,
        "tp": ranks.world,
        "transport": ranks.comm.transport,
        "layers": options.layers,
        # Of a step of the whole model, with embedding, output layer and update.
        **figures(times),
        "losses": losses,
        "difference": largest,
        "verified": largest <= TOLERANCE,
    }
