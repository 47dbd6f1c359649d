"""A tensor-parallel MLP: rows split over the ranks, features split in between.

    torchrun --nproc-per-node 4 flux-python/examples/tp_mlp.py

Without CUDA it runs on the CPU. Any number of ranks works. Every rank compares its rows with the unsplit MLP.
"""

import os

import torch

import flux_tp

TOKENS, HIDDEN, INNER = 64, 256, 1024


def main() -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with flux_tp.init(max_m=TOKENS) as comm:
        device = "cpu" if comm.device is None else f"cuda:{comm.device}"
        # The same on every rank.
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int) -> torch.Tensor:
            values = torch.randn(shape, generator=generator) * shape[-1] ** -0.5
            return values.to(torch.bfloat16).to(device)

        x, up, down = draw(TOKENS, HIDDEN), draw(INNER, HIDDEN), draw(HIDDEN, INNER)
        # The ranks need not divide rows or features: m, n and k say how many there are in all.
        features = comm.features(INNER)
        own_x, own_up = x.tensor_split(comm.world_size)[comm.rank], up[features]
        own_down = down[:, features].contiguous()
        with torch.no_grad():
            hidden = flux_tp.all_gather_matmul(own_x, own_up, activation="gelu", m=TOKENS, n=INNER, group=comm)
            y = flux_tp.matmul_reduce_scatter(hidden, own_down, k=INNER, group=comm)
        if comm.device is not None:
            torch.cuda.synchronize()
        comm.check()

        inner = torch.nn.functional.gelu(x.double() @ up.double().T, approximate="tanh")
        expected = (inner @ down.double().T).tensor_split(comm.world_size)[comm.rank]
        error = (y.double() - expected).abs().max().item()
        print(f"{comm}: {list(hidden.shape)} -> {list(y.shape)}, largest error {error:.1e}")
        # bf16 rounds the hidden values and each rank's partial sums to 8 bits.
        assert error < 2**-6, error


if __name__ == "__main__":
    main()
