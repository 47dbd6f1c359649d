"""The measurements of layers and models, on those small enough for the CPU."""

import json
import runpy
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest

from ranks import run_forked

pytest.importorskip("torch", reason="torch is not installed")

PATIENCE = 300
MODES = ["none", "ar", "one_shot", "two_shot", "sp", "async_tp", "flux", "flux_ar", "flux_kept"]
PEERS = Path(__file__).parents[2] / "flux-bench/peers/async_tp.py"


def measure(*words):
    """As two ranks of ``bench``."""
    run_forked(2, measure_as_rank, *words)


def measure_as_rank(*words):
    from flux_tp.bench.__main__ import main

    sys.argv[1:] = words
    return main()


def bench(*words):
    command = [sys.executable, "-m", "flux_tp.bench", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "tiny-layers.json"
    few = ["--layers", "2", "--samples", "2", "--time-limit", "220", "--modes", ",".join(MODES)]
    measure("layers", "--models", "tiny", "--ms", "16,5", "--transport", "host", *few, "--json", str(path))
    return path


def test_every_mode_is_measured_or_says_why_not(record):
    content = json.loads(record.read_text())
    assert (content["transport"], content["layers"], content["device"]) == ("host", 2, "cpu")
    rows = content["rows"]
    assert [(row["phase"], row["m"]) for row in rows] == [(phase, m) for phase in ("prefill", "decode", "train") for m in (16, 5)]
    for row in rows:
        expected = {"none", "ar", "flux", "flux_ar"} | ({"sp"} if row["m"] == 16 else set())
        expected |= {"flux_kept"} if row["phase"] == "train" else set()
        assert set(row["ms"]) == expected and all(ms > 0 for ms in row["ms"].values()), row
        assert set(row["ms"]) | set(row["why"]) == set(MODES), row
    assert rows[1]["why"]["sp"] == "m = 5 is not a multiple of 2"


def test_results_are_compared_with_fp32(record):
    for row in json.loads(record.read_text())["rows"]:
        assert row["verified"], row
        for mode in ("flux", "flux_ar", *(["flux_kept"] if row["phase"] == "train" else [])):
            assert 0 < row["error"][mode] <= row["largest_error"], row
        # Without collectives results are wrong, and the comparison sees it.
        assert row["error"]["none"] > 10 * row["largest_error"], row


def test_a_record_is_shown_as_tables(record):
    shown = bench("show", str(record))
    assert "tiny, prefill, TP 2, ms a layer" in shown and "| share hidden |" in shown
    for row in json.loads(record.read_text())["rows"]:
        assert f"| {row['m']} | {row['ms']['none']:.3f} | {row['ms']['ar']:.3f} |" in shown
    assert "| flux, gathered x kept |" in shown and "flux, gathered x kept: it differs from flux in training alone" in shown
    summary = bench("show", "--summary", str(record))
    for shown in (shown, summary):
        assert shown.endswith("Elementwise work that flux fuses counts as hidden, too.\n"), shown


@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
def test_layers_in_8_bits_are_compared_with_those_in_bf16(scales, tmp_path):
    path, modes = tmp_path / "fp8-layers.json", ["none", "ar", "sp", "flux", "flux_bf16"]
    few = ["--ms", "16", "--layers", "2", "--samples", "1", "--modes", ",".join(modes), "--transport", "host", "--json", str(path)]
    measure("layers", "--dtype", "fp8", "--scales", scales, *few)
    rows = json.loads(path.read_text())["rows"]
    assert [row["phase"] for row in rows] == ["prefill", "decode"]
    for row in rows:
        assert row["verified"] and set(row["ms"]) == set(modes) and row["dtype"] == f"e4m3.{scales}:bf16", row
        error = row["error"]
        assert error["none"] > 3 * row["largest_error"], row
        # 8 bits show, and bf16 beside them is bf16.
        assert min(error[mode] for mode in ("ar", "sp", "flux")) > 4 * error["flux_bf16"] > 0, row
    assert f"tiny, prefill, e4m3.{scales}:bf16, TP 2, ms a layer" in bench("show", str(path))


def test_whole_models_have_the_losses_and_logits_of_pytorchs_styles(tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    path = tmp_path / "models.json"
    few = ["--ms", "16", "--layers", "1", "--samples", "1", "--modes", "torch,flux,async_tp", "--transport", "host"]
    measure("models", *few, "--json", str(path))
    rows = json.loads(path.read_text())["rows"]
    assert [(row["phase"], row.get("m"), row.get("batch")) for row in rows] == [("steps", 16, None), ("prompt", 16, None), ("generate", None, 16)]
    for row in rows:
        assert row["verified"] and set(row["ms"]) == {"torch", "flux"} and set(row["why"]) == {"async_tp"}, row
        # Computed in other ways, so that not all bits are alike.
        assert row["differences"]["torch"] == 0 < row["differences"]["flux"], row
    losses = rows[0]["losses"]
    assert len(losses["torch"]) == len(losses["flux"]) > 2 and losses["flux"][-1] < losses["flux"][0], losses
    shown = bench("show", str(path))
    assert f"| tiny | steps | 2 | m=16 | {rows[0]['ms']['torch']:.2f} |" in shown and "async-TP, steps: it needs GPUs" in shown, shown


def test_a_gpt_of_megatron_is_trained_with_both(tmp_path):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    path = tmp_path / "tiny-megatron.json"
    few = ["--models", "tiny", "--ms", "16", "--layers", "2", "--samples", "5", "--transport", "host", "--time-limit", "220"]
    measure("megatron", *few, "--json", str(path))
    (row,) = json.loads(path.read_text())["rows"]
    # Each model has learned, and they are not the same computation.
    for losses in row["losses"].values():
        assert len(losses) == 8 and losses[-1] < losses[0], losses
    assert row["verified"] and row["losses"]["flux"] != row["losses"]["megatron"]
    assert f"| tiny | 2 | 2 | 16 | {row['ms']['megatron']:.1f} | {row['ms']['flux']:.1f} |" in bench("show", str(path))


def test_a_loss_that_is_not_finite_is_a_difference():
    from flux_tp.bench.stack import difference

    nan, inf = float("nan"), float("inf")
    assert difference([2.0, 4.0], [2.0, 5.0]) == 0.25 and difference([-4.0], [-5.0]) == 0.25
    assert difference([8.0, 1.0], [8.0, 2.0], 0.25) == 0.5 and difference([8.0, 4.0], [8.0, 5.0], 0.25) == 0.25
    for bad in (nan, inf, -inf):
        for losses, others in (([1.0, 2.0], [1.0, bad]), ([1.0, bad], [1.0, 2.0]), ([bad, 1.0], [bad, 1.0])):
            assert difference(losses, others) == inf, (losses, others)


STOPPED = """
import os
import signal

from flux_tp.bench.__main__ import _trace_stops

def waiting():
    os.kill(os.getpid(), signal.SIGTERM)

_trace_stops(60.0)
waiting()
"""


def test_a_rank_that_is_ended_tells_where_it_is():
    ended = subprocess.run([sys.executable, "-c", STOPPED], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == -signal.SIGTERM and "in waiting" in ended.stderr, ended


def decode_wrongly(wrong, path):
    """One rank. A mode's calls are the prompt, two first steps, one that is kept, four that are timed, and one that is kept."""
    from flux_tp.bench import llama
    from flux_tp.bench.options import Options

    forward, calls = llama._Decoding._forward, {}

    def forward_of(self, *args):
        logits = forward(self, *args)
        number = calls[self] = calls.get(self, -1) + 1
        of_flux = list(calls).index(self) == 1
        return logits * 2 if of_flux and number == {"first": 3, "last": 8}[wrong] else logits

    llama._Decoding._forward = forward_of
    llama.run(Options(["tiny"], ["generate"], [2], ["torch", "flux"], 1, "host", 1, path, 200.0))
    assert set(calls.values()) == {8}, calls


@pytest.mark.parametrize("wrong", ["first", "last"])
def test_wrong_logits_of_the_timed_call_are_found_before_and_after_the_timing(wrong, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    path = tmp_path / "models.json"
    run_forked(1, decode_wrongly, wrong, path)
    (row,) = json.loads(path.read_text())["rows"]
    assert not row["verified"], row


def test_nothing_is_verified_without_a_bound_and_a_mode():
    from flux_tp.bench.layers import verified

    nan, inf = float("nan"), float("inf")
    assert verified({"none": 9.0, "flux": 0.5}, 1.0) and not verified({"flux": 1.5}, 1.0)
    assert not verified({}, 1.0) and not verified({"none": 0.5}, 1.0)
    assert not verified({"flux": 0.5}, inf) and not verified({"flux": 0.5}, nan)
    assert not verified({"flux": inf}, 1.0) and not verified({"flux": nan}, 1.0)


@pytest.mark.parametrize("count", range(2, 9))
def test_each_mode_follows_each_other_equally_often(count):
    from flux_tp.bench.clock import in_round

    names = [f"mode {number}" for number in range(count)]
    rounds = [in_round(names, index) for index in range(count * (1 + count % 2))]
    assert all(sorted(order) == names for order in rounds)
    follow = [pair for order in rounds for pair in pairwise(order)]
    counts = {follow.count((one, other)) for one in names for other in names if one != other}
    assert counts == {1 + count % 2}, counts


@pytest.mark.parametrize("of", ["layers", "peers"])
def test_late_rounds_count_only_where_they_are_most(of):
    if of == "layers":
        from flux_tp.bench.clock import in_time
    elif PEERS.exists():
        in_time = runpy.run_path(str(PEERS))["in_time"]
    else:
        pytest.skip("the peers' script is not here")
    times = [float(number) for number in range(15)]
    for late in range(16):
        kept = in_time(times, [float(number < late) for number in range(15)])
        assert kept == (times[late:] if late <= 7 else times), late


class Host:
    """A rank's host and device of the peers' script: calls are times in microseconds that the host takes to enqueue them."""

    def __init__(self, samples):
        script = runpy.run_path(str(PEERS))
        self.now = 0.0
        clock = SimpleNamespace(perf_counter=lambda: self.now * 1e-6)
        script["Bench"].timed.__globals__["time"] = clock
        event = SimpleNamespace(record=lambda: self.takes(2), synchronize=lambda: None, elapsed_time=lambda _: 0.5)
        cuda = SimpleNamespace(_sleep=lambda _: self.takes(20))
        self.bench = script["Bench"].__new__(script["Bench"])
        self.bench.torch, self.bench.dist = SimpleNamespace(cuda=cuda), SimpleNamespace(all_reduce=lambda _: None)
        self.bench.start, self.bench.end, self.bench.word, self.bench.cycles_per_us, self.bench.job = event, event, None, 1.0, {"samples": samples}
        self.bench.slowest = lambda values: values

    def takes(self, microseconds):
        self.now += microseconds

    def call(self, of_calls):
        """A call that takes the first of the times first, and the last from then on."""
        left = list(of_calls)
        return lambda: self.takes(left.pop(0) if len(left) > 1 else left[0])


@pytest.mark.skipif(not PEERS.exists(), reason="the peers' script is not here")
def test_peers_spin_for_longer_than_their_hosts_take():
    host = Host(samples=8)
    steady, lazy = host.call([400]), host.call([9000, 9000, 300])
    # Of five rounds to warm up and eight that count, the last is disturbed.
    disturbed = host.call([30] * 12 + [500])
    rounds, late = host.bench.timed([steady, lazy, disturbed], [()] * 3)
    assert [len(of_call) for of_call in rounds] == [8] * 3
    assert late == [[0.0] * 8, [0.0] * 8, [0.0] * 7 + [1.0]]


def of_engine(scale, other):
    """What an engine of vLLM finds."""
    from flux_tp.bench.vllm import CASES

    cases = [{"ms": [40.0 * scale, 10.0 * scale, 20.0 * scale]} | ({"first_ms": [4.5 * scale]} if count > 1 else {}) for *_, count in CASES]
    return {"cases": cases, "tokens": [[1, 2], [3, 4 + other]]}


def test_engines_of_vllm_become_a_record(tmp_path):
    from flux_tp.bench.vllm import _compared, rows_of

    found = {"default": of_engine(2.0, 0), "flux": of_engine(1.0, 1)}
    rows = rows_of(found, "llama3-70b", 4)
    assert [row["batch"] for row in rows] == [4, 1, 16, 64, 256] and "dtype" not in rows[0]
    assert rows[0]["ms"] == {"default": 40.0, "flux": 20.0} and rows[0]["spread"]["flux"] == [10.0, 40.0]
    assert "step_ms" not in rows[0] and rows[1]["step_ms"] == {"default": 1.0, "flux": 0.5}
    assert _compared(found) == {"flux": {"equal_first_tokens": 1.0, "equal_tokens": 0.75}}
    head = {"kind": "vllm", "vllm": "0.20.0", "layers": 8, "scales": "row", "compared": _compared(found), "device": "GPU", "gpus": 4, "transport": "nvlink"}
    head |= {"nccl_p2p": True, "torch": "2", "nccl": "2", "driver": "1", "commit": "c", "date": "2026-01-01T00:00:00Z"}
    path = tmp_path / "vllm.json"
    rows = rows_of(found, "llama3-70b", 4, "row")
    assert all(row["dtype"] == "e4m3.row:bf16" for row in rows)
    path.write_text(json.dumps(head | {"rows": rows}))
    shown = bench("show", str(path))
    assert "vllm 0.20.0, 8 layers, fp8\n" in shown
    assert "| decode | 1 | 128 | 32 | 40.0 | 20.0 | 1.00 | 0.50 | 2.00x |" in shown and "100 % of the first ones, 75 % of all." in shown


def test_a_run_that_is_ended_has_the_engines_of_vllm_before(tmp_path, monkeypatch):
    import torch
    from flux_tp.bench import vllm
    from flux_tp.bench.options import Options

    def run(mode, of, limit):
        if mode == "flux_sp":
            raise KeyboardInterrupt
        (Path(of[1]) / f"{mode}.json").write_text(json.dumps(of_engine(2.0, 0)))

    monkeypatch.setattr(vllm, "_engine", run)
    monkeypatch.setattr("importlib.metadata.version", lambda _: "0.20.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28))
    path = tmp_path / "vllm.json"
    with pytest.raises(KeyboardInterrupt):
        vllm.run(Options(["llama3-70b"], ["vllm"], None, ["default", "flux", "flux_sp"], 8, "nvlink", 3, path, 1.0), 2)
    rows = json.loads(path.read_text())["rows"]
    assert [row["ms"] for row in rows] == [{"default": 40.0, "flux": 40.0}] * 5


def test_random_weights_of_vllm_have_a_deviation_whatever_their_type():
    import torch
    from flux_tp.bench.vllm import random_weights

    def parameter(value):
        return torch.nn.Parameter(value, requires_grad=False)

    def linear(weight, scale=None):
        layer = torch.nn.Module()
        layer.weight, layer.bias = parameter(weight), parameter(torch.full((4,), 1e-3))
        if scale is not None:
            layer.weight_scale = parameter(scale)
        return layer

    dummy = torch.linspace(-1e-3, 1e-3, 16).reshape(4, 4)
    scale = torch.tensor([1e-3 / 448])
    codes = (dummy / scale).to(torch.float8_e4m3fn)
    norm = torch.nn.Module()
    norm.weight = parameter(torch.zeros(4))
    parts = {"embed_tokens": linear(dummy.clone()), "qkv_proj": linear(dummy.clone()), "gate_up_proj": linear(codes, scale.clone())}
    parts |= {"o_proj": linear(dummy.clone()), "down_proj": linear(codes, scale.expand(4, 1).clone()), "norm": norm}
    model = torch.nn.ModuleDict(parts)
    model.config = SimpleNamespace(num_hidden_layers=8)
    assert random_weights(model) == 0
    for name, deviation in {"embed_tokens": 1.0, "qkv_proj": 0.02, "gate_up_proj": 0.02, "o_proj": 0.005, "down_proj": 0.005}.items():
        weight = model[name].weight.float() * getattr(model[name], "weight_scale", 1.0)
        assert abs(weight.abs().max() - deviation * 3**0.5) < 1e-5 * deviation, name
    assert (norm.weight == 1).all() and not model["gate_up_proj"].bias.any()
    # A layer that the plugin has made counts once a graph has its op.
    model["qkv_proj"].flux_fused, model["o_proj"].flux_fused = True, False
    assert random_weights(model) == 1


def test_what_does_not_fit_is_refused_with_the_number_before_anything_is_allocated():
    # A hundred layers of GPT-3 in training.
    words = ["layers", "--models", "gpt3", "--layers", "100", "--phases", "train", "--ms", "8192", "--transport", "host", "--tp", "2"]
    ended = subprocess.run([sys.executable, "-m", "flux_tp.bench", *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "gpt3 train at m = 8192 takes 1" in ended.stderr, ended.stderr
    assert " GB or more in each of the 2 ranks, and " in ended.stderr and "GB of memory are free: give fewer --layers" in ended.stderr, ended.stderr


def test_bytes_are_those_that_a_rank_surely_holds():
    import torch
    from flux_tp.bench.attention import decoding
    from flux_tp.bench.memory import least_bytes, refusal
    from flux_tp.bench.models import MODELS
    from flux_tp.bench.options import Options
    from flux_tp.bench.weights import random_layer

    def of_closure(function, name):
        return function.__closure__[function.__code__.co_freevars.index(name)].cell_contents

    model = MODELS["tiny"]
    weights = sum(tensor.numel() for tensor in random_layer(model, 2, torch.device("cpu")).tensors())
    held = least_bytes(model, 2, 3, "prefill", 0)
    assert held == 2 * 3 * weights + 4 * weights
    caches = least_bytes(model, 2, 3, "decode", 5) - least_bytes(model, 2, 3, "prefill", 5)
    attend = decoding(model, 2, 5, 3, torch.device("cpu"))
    assert caches == sum(cache.nbytes for cache in of_closure(attend, "caches"))
    options = Options(["tiny"], ["prefill"], [5], [], 3, "host", 1, None, 1.0)
    needed = least_bytes(model, 2, 3, "prefill", 5)
    assert refusal(options, 2, 2 * needed, 2) is None and refusal(options, 2, 2 * needed - 1, 2) is not None


def test_a_host_without_gpus_measures_the_tiny_model_and_says_each_step(tmp_path):
    few = ["--phases", "prefill", "--ms", "4", "--layers", "1", "--samples", "1", "--modes", "none,flux", "--transport", "host"]
    path = tmp_path / "default-layers.json"
    command = [sys.executable, "-m", "flux_tp.bench", "layers", *few, "--json", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 0, ended.stderr
    (row,) = json.loads(path.read_text())["rows"]
    assert (row["model"], row["tp"]) == ("tiny", 2)
    steps = ["tiny: random weights of 1 layers", "tiny prefill m = 4: reference in fp32, ", "tiny prefill m = 4: first passes of flux"]
    for step in [*steps, "tiny prefill m = 4: 1 rounds of none, flux"]:
        assert ended.stderr.count(step) == 1, ended.stderr


def test_records_of_flux_bench_are_told_from_ones_own():
    record = Path(__file__).parents[2] / "results/h200-x2-nvlink.json"
    command = [sys.executable, "-m", "flux_tp.bench", "show", str(record)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 1 and ended.stderr.endswith("flux-bench show prints those of flux-bench bench\n"), ended.stderr


def test_unknown_words_are_refused():
    ended = subprocess.run([sys.executable, "-m", "flux_tp.bench", "layers", "--modes", "magic"], capture_output=True, text=True, timeout=PATIENCE)
    assert ended.returncode == 2 and "'magic' is none of none, ar," in ended.stderr
    for words, why in (
        (["--scales", "row"], "--scales with --dtype bf16: it is for --dtype fp8"),
        (["--modes", "flux_bf16"], "flux_bf16 with --dtype bf16"),
        (["--dtype", "fp8", "--phases", "train"], "train with --dtype fp8: 8-bit operands have no gradients"),
    ):
        ended = subprocess.run([sys.executable, "-m", "flux_tp.bench", "layers", *words], capture_output=True, text=True, timeout=PATIENCE)
        assert ended.returncode == 2 and why in ended.stderr, ended.stderr
