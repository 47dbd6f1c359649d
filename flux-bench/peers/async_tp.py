"""Times what a PyTorch user would pick instead of flux: torch.mm alone, NCCL and torch.mm in turn, and symmetric memory's fused ops or, for
gemm_ar, its one-shot and two-shot all-reduce after torch.mm. Calls of gemm_ar with up to 512 rows are CUDA graphs, as serving engines make them.
With "norm" a compiled addition of a residual and RMSNorm follows all of them but the torch.mm alone.

`flux-bench lab peers` starts this with a job as JSON in argv[1]:

    {"out": FILE, "store": FILE, "tp": W, "dtype": NAME, "output": "bf16" or "fp16", "scales": "none", "tensor" or "row", "fast_accumulation": false or true,
     "samples": N, "norm": false or true, "cases": [{"op", "model", "n", "k", "ms": [m, ...]}, ...]}

and reads FILE: a line of JSON that names the versions, then one for each row. One process a GPU, all in the caller's process group.

With scales the operands are of 8 bits, and torch._scaled_mm takes the place of torch.mm. The serial path gathers codes, then scales of rows by a second operation.

Invariant: in each round every contender runs once, in the same order on every rank, and every call takes another operand set than the one
before. Before each sample a one-word all-reduce has lined the ranks up on their devices, and a spinning kernel has given the host the time to
enqueue what is timed. A contender's round in which some host took longer is counted in "late", and left out unless most of its rounds are
late. A result that is not the serial path's makes its row unverified; a fused op that raises leaves the reason in place of its times.
"""

import ctypes
import itertools
import json
import signal
import sys
import time
import traceback
import warnings
from typing import Any, NamedTuple

# What exit statuses say, beside 0 and whatever an exception gives.
NO_TORCH = 3
TOO_FEW_GPUS = 4

WARM_UP = 5
# Operand sets in rotation: what one call leaves in the L2 cache is not what the next one reads.
SETS = 3
SPIN_US = 100
# Added to the mean of a row's squares.
EPS = 1e-5
# Most rows of a gemm_ar that are replayed from a graph.
GRAPH_ROWS = 512
# PyTorch's name of each output type, and half a unit in its last place, relative.
DTYPES = {"bf16": ("bfloat16", 2.0**-8), "fp16": ("float16", 2.0**-11)}


class Failed(Exception):
    """The fused op failed on some rank."""


class Operand(NamedTuple):
    """A matrix; of 8-bit elements with its scale, of no dimension, or with scales ``[rows, 1]``."""

    values: Any
    scale: Any = None

    def first(self, rows):
        """The first rows."""
        return Operand(self.values[:rows], self.scale if self.scale is None or self.scale.dim() == 0 else self.scale[:rows])

    def t(self):
        """Transposed, as a product's second operand."""
        return Operand(self.values.t(), self.scale if self.scale is None else self.scale.t())


class Bench:
    """One rank."""

    def __init__(self, torch, dist, rank, job):
        self.torch, self.dist, self.rank, self.job = torch, dist, rank, job
        self.world = job["tp"]
        name, self.roundoff = DTYPES[job["output"]]
        self.dtype = getattr(torch, name)
        self.word = torch.zeros(1, dtype=torch.int32, device="cuda")
        self.start = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.cycles_per_us = self.highest_clock()
        self.group = dist.group.WORLD.group_name
        self.scaled = job["scales"] != "none"
        self.no_fused = self.prepare_fused()
        self.add_norm = self.compile_add_norm() if job["norm"] else None

    def highest_clock(self):
        """Cycles that torch.cuda._sleep counts in a microsecond at the device's highest clock, so that no spin is too short."""
        torch = self.torch
        # In kHz, in versions of torch that have it.
        rate = getattr(torch.cuda.get_device_properties(self.rank), "clock_rate", None)
        if rate:
            return rate / 1e3
        cycles, shortest = 10_000_000, float("inf")
        for _ in range(5):
            self.start.record()
            torch.cuda._sleep(cycles)
            self.end.record()
            self.end.synchronize()
            shortest = min(shortest, self.start.elapsed_time(self.end))
        return cycles / (shortest * 1e3)

    def prepare_fused(self):
        """Why the fused ops must not or cannot run at all, or None."""
        torch = self.torch
        try:
            import torch.distributed._symmetric_memory as symm_mem
            from torch._C._autograd import DeviceType
            from torch._C._distributed_c10d import _SymmetricMemory

            if _SymmetricMemory.has_multicast_support(DeviceType.CUDA, self.rank):
                return "NVLink multicast is not switched off in this PyTorch"
            for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
                getattr(torch.ops.symm_mem, name.replace("matmul", "scaled_matmul") if self.scaled else name)
            torch.ops.symm_mem.one_shot_all_reduce
            torch.ops.symm_mem.two_shot_all_reduce_
            # Older versions need it, newer ones warn of it.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                symm_mem.enable_symm_mem_for_group(self.group)
        except (ImportError, AttributeError, RuntimeError) as error:
            return reason(error)
        return None

    def random(self, *shape):
        """Uniform in +-0.1: other data on every rank and in every set."""
        return self.torch.empty(shape, dtype=self.dtype, device="cuda").uniform_(-0.1, 0.1)

    def operand(self, rows, cols):
        """A random operand: codes of 8 bits with fp32 scales where the job asks for them."""
        torch = self.torch
        if not self.scaled:
            return Operand(self.random(rows, cols))
        largest = 448.0
        codes = torch.empty((rows, cols), dtype=self.dtype, device="cuda").uniform_(-largest, largest).to(torch.float8_e4m3fn)
        scale = torch.full((), 0.1 / largest, device="cuda")
        return Operand(codes, scale * torch.empty((rows, 1), device="cuda").uniform_(0.5, 1.0) if self.job["scales"] == "row" else scale)

    def mm(self, x, w, out):
        if not self.scaled:
            return self.torch.mm(x.values, w.values, out=out)
        fast = self.job["fast_accumulation"]
        return self.torch._scaled_mm(x.values, w.values, x.scale, w.scale, out_dtype=self.dtype, use_fast_accum=fast, out=out)

    def gather(self, whole, x):
        """All ranks' rows, with their scales where each has one."""
        gather = self.dist.all_gather_into_tensor
        if not self.scaled:
            gather(whole.values, x.values)
            return
        gather(whole.values.view(self.torch.uint8), x.values.view(self.torch.uint8))
        if x.scale.dim() > 0:
            gather(whole.scale, x.scale)

    def compile_add_norm(self):
        """What makes of a result the residual stream and its normalised rows, as one kernel."""
        torch = self.torch

        def add_norm(y, residual, gain):
            h = (y.float() + residual.float()).to(y.dtype)
            wide = h.float()
            scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
            return h, (wide * scale * gain.float()).to(y.dtype)

        return torch.compile(add_norm, dynamic=False)

    def agree(self, mine):
        """Whether it holds on every rank."""
        flag = self.torch.tensor([int(bool(mine))], dtype=self.torch.int32, device="cuda")
        self.dist.all_reduce(flag, op=self.dist.ReduceOp.MIN)
        return bool(flag.item())

    def slowest(self, values):
        """Every value's largest over the ranks."""
        times = self.torch.tensor(values, dtype=self.torch.float64, device="cuda")
        self.dist.all_reduce(times, op=self.dist.ReduceOp.MAX)
        return times.tolist()

    def layer(self, case):
        """All rows of one op and model, on operands that are made once, for the largest m."""
        torch, world = self.torch, self.world
        n, k, most = case["n"], case["k"], max(case["ms"])
        gathers, all_reduces = case["op"] == "ag_gemm", case["op"] == "gemm_ar"
        torch.manual_seed(1 + self.rank)
        if gathers:
            operands = [(self.operand(most // world, k), self.operand(n // world, k)) for _ in range(SETS)]
            between = self.operand(most, k)
            y = torch.empty(most, n // world, dtype=self.dtype, device="cuda")
        else:
            operands = [(self.operand(most, k // world), self.operand(n, k // world)) for _ in range(SETS)]
            between = Operand(torch.empty(most, n, dtype=self.dtype, device="cuda"))
            y = torch.empty(most if all_reduces else most // world, n, dtype=self.dtype, device="cuda")
        # What every rank's all-reduce reads.
        shared = self.symmetric(most * n) if all_reduces and self.no_fused is None else None
        for m in case["ms"]:
            rows = (m // world, m, m) if gathers else (m, m, m if all_reduces else m // world)
            part = None if shared is None else shared[: m * n].view(m, n)
            yield self.row(case, m, [(x.first(rows[0]), w.t()) for x, w in operands], between.first(rows[1]), y[: rows[2]], part)

    def symmetric(self, elements):
        """Memory that all ranks reach."""
        import torch.distributed._symmetric_memory as symm_mem

        memory = symm_mem.empty(elements, dtype=self.dtype, device="cuda")
        symm_mem.rendezvous(memory, self.group)
        return memory

    def captured(self, call, sets):
        """The call on each operand set, from graphs."""
        torch, graphs = self.torch, {}
        for x, w in sets:
            call(x, w)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            # The watchdog of NCCL calls the driver meanwhile.
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                call(x, w)
            graphs[x.values.data_ptr()] = graph
        torch.cuda.synchronize()
        return lambda x, _w: graphs[x.values.data_ptr()].replay()

    def row(self, case, m, sets, between, y, shared):
        torch, dist = self.torch, self.dist
        ops = torch.ops.symm_mem
        gathers, all_reduces = case["op"] == "ag_gemm", case["op"] == "gemm_ar"

        def gemm(x, w):
            self.mm(between if gathers else x, w, y if gathers else between.values)

        def serial(x, w):
            if gathers:
                self.gather(between, x)
                self.mm(between, w, y)
            elif all_reduces:
                self.mm(x, w, y)
                dist.all_reduce(y)
            else:
                self.mm(x, w, between.values)
                dist.reduce_scatter_tensor(y, between.values)

        def fused(x, w):
            if self.scaled:
                return self.fused_scaled(x, w, gathers)
            if gathers:
                return ops.fused_all_gather_matmul(x.values, [w.values], gather_dim=0, group_name=self.group, return_A=False)[1][0]
            return ops.fused_matmul_reduce_scatter(x.values, w.values, "sum", scatter_dim=0, group_name=self.group)

        def one_shot(x, w):
            self.mm(x, w, shared)
            return ops.one_shot_all_reduce(shared, "sum", self.group)

        def two_shot(x, w):
            self.mm(x, w, shared)
            return ops.two_shot_all_reduce_(shared, "sum", self.group)

        y.fill_(float("nan"))
        serial(*sets[0])
        verified, reasons = bool(torch.isfinite(y).all().item()), []
        contenders = [("gemm_ms", gemm), ("serial_ms", serial)]
        for name, call in [("one_shot_ms", one_shot), ("two_shot_ms", two_shot)] if all_reduces else [("async_tp_ms", fused)]:
            why = self.no_fused or self.misaligned(case, m)
            if why is None:
                try:
                    verified = self.same(call, sets[0], y, gathers) and verified
                except Failed as error:
                    why = str(error)
            if why is None:
                contenders.append((name, call))
            elif why not in reasons:
                reasons.append(why)
        verified = self.agree(verified)
        if self.add_norm is not None:
            residual, gain = self.random(*y.shape), self.random(y.shape[1])
            contenders = contenders[:1] + [(name, self.normed(call, y, residual, gain)) for name, call in contenders[1:]]
        if all_reduces and m <= GRAPH_ROWS:
            contenders = [(name, self.captured(call, sets)) for name, call in contenders]
        rounds, late = self.timed([call for _, call in contenders], sets)
        row = {"op": case["op"], "model": case["model"], "m": m, "n": case["n"], "k": case["k"], "tp": self.world, "dtype": self.job["dtype"]}
        row["async_tp_ms"] = None
        counts = {}
        for (name, _), times, mine in zip(contenders, rounds, late):
            of_all = self.slowest(mine)
            row[name] = percentiles(in_time(self.slowest(times), of_all))
            counts[name.removesuffix("_ms")] = int(sum(of_all))
        if any(counts.values()):
            row["late"] = counts
        if reasons:
            row["why"] = "; ".join(reasons)
        row["verified"], row["samples"] = verified, self.job["samples"]
        return row

    def misaligned(self, case, m):
        """Why PyTorch's fused op takes no such rows, or None."""
        # Shards' scales lie one behind the other. cuBLASLt reads them from multiples of 16 bytes
        # (pytorch issue 159957), and a rank that raises would leave the others waiting.
        if case["op"] == "ag_gemm" and self.job["scales"] == "row" and m // self.world % 4:
            return "scales of shards whose rows are no multiple of 4 are not aligned"
        return None

    def fused_scaled(self, x, w, gathers):
        """PyTorch's fused op of 8-bit operands. Its gather has no way to leave out a copy of the own rows."""
        ops, fast = self.torch.ops.symm_mem, self.job["fast_accumulation"]
        if gathers:
            options = [None], [None], [self.dtype], [fast]
            return ops.fused_all_gather_scaled_matmul(x.values, [w.values], x.scale, [w.scale], 0, self.group, *options)[1][0]
        given, shape = (x.values, w.values, x.scale, w.scale), [x.values.shape[0], w.values.shape[1]]
        options = {"out_dtype": self.dtype, "use_fast_accum": fast}
        return ops.fused_scaled_matmul_reduce_scatter(*given, "sum", 0, 0, self.group, shape, **options)

    def normed(self, call, y, residual, gain):
        """The call with residual and norm behind it; a call without a result leaves it in `y`."""

        def both(x, w):
            result = call(x, w)
            return self.add_norm(y if result is None else result, residual, gain)

        return both

    def same(self, fused, operands, serial, gathers):
        """Whether the fused op's result is the serial path's, up to the roundings of either."""
        torch = self.torch
        why, result = None, None
        try:
            result = fused(*operands)
            torch.cuda.synchronize()
        except Exception as error:  # Whatever a library's op raises is the row's reason.
            why = reason(error)
        if not self.agree(why is None):
            raise Failed(why or "it failed on another rank")
        if tuple(result.shape) != tuple(serial.shape):
            return False
        # A product is rounded once; a sum of W partial products in that type has W of them rounded,
        # and W - 1 sums. Both paths, so twice.
        roundings = 2 if gathers else 2 * (2 * self.world - 1)
        largest = serial.abs().max().float()
        difference = (result.float() - serial.float()).abs().max()
        # Not a number compares as false.
        return bool((difference <= roundings * self.roundoff * largest).item()) and bool((largest > 0).item())

    def timed(self, calls, sets):
        """Milliseconds of each call in each round, and whether the device may have waited for the host."""
        spins, rounds, enqueued = [SPIN_US] * len(calls), [[] for _ in calls], [[] for _ in calls]
        for index, turns in enumerate(schedule(len(calls), WARM_UP + self.job["samples"])):
            if index == WARM_UP:
                # As calls come, not in a loop of one, in which a host takes less. The first
                # rounds load what is loaded lazily.
                spins = [max(SPIN_US, 2 * longest) for longest in self.slowest([max(of_call[-3:]) for of_call in enqueued])]
                rounds, enqueued = [[] for _ in calls], [[] for _ in calls]
            for which, operands in turns:
                elapsed, took = self.sample(calls[which], sets[operands], spins[which])
                rounds[which].append(elapsed)
                enqueued[which].append(took)
        return rounds, [[float(took > spin) for took in of_call] for of_call, spin in zip(enqueued, spins)]

    def sample(self, call, operands, spin_us):
        """Milliseconds of a call, and microseconds from the start of the spin until the host had enqueued it."""
        self.dist.all_reduce(self.word)
        began = time.perf_counter()
        self.torch.cuda._sleep(int(spin_us * self.cycles_per_us))
        self.start.record()
        call(*operands)
        self.end.record()
        enqueued = time.perf_counter() - began
        self.end.synchronize()
        return self.start.elapsed_time(self.end), enqueued * 1e6


def in_time(times, late):
    """The times of rounds in which no host was late; of all rounds where most are late, as `Late::kept` of flux-bench."""
    if sum(map(bool, late)) > len(times) // 2:
        return list(times)
    return [elapsed for elapsed, was_late in zip(times, late) if not was_late]


def schedule(contenders, rounds):
    """Who runs in each round and on which operand set: in all orders in rotation, so that none always follows the same other, the sets one after the other."""
    orders, calls = list(itertools.permutations(range(contenders))), itertools.count()
    return [[(contender, next(calls) % SETS) for contender in orders[index % len(orders)]] for index in range(rounds)]


def percentiles(times):
    """Tenth, fiftieth and ninetieth percentile; between two samples interpolated linearly."""
    ordered = sorted(times)

    def at(share):
        place = share * (len(ordered) - 1)
        below = int(place)
        above = min(below + 1, len(ordered) - 1)
        return ordered[below] + (ordered[above] - ordered[below]) * (place - below)

    return {"p10": at(0.1), "median": at(0.5), "p90": at(0.9)}


def reason(error):
    """An exception in one line."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]


def end_with_parent():
    """Asks the kernel to kill this process when its parent ends: one that waits on a device does not look at other signals."""
    set_parent_death_signal = 1
    ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)


def work(rank, job):
    """A rank's process."""
    end_with_parent()
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    # A file in a folder of the caller's: no port to be found, no name to be resolved.
    dist.init_process_group("nccl", init_method=f"file://{job['store']}", rank=rank, world_size=job["tp"])
    bench = Bench(torch, dist, rank, job)
    with torch.inference_mode(), open(job["out"] if rank == 0 else "/dev/null", "w", encoding="utf-8") as out:

        def write(line):
            out.write(json.dumps(line) + "\n")
            out.flush()

        nccl = ".".join(str(part) for part in torch.cuda.nccl.version())
        write({"torch": torch.__version__, "nccl": nccl})
        for case in job["cases"]:
            for row in bench.layer(case):
                write(row)
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def main():
    job = json.loads(sys.argv[1])
    try:
        import torch
        import torch.multiprocessing as multiprocessing
    except ImportError as error:
        print(f"PyTorch cannot be imported: {error}", file=sys.stderr)
        return NO_TORCH
    gpus = torch.cuda.device_count()
    if gpus < job["tp"]:
        print(f"PyTorch sees {gpus} GPUs, fewer than the {job['tp']} ranks", file=sys.stderr)
        return TOO_FEW_GPUS
    try:
        multiprocessing.spawn(work, args=(job,), nprocs=job["tp"])
    except Exception:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
