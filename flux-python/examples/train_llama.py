"""Trains a Llama of transformers on random tokens, tensor-parallel by flux_tp and with FSDP2 over the other ranks.

    torchrun --nproc-per-node 4 flux-python/examples/train_llama.py --tp 2 --checkpoint /tmp/llama

A second run goes on from the checkpoint, also with another ``--tp``. Without CUDA it runs on the CPU.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import flux_tp

SHAPES = {  # hidden, inner, heads, KV heads, vocabulary
    "tiny": (128, 256, 8, 4, 512),
    "8b": (4096, 14336, 32, 8, 128256),
    "70b": (8192, 28672, 64, 8, 128256),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=2, help="tensor-parallel ranks; FSDP2 has the others")
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--weights", help="a model's folder or name, in place of a shape with random weights")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=64, help="of a sequence")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--checkpoint", help="a folder: loaded where it has one, and written at the end")
    return parser.parse_args()


def made(options: argparse.Namespace, device: str) -> torch.nn.Module:
    if options.weights:
        return AutoModelForCausalLM.from_pretrained(options.weights, dtype=torch.bfloat16).to(device)
    names = "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "vocab_size"
    config = LlamaConfig(**dict(zip(names, SHAPES[options.shape], strict=True)), num_hidden_layers=options.layers)
    with torch.device(device):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def main() -> None:
    options, device = arguments(), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]) // options.tp, options.tp), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = flux_tp.parallelize(made(options, device), mesh["tp"], max_m=options.batch * options.tokens, verbose=dist.get_rank() == 0)
    if options.compile:
        for layer in model.model.layers:
            layer.compile()
    if mesh["dp"].size() > 1:
        for layer in (*model.model.layers, model):
            fully_shard(layer, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if options.checkpoint and os.path.exists(os.path.join(options.checkpoint, ".metadata")):
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=options.checkpoint)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        first = state["step"]
    for step in range(first, first + options.steps):
        began = time.perf_counter()
        # The same on the ranks that share a model, and others on the others.
        generator = torch.Generator().manual_seed(step * mesh["dp"].size() + mesh["dp"].get_local_rank())
        ids = torch.randint(model.config.vocab_size, (options.batch, options.tokens), generator=generator).to(device)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        line = f"step {step}: loss {loss.item():.4f}, norm of gradients {norm.full_tensor().item():.3f}"
        flux_tp.check()
        if dist.get_rank() == 0:
            print(f"{line}, {1e3 * (time.perf_counter() - began):.1f} ms", flush=True)
    if options.checkpoint:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments, "step": first + options.steps}, checkpoint_id=options.checkpoint)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
