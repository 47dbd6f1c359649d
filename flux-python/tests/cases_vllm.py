"""Cases with layers in the form of vLLM's; see ``ranks``.

vLLM needs a GPU. A mock has the fields and the forward pass of its linear layers that the plugin builds on.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch

from cases_torch import BF16, numbers, tensors
from flux_tp.integrations._vllm_layers import RowParallel, is_split, misfit
from oracle import close, operand

N, K, MAX_M = 64, 128, 40


def configured(sizes=(1, 2), max_m=MAX_M, drafted=None, enable_sp=False, least=None, ubatching=False, offloaded=0.0, mode=3, eps=1e-5, lora=None):
    """The parts of a VllmConfig that the plugin reads."""
    return SimpleNamespace(
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=None if sizes is None else list(sizes),
            pass_config=SimpleNamespace(enable_sp=enable_sp, sp_min_token_num=least),
            compile_ranges_endpoints=[max_m],
            mode=mode,
        ),
        model_config=SimpleNamespace(dtype=BF16, hf_text_config=SimpleNamespace(**({} if eps is None else {"rms_norm_eps": eps}))),
        lora_config=lora,
        speculative_config=drafted and SimpleNamespace(num_speculative_tokens=drafted),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max_m),
        parallel_config=SimpleNamespace(use_ubatching=ubatching, tensor_parallel_size=2),
        offload_config=SimpleNamespace(uva=SimpleNamespace(cpu_offload_gb=offloaded), prefetch=SimpleNamespace(offload_group_size=0)),
    )


class UnquantizedLinearMethod:
    pass


def fusable(layer):
    return is_split(layer) and misfit(layer) is None


class Theirs(torch.nn.Module):
    """Fields of vLLM's layer. Its forward pass only says that it ran."""

    def __init__(self, comm, weight, bias=None, **fields):
        super().__init__()
        self.tp_size, self.input_size, self.output_size = comm.world_size, weight.shape[1] * comm.world_size, weight.shape[0]
        self.input_size_per_partition, self.output_size_per_partition = weight.shape[1], weight.shape[0]
        self.params_dtype, self.tp_rank = weight.dtype, comm.rank
        self.quant_method, self.input_is_parallel, self.reduce_results = UnquantizedLinearMethod(), True, True
        self.skip_bias_add, self.return_bias = False, True
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)
        for name, value in fields.items():
            setattr(self, name, value)

    def forward(self, x):
        return "theirs"


class Ours(RowParallel, Theirs):
    def __init__(self, comm, *args, eps=None, **options):
        Theirs.__init__(self, comm, *args, **options)
        if fusable(self):
            self._fuse(comm, [1, 2], eps)


def layer(comm, m, with_bias=False, **fields):
    """A layer, this rank's ``x``, and what all ranks compute: the result and the sum of absolute partials."""
    whole, weights = operand(1, comm.world_size, m, K), operand(2, comm.world_size, N, K)
    bias = operand(3, N) if with_bias else None
    partials = whole @ weights.transpose(0, 2, 1)
    y = partials.sum(0) + (bias if with_bias and not fields.get("skip_bias_add") else 0)
    x, w, b = tensors(BF16, whole[comm.rank], weights[comm.rank], bias)
    return Ours(comm, w, b, **fields), x, y, np.abs(partials).sum(0)


@torch.inference_mode()
def a_layer_is_one_op(comm):
    for m in (1, 2, 7, MAX_M):
        ours, x, y, sums = layer(comm, m)
        found, bias = ours(x)
        assert bias is None
        close(numbers(found), y, "bfloat16", sums)
        (ours, x, y, sums), options = layer(comm, m, True), {"skip_bias_add": True}
        close(numbers(ours(x)[0]), y, "bfloat16", sums)
        ours, x, y, sums = layer(comm, m, True, **options)
        found, bias = ours(x)
        assert bias is ours.bias
        close(numbers(found), y, "bfloat16", sums)
        ours, x, y, sums = layer(comm, m, return_bias=False)
        close(numbers(ours(x)), y, "bfloat16", sums)
    ours, x, y, sums = layer(comm, 6)
    found, _ = ours(x.reshape(2, 3, K))
    assert found.shape == (2, 3, N)
    close(numbers(found.reshape(6, N)), y, "bfloat16", sums)


@torch.inference_mode()
def other_layers_stay(comm):
    of_others = type("AWQLinearMethod", (), {})()
    for fields in ({"tp_size": 1}, {"input_is_parallel": False}, {"reduce_results": False}, {"quant_method": of_others}, {"params_dtype": torch.float32}):
        ours, x, *_ = layer(comm, 2, **fields)
        assert ours.flux_comm is None and ours(x) == "theirs", fields
    for n, k, fields, word in ((N, 12, {}, f"{N} x 12"), (12, K, {}, "multiples of 8"), (N, K, {"quant_method": of_others}, "AWQLinearMethod"), (N, K, {"params_dtype": torch.float32}, "float32")):
        theirs = Theirs(comm, torch.zeros(n, k, dtype=BF16), **fields)
        assert not fusable(theirs) and word in misfit(theirs)
    # Models take the reduction off after they have made a layer.
    ours, x, *_ = layer(comm, 2)
    ours.reduce_results = False
    assert ours(x) == "theirs"


@torch.inference_mode()
def more_rows_stay(comm):
    ours, x, *_ = layer(comm, MAX_M + 1)
    assert ours(x) == "theirs"
    ours, x, *_ = layer(comm, 2)
    assert ours(x.t().contiguous().t()) == "theirs"


def a_compiled_layer_is_one_op(comm):
    """One graph for all numbers of rows, which names the op and nothing of Python."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    ours, *_ = layer(comm, 1, True)
    compiled = torch.compile(lambda x: ours(x)[0], backend=backend, fullgraph=True, dynamic=True)
    with torch.inference_mode():
        for m in (2, 7, 33):
            _, x, y, sums = layer(comm, m, True)
            close(numbers(compiled(x)), y, "bfloat16", sums)
    calls = [node for graph in graphs for node in graph.graph.nodes if node.target is torch.ops.flux_tp.matmul_all_reduce.default]
    assert len(graphs) == len(calls) == 1, graphs
