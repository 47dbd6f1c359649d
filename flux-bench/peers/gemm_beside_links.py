"""What links that are awake, and traffic on them, cost a GEMM at the power limit, with no fused kernel and no wait between the two.

Two GPUs multiply back to back, each its own operands by torch.mm, in blocks by turns: with NVLink asleep; with a word copied to the other GPU beside every
GEMM, so that the links stay awake; and with the bytes of a shard of rows copied. Copies go by copy engine on streams of their own, and nobody awaits them.
Prints milliseconds of a GEMM for each GPU, and power and clocks of the second half of the block (nvidia-smi).

    python3 flux-bench/peers/gemm_beside_links.py --m 8192 --n 24576 --k 12288 --seconds 3 --turns 3
"""

import argparse
import statistics
import subprocess
import threading
import time

import torch

KINDS = ("asleep", "word", "shard")
GPUS = (0, 1)


class Meter(threading.Thread):
    """Samples power (W) and clocks (MHz) of both GPUs until it is stopped."""

    def __init__(self):
        super().__init__(daemon=True)
        self.samples, self.stopped = [], threading.Event()

    def run(self):
        query = ["nvidia-smi", "--query-gpu=power.draw,clocks.sm", "--format=csv,noheader,nounits"]
        while not self.stopped.wait(0.2):
            lines = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout.strip().splitlines()
            self.samples.append([tuple(map(float, line.split(","))) for line in lines])

    def settled(self):
        self.stopped.set()
        self.join(20)
        late = self.samples[len(self.samples) // 2 :]
        return [[statistics.mean(sample[gpu][field] for sample in late) if late else float("nan") for field in (0, 1)] for gpu in GPUS]


class Side:
    """One GPU's operands, and what it copies to the other."""

    def __init__(self, gpu, m, n, k):
        def random(rows, columns):
            return torch.randn(rows, columns, device=f"cuda:{gpu}").bfloat16()

        self.a, self.b = random(m, k), random(n, k).t()
        self.out = torch.empty(m, n, device=f"cuda:{gpu}", dtype=torch.bfloat16)
        self.gemms, self.copies = torch.cuda.Stream(gpu), torch.cuda.Stream(gpu)
        other = f"cuda:{1 - gpu}"
        self.payload = {"word": (self.a[:1, :2], torch.empty(1, 2, device=other, dtype=torch.bfloat16))}
        self.payload["shard"] = (self.a[: m // 2], torch.empty(m // 2, k, device=other, dtype=torch.bfloat16))

    def enqueue(self, kind):
        if kind in self.payload:
            source, target = self.payload[kind]
            with torch.cuda.stream(self.copies):
                target.copy_(source, non_blocking=True)
        with torch.cuda.stream(self.gemms):
            torch.mm(self.a, self.b, out=self.out)

    def mark(self):
        event = torch.cuda.Event(enable_timing=True)
        event.record(self.gemms)
        return event

    def settle(self):
        self.gemms.synchronize()
        self.copies.synchronize()


def block(sides, kind, seconds):
    meter = Meter()
    meter.start()
    begun, calls, until = [side.mark() for side in sides], 0, time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(4):
            for side in sides:
                side.enqueue(kind)
        calls += 4
        for side in sides:
            side.settle()
    ended = [side.mark() for side in sides]
    for side in sides:
        side.settle()
    return [begin.elapsed_time(end) / calls for begin, end in zip(begun, ended)], meter.settled()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for extent, default in (("m", 8192), ("n", 24576), ("k", 12288)):
        parser.add_argument(f"--{extent}", type=int, default=default)
    parser.add_argument("--seconds", type=float, default=3.0, help="of a block")
    parser.add_argument("--turns", type=int, default=3)
    args = parser.parse_args()
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(0, 1):
        raise SystemExit("two GPUs that reach each other are needed")
    sides = [Side(gpu, args.m, args.n, args.k) for gpu in GPUS]
    block(sides, "asleep", args.seconds)  # until clocks have settled
    for _ in range(args.turns):
        for kind in KINDS:
            times, settled = block(sides, kind, args.seconds)
            power, clocks = zip(*settled)
            show = lambda values, form: " ".join(format(value, form) for value in values)
            print(f"{kind:6}  ms {show(times, '.4f')}  W {show(power, '.0f')}  MHz {show(clocks, '.0f')}", flush=True)


if __name__ == "__main__":
    main()
