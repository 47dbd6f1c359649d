"""Generates with a Llama of transformers, tensor-parallel by flux_tp; on GPUs each step is one CUDA graph.

    torchrun --nproc-per-node 2 flux-python/examples/generate.py --batch 16

Without CUDA it runs on the CPU, without graphs.
"""

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import StaticCache

import flux_tp
from train_llama import SHAPES, made


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="tiny")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--weights", help="a model's folder or name, in place of a shape with random weights")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a random prompt")
    parser.add_argument("--tokens", type=int, default=32, help="how many are generated")
    parser.add_argument("--fp8", action="store_true", help="linear layers with 8-bit operands, but for the last")
    return parser.parse_args()


@torch.inference_mode()
def generate(model: torch.nn.Module, prompt: torch.Tensor, count: int, capture: bool) -> tuple[torch.Tensor, float]:
    """``count`` tokens behind each prompt, and the milliseconds of a step; the likeliest at each place."""
    cache = StaticCache(model.config, max_cache_len=prompt.shape[1] + count)

    def step(ids: torch.Tensor) -> torch.Tensor:
        # Called `cache`, too, by newer versions of transformers.
        return model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)

    token = step(prompt)
    tokens, graph = [token], None
    # The first step builds what a graph then holds.
    token = step(token)
    tokens.append(token.clone())
    if capture:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            token.copy_(step(token))
    began = time.perf_counter()
    for _ in range(count - 2):
        if graph is None:
            token = step(token)
        else:
            graph.replay()
        tokens.append(token.clone())
    if token.is_cuda:
        torch.cuda.synchronize()
    return torch.cat(tokens, 1), 1e3 * (time.perf_counter() - began) / max(1, count - 2)


def main() -> None:
    options, device = arguments(), "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    model = flux_tp.parallelize(made(options, device), mesh, "inference", max_m=options.batch * options.prompt)
    # Frozen weights are constant, and a kernel may load them before the one ahead has ended.
    model.eval().requires_grad_(False)
    if options.fp8:
        flux_tp.quantize(model, keep=lambda name, _: name == "lm_head")
    prompt = torch.randint(model.config.vocab_size, (options.batch, options.prompt)).to(device)
    capture = device == "cuda" and flux_tp.default().transport == "nvlink"
    tokens, milliseconds = generate(model, prompt, options.tokens, capture)
    flux_tp.check()
    if dist.get_rank() == 0:
        print(f"{tokens.shape[1]} tokens for each of {tokens.shape[0]} prompts, {milliseconds:.2f} ms a step: {tokens[0, :8].tolist()} ...")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
