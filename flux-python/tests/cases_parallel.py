"""Cases of transformers' models split over meshes of 1, 2 and 4 ranks; see ``ranks``."""

from __future__ import annotations

from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import flux_tp
from cases_numpy import raises
from cases_torch import BF16, init_distributed, place

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
    "attention_dropout": 0.0,
}
GROUPED = SIZES | {"num_key_value_heads": 2}
MODELS = {
    "llama": (LlamaForCausalLM, LlamaConfig, GROUPED | {"tie_word_embeddings": False}),
    "mistral": (MistralForCausalLM, MistralConfig, GROUPED | {"num_key_value_heads": 8, "sliding_window": 8, "head_dim": 8}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, GROUPED | {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, GROUPED | {"head_dim": 16}),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig, SIZES | {"hidden_dropout": 0.0}),
}


def made(name):
    """A model with the same random weights on every rank."""
    kind, config, sizes = MODELS[name]
    torch.manual_seed(1)
    model = kind(config(**sizes, attn_implementation="eager")).to(place(), BF16)
    # As trained models have them: no two rows alike, and norms and biases that matter.
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * 0.05)
    return model


@cache
def meshes():
    """Meshes whose dimension ``tp`` has 1, 2 and 4 ranks."""
    init_distributed()
    world = dist.get_world_size()
    return {tp: init_device_mesh(place().type, (world // tp, tp), mesh_dim_names=("dp", "tp")) for tp in (1, 2, 4)}


def split(name, tp, mode="training", **options):
    return flux_tp.parallelize(made(name), meshes()[tp]["tp"], mode, verbose=False, max_m=64, **options)


def batch(step, tokens=16):
    """Tokens of two sequences, the same on every rank."""
    return torch.randint(96, (2, tokens), generator=torch.Generator().manual_seed(step)).to(place())


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def steps(model, count=5, foreach=False):
    """Losses and total norms of gradients of training steps, and the gradients of the first."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=foreach)
    losses, norms, first = [], [], None
    for step in range(count):
        ids = batch(step)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        first = first or {name: whole(parameter.grad).clone() for name, parameter in model.named_parameters()}
        norms.append(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)).item())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(whole(loss).item())
    return losses, norms, first


def near(found, expected, name):
    """What bfloat16 explains: a model of this depth rounds some tens of times on a path, each by up to 2^-9 of what it adds."""
    error = (found.float() - expected.float()).norm() / expected.float().norm()
    assert error < 0.03, f"{name}: {error:.4f}"


def learns_alike(name):
    expected, expected_norms, expected_first = reference(name)
    for tp in (1, 2, 4):
        losses, norms, first = steps(split(name, tp))
        assert first.keys() == expected_first.keys()
        for key, gradient in first.items():
            near(gradient, expected_first[key], f"{name}, {tp} ranks, {key}")
        assert all(abs(a - b) < 0.01 * b for a, b in zip(losses, expected, strict=True)), (losses, expected)
        assert all(abs(a - b) < 0.02 * b for a, b in zip(norms, expected_norms, strict=True)), (norms, expected_norms)


@cache
def reference(name):
    """The same in one process."""
    return steps(made(name))


def llama_learns_alike(comm):
    learns_alike("llama")


def mistral_learns_alike(comm):
    learns_alike("mistral")


def qwen2_learns_alike(comm):
    learns_alike("qwen2")


def qwen3_learns_alike(comm):
    learns_alike("qwen3")


def gpt_neox_learns_alike(comm):
    learns_alike("gpt_neox")
