"""Cases with layers of Megatron-Core; see ``ranks``."""

from __future__ import annotations

import torch
import torch.distributed as dist

import flux_tp
from cases_numpy import raises
from cases_torch import init_distributed, place
from oracle import UNIT

# First: it keeps Megatron-Core's warnings at import to itself.
from flux_tp.bench import megatron as bench
from flux_tp.integrations import megatron
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

VOCABULARY, SEQUENCE, BATCH = 128, 16, 2


def start(comm):
    """Has Megatron-Core know the ranks."""
    init_distributed()
    if not parallel_state.is_initialized():
        bench.start(comm.world_size, place())


def configured(comm, sequence_parallel, **options):
    return TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        ffn_hidden_size=128,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=comm.world_size,
        sequence_parallel=sequence_parallel,
        use_cpu_initialization=True,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        **({"gradient_accumulation_fusion": False} | options),
    )


def gpt(config, spec):
    model = GPTModel(config, megatron.block(spec, config), vocab_size=VOCABULARY, max_sequence_length=SEQUENCE)
    return model.to(place(), torch.bfloat16)


def needs_a_communicator(comm):
    start(comm)
    model = gpt(configured(comm, True), megatron.fused(get_gpt_layer_local_spec()))
    raises(flux_tp.FluxError, lambda: losses(model, 1), "connect first")
    config = configured(comm, True, gradient_accumulation_fusion=True)
    raises(flux_tp.OperandError, lambda: gpt(config, megatron.fused(get_gpt_layer_local_spec())), "set it to False")


def losses(model, steps):
    """Losses of steps of plain gradient descent on one batch."""
    torch.manual_seed(5)
    ids = torch.randint(VOCABULARY, (BATCH, SEQUENCE)).to(place())
    positions = torch.arange(SEQUENCE, device=place()).expand(BATCH, SEQUENCE)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool, device=place()).triu(1)
    found = []
    for _ in range(steps):
        model.zero_grad()
        loss = model(ids, positions, mask, labels=ids).mean()
        loss.backward()
        found.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                if getattr(parameter, "sequence_parallel", False):
                    dist.all_reduce(parameter.grad)
                parameter -= 0.5 * parameter.grad
    return found


def a_gpt_learns_alike(comm):
    """Losses and gradients of Megatron-Core's own linear layers and of ours."""
    start(comm)
    transport = "host" if comm.device is None else "auto"
    for sequence_parallel, keep_gathered in ((True, False), (True, True), (False, False)):
        with megatron.connect(keep_gathered=keep_gathered, transport=transport, max_m=SEQUENCE * BATCH):
            config, spec = configured(comm, sequence_parallel), get_gpt_layer_local_spec()
            theirs, ours = gpt(config, spec), gpt(config, megatron.fused(spec))
            assert list(theirs.state_dict()) == list(ours.state_dict())
            ours.load_state_dict(theirs.state_dict())
            expected, found = losses(theirs, 4), losses(ours, 4)
            assert expected[-1] < 0.8 * expected[0], expected
            unit = UNIT["bfloat16"]
            for loss, other in zip(expected, found, strict=True):
                assert abs(loss - other) <= unit * loss, (expected, found)
            # Some dozens of roundings lie behind a gradient, and add as their squares do.
            for (name, one), (_, other) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
                error = (one.grad - other.grad).float().norm() / one.grad.float().norm()
                assert error <= 8 * unit, (name, error)
