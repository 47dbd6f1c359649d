"""Cases with 8-bit layers in the form of vLLM's; see ``ranks`` and ``cases_vllm``."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch.nn import Parameter

import flux_tp
from cases_scaled import codes, dequantised, powers
from cases_torch import BF16, numbers, place, tensors
from cases_vllm import Ours, Theirs, fusable
from flux_tp.integrations._vllm_fp8 import held, scales_of
from oracle import close, operand

N, K = 256, 256
STATIC = 2.0**-6
KINDS = {
    # Whether the input's scale is static, groups of the input and of the weight; the form here.
    "static": (True, (-1, -1), (-1, -1), "tensor"),
    "dynamic": (False, (1, -1), (-1, -1), "row"),
    "channel": (False, (1, -1), (-1, 1), "row"),
    "block": (False, (1, 128), (128, 128), "block"),
}


class Fp8LinearMethod:
    """Fields of vLLM's linear method, and what it makes of the weights that it has loaded."""

    def __init__(self, static, of_x, of_weight):
        keys = {
            "activation_quant_key": SimpleNamespace(scale=SimpleNamespace(static=static, group_shape=of_x)),
            "weight_quant_key": SimpleNamespace(scale=SimpleNamespace(static=True, group_shape=of_weight)),
        }
        self.fp8_linear = SimpleNamespace(config=SimpleNamespace(**keys))
        self.blocks, self.tensor = of_weight[0] > 0, of_weight == (-1, -1)

    def process_weights_after_loading(self, layer):
        if self.blocks:
            return
        layer.weight = Parameter(layer.weight.data.t(), requires_grad=False)
        if self.tensor:
            layer.weight_scale = Parameter(layer.weight_scale.data.max(), requires_grad=False)


def loaded(kind, rank):
    """A rank's weight and scales as of a checkpoint, and what they stand for."""
    weight, (*_, of_weight, form) = codes(10 + rank, N, K), KINDS[kind]
    shape = {(-1, -1): (1, 1), (-1, 1): (1, N), (128, 128): (N // 128, K // 128)}[of_weight]
    # The one scale of a weight is the same on all ranks.
    scale = powers(20 + (rank if len(shape) > 1 else 0), *shape)
    wide = dequantised(weight, scale.expand(1, N) if form == "row" else scale, form, True)
    return weight, {"static": scale[0], "dynamic": scale[0], "channel": scale.t(), "block": scale}[kind].contiguous(), wide


def layer(comm, kind, m, name="weight_scale", compressed=False, with_bias=False):
    """A layer that vLLM has loaded, this rank's ``x``, and what all ranks compute: the result and the sum of absolute partials."""
    *groups, form = KINDS[kind]
    method = Fp8LinearMethod(*groups)
    given = torch.tensor(STATIC, device=place())
    bias = operand(5, N) if with_bias else None
    partials, xs = [], []
    for rank in range(comm.world_size):
        (x,) = tensors(BF16, operand(30 + rank, m, K))
        quantised, of_x = flux_tp.quantize_rows(x, given if form == "tensor" else form)
        partials.append(dequantised(quantised, of_x, form) @ loaded(kind, rank)[2].T)
        xs.append(x)
    weight, scale, _ = loaded(kind, comm.rank)
    fields = {"params_dtype": BF16, name: Parameter(scale, requires_grad=False), "input_scale": given if form == "tensor" else None}
    fields |= {"quant_method": method}
    if compressed:
        scheme = type("CompressedTensorsW8A8Fp8", (Fp8LinearMethod,), {})(*groups)
        process = {"process_weights_after_loading": lambda self, layer: layer.scheme.process_weights_after_loading(layer)}
        fields |= {"quant_method": type("CompressedTensorsLinearMethod", (), process)(), "scheme": scheme}
    ours = Ours(comm, weight, *tensors(BF16, bias), **fields)
    ours.quant_method.process_weights_after_loading(ours)
    return ours, xs[comm.rank], sum(partials) + (bias if with_bias else 0), np.abs(partials).sum(0)


@torch.inference_mode()
def an_fp8_layer_is_one_op(comm):
    for kind in KINDS:
        for m in (1, 7):
            for options in ({}, {"with_bias": True, "compressed": True}):
                ours, x, y, sums = layer(comm, kind, m, "weight_scale_inv" if kind == "block" and not options else "weight_scale", **options)
                found, bias = ours(x)
                assert bias is None and found.dtype == BF16
                close(numbers(found), y, "bfloat16", sums)
    ours, x, y, sums = layer(comm, "channel", 6)
    found, _ = ours(x.reshape(2, 3, K))
    assert found.shape == (2, 3, N)
    close(numbers(found.reshape(6, N)), y, "bfloat16", sums)


@torch.inference_mode()
def weights_are_not_copied(comm):
    for kind in KINDS:
        ours, *_ = layer(comm, kind, 1)
        weight, scale = held(ours, ours.flux_scales)
        assert weight.shape == (N, K) and weight.data_ptr() == ours.weight.data_ptr()
        assert scale.data_ptr() == ours.weight_scale.data_ptr()
    # A weight's one scale stands for each row, also where vLLM loads weights anew.
    ours, x, y, sums = layer(comm, "dynamic", 2)
    weight, scale, _ = loaded("dynamic", comm.rank)
    ours.weight, ours.weight_scale = Parameter(weight, requires_grad=False), Parameter(2 * scale, requires_grad=False)
    ours.quant_method.process_weights_after_loading(ours)
    assert ours.weight_scale.shape == (N, 1)
    close(numbers(ours(x)[0]), 2 * y, "bfloat16", 2 * sums)


@torch.inference_mode()
def other_fp8_layers_stay(comm):
    def of(method, n=N, k=K, **fields):
        weight = torch.zeros(n, k, device=place()).to(torch.float8_e4m3fn)
        return Theirs(comm, weight, params_dtype=BF16, quant_method=method, **fields)

    for kind, (*groups, form) in KINDS.items():
        multiple = 128 if form == "block" else 16
        assert fusable(of(Fp8LinearMethod(*groups))) and scales_of(of(Fp8LinearMethod(*groups))) == form
        assert not fusable(of(Fp8LinearMethod(*groups), n=N + multiple // 2)) and not fusable(of(Fp8LinearMethod(*groups), k=K + multiple // 2)), kind
    # A static scale with those of channels, one dynamic scale of all rows, and other blocks.
    for groups in ((True, (-1, -1), (-1, 1)), (False, (-1, -1), (-1, -1)), (False, (1, 64), (64, 64))):
        assert not fusable(of(Fp8LinearMethod(*groups))), groups
    scheme = type("CompressedTensorsW8A16Fp8", (), {})()
    assert not fusable(of(type("CompressedTensorsLinearMethod", (), {})(), scheme=scheme))
    assert not fusable(of(type("FBGEMMFp8LinearMethod", (Fp8LinearMethod,), {})(*KINDS["channel"][:3])))
    # A kernel of vLLM has repacked the weight, or its scales are those of another kernel.
    ours, x, *_ = layer(comm, "block", 2)
    ours.weight = Parameter(ours.weight.data.view(torch.int32), requires_grad=False)
    assert ours(x) == "theirs"
    ours, x, *_ = layer(comm, "channel", 2)
    ours.weight = Parameter(ours.weight.data.contiguous(), requires_grad=False)
    assert ours(x) == "theirs"
    ours, x, *_ = layer(comm, "block", 2)
    ours.weight_scale = Parameter(ours.weight_scale.data.view(torch.int32), requires_grad=False)
    assert ours(x) == "theirs"


def a_compiled_fp8_layer_is_one_op(comm):
    """One graph for all numbers of rows, which names the ops and nothing of Python."""
    ops = torch.ops.flux_tp
    for kind in KINDS:
        graphs = []

        def backend(graph, _):
            graphs.append(graph)
            return graph.forward

        ours, *_ = layer(comm, kind, 1, with_bias=True)
        compiled = torch.compile(lambda x: ours(x)[0], backend=backend, fullgraph=True, dynamic=True)
        with torch.inference_mode():
            for m in (2, 7, 33):
                _, x, y, sums = layer(comm, kind, m, with_bias=True)
                close(numbers(compiled(x)), y, "bfloat16", sums)
        called = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
        assert len(graphs) == 1 and called.count(ops.quantize_rows.default) == called.count(ops.matmul_all_reduce.default) == 1, graphs
