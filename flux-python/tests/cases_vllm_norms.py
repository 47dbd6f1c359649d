"""Cases of the pass of vLLM's compiler, on graphs of torch.compile; see ``ranks`` and ``cases_vllm``."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import torch
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor import config
from torch._inductor.compile_fx import compile_fx

import cases_vllm_fp8
from cases_torch import BF16, numbers, place, tensors
from cases_vllm import K, N, Ours
from flux_tp.integrations import _vllm_passes
from flux_tp.integrations._vllm_norms import NormFusion
from oracle import UNIT, operand

EPS = 1e-5
ROWS = 16


def native(x, residual, gain, eps):
    """vLLM's norm in torch's ops, as its compiler sees it where its own kernel is off."""
    wide = x.to(torch.float32) + residual
    scaled = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return scaled.to(BF16) * gain, wide.to(BF16)


library = torch.library.Library("flux_test", "DEF")
library.define("fused_add_rms_norm(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float epsilon) -> ()")


@torch.library.impl(library, "fused_add_rms_norm", "CPU")
def _kernel(input, residual, weight, epsilon):
    found = native(input, residual, weight, epsilon)
    input.copy_(found[0])
    residual.copy_(found[1])


def custom(x, residual, gain, eps):
    """vLLM's norm as its kernel, in a functionalised graph."""
    op = torch.ops.flux_test.fused_add_rms_norm.default
    return auto_functionalized(op, input=x, residual=residual, weight=gain, epsilon=eps)[1:]


def in_place(x, residual, gain, eps):
    """vLLM's norm as its kernel, in a model."""
    torch.ops.flux_test.fused_add_rms_norm(x, residual, gain, eps)
    return x, residual


def compiled(model, fused, most=ROWS, around=lambda fusion: fusion):
    """The model by torch.compile, with the graphs that its compiler has run; ``fused``: once the pass has changed them.

    ``around``: makes the pass of that for norms.
    """
    fusion, graphs = around(NormFusion([native, custom], BF16, _vllm_passes.built if fused else set(), most)), []

    def run(graph, _, **options):
        assert fusion.is_applicable_for_range(SimpleNamespace(start=1, end=most))
        fusion(graph.graph)
        graph.graph.lint()
        graph.recompile()
        graphs.append(graph)
        return graph.forward

    def backend(graph, inputs):
        # As vLLM sets it.
        with config.patch(enable_auto_functionalized_v2=False):
            return compile_fx(graph, inputs, inner_compile=run)

    return torch.compile(model, backend=backend, fullgraph=True), graphs


def calls(graphs):
    """The calls of the op in the one graph, and how many norms are beside them."""
    (graph,) = graphs
    called = [node for node in graph.graph.nodes if node.op == "call_function"]
    ours = [node for node in called if node.args and node.args[0] is torch.ops.flux_tp.matmul_all_reduce.default]
    kernel = torch.ops.flux_test.fused_add_rms_norm.default
    norms = [node for node in called if getattr(node.target, "_opname", "") == "rsqrt" or kernel in node.args]
    return ours, len(norms)


def weights(comm, seed):
    return tensors(BF16, operand(seed + comm.rank, N, K))[0]


def inputs(comm, m):
    """Inputs of two layers and a residual, side by side: one number of rows, as in vLLM.

    Inputs have one element in each row, so sums of all ranks and residuals are exact, and what rounds is the norm.
    """
    rows = np.zeros((2, m, K))
    rows[:, np.arange(m), (7 * np.arange(m) + comm.rank) % K] = 1
    (given,) = tensors(BF16, np.concatenate([*rows, operand(5, m, N)], 1))
    torch._dynamo.mark_dynamic(given, 0)
    return given


def same(found, expected):
    """Norms round twice in vLLM and once in the op, from mean squares in fp32."""
    expected = numbers(expected)
    assert (np.abs(numbers(found) - expected) <= 2 * UNIT["bfloat16"] * np.abs(expected)).all()


def norms_are_in_the_op(comm):
    """Two layers in a row, of which the second ends the graph: each is one op, with what the graph without the pass computes."""
    bias, gain, last = tensors(BF16, operand(3, N), 2.0 ** np.arange(N).clip(0, 3), np.full(N, 0.5))
    first, second = Ours(comm, weights(comm, 10), bias, eps=EPS), Ours(comm, weights(comm, 20), eps=EPS)
    for norm in (native, in_place):

        def model(given):
            x, z, residual = given.split([K, K, N], 1)
            normed, summed = norm(first(x)[0], residual.clone() + 1, gain, EPS)
            ended = norm(second(z)[0], summed.clone(), last, EPS)[0]
            return normed * 2, summed * 2, ended * 2

        with torch.inference_mode():
            plain, graphs_before = compiled(model, False)
            fused, graphs = compiled(model, True)
            for m in (2, 7, ROWS):
                given = inputs(comm, m)
                expected, found = plain(given), fused(given)
                assert torch.equal(found[1], expected[1])
                same(found[0], expected[0])
                same(found[2], expected[2])
        before, norms_before = calls(graphs_before)
        after, norms_after = calls(graphs)
        assert len(before) == len(after) == 2 and norms_before == 2 and norms_after == 0, graphs[0].graph
        assert all(call.kwargs["residual"] is not None and call.kwargs["eps"] == EPS for call in after)


def what_follows_otherwise_stays(comm):
    (gain,) = tensors(BF16, np.ones(N))
    ours, other = Ours(comm, weights(comm, 10), eps=EPS), Ours(comm, weights(comm, 10))

    def used_twice(x, residual):
        y = ours(x)[0]
        return y + 1, *native(y, residual, gain, EPS)

    def of_other_eps(x, residual):
        return native(ours(x)[0], residual, gain, 2 * EPS)

    def of_one_row(x, residual):
        return native(ours(x)[0], residual[0], gain, EPS)

    def without_residual(x, residual):
        return native(ours(x)[0], 0.0, gain, EPS)

    def of_a_call_with_bias(x, residual):
        return native(other(x)[0], residual, gain, EPS)

    # A layer like the others, whose call with a bias no one has built.
    other.bias = torch.nn.Parameter(*tensors(BF16, operand(3, N)), requires_grad=False)
    _vllm_passes.built -= {of for of in _vllm_passes.built if of.bias}
    for model in (used_twice, of_other_eps, of_one_row, without_residual, of_a_call_with_bias):
        with torch.inference_mode():
            x, _, residual = inputs(comm, 7).split([K, K, N], 1)
            found, graphs = compiled(model, True)
            assert all(map(torch.equal, found(x, residual), compiled(model, False)[0](x, residual))), model
        (call,), norms = calls(graphs)
        assert call.kwargs["residual"] is None and norms > 0, model
    # Behind 8-bit operands vLLM's norm may quantise.
    scaled, x, *_ = cases_vllm_fp8.layer(comm, "channel", 7)
    (gain,) = tensors(BF16, np.ones(cases_vllm_fp8.N))
    with torch.inference_mode():
        found, graphs = compiled(lambda x, residual: native(scaled(x)[0], residual, gain, EPS), True)
        found(x, torch.zeros(7, cases_vllm_fp8.N, dtype=BF16, device=place()))
    (call,), norms = calls(graphs)
    assert call.kwargs["residual"] is None and norms > 0


def graphs_of_more_rows_stay(comm):
    fusion = NormFusion([native], BF16, _vllm_passes.built, ROWS)
    for end, applies in ((1, True), (ROWS, True), (ROWS + 1, False)):
        assert fusion.is_applicable_for_range(SimpleNamespace(start=1, end=end)) == applies
    # vLLM's cache has graphs of other ops under other names.
    assert fusion.uuid() == NormFusion([native], BF16, set(_vllm_passes.built), ROWS).uuid()
    assert len({fusion.uuid(), NormFusion([native], BF16, set(), ROWS).uuid(), NormFusion([native], BF16, _vllm_passes.built, 1).uuid()}) == 3
