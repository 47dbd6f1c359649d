"""Cases of vLLM's layers with split rows, on graphs of torch.compile; see ``ranks`` and ``cases_vllm``."""

from __future__ import annotations

import numpy as np
import torch

import flux_tp
from cases_scaled import dequantised
from cases_torch import BF16, numbers, place, tensors
from cases_vllm import RowParallel, Theirs, UnquantizedLinearMethod, fusable
from cases_vllm_fp8 import KINDS, STATIC, Fp8LinearMethod, K, N, Parameter, loaded
from cases_vllm_norms import EPS, compiled, native
from flux_tp._scales import FORMS, scaled_product
from flux_tp.integrations._vllm_fp8 import held
from flux_tp.integrations._vllm_layers import ColumnParallel
from flux_tp.integrations._vllm_linear import marked
from flux_tp.integrations._vllm_sp import SplitRows
from oracle import close, operand, rms_norm, rows

GROUP, WORLD = "tp:0", 2
NAMES = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce", "quantize_rows")
OPS = {name: getattr(torch.ops.flux_tp, name).default for name in NAMES}

library = torch.library.Library("vllm", "FRAGMENT")
library.define("all_reduce(Tensor tensor, str group_name) -> Tensor")
library.define("reduce_scatter(Tensor tensor, int dim, int world_size, str group_name) -> Tensor")
library.define("all_gather(Tensor tensor, int dim, int world_size, str group_name) -> Tensor")


def _one(x):
    return torch.eye(x.shape[1], dtype=x.dtype, device=x.device)


@torch.library.impl(library, "all_reduce", "CPU")
def _all_reduce(x, group_name):
    return flux_tp.matmul_all_reduce(x, _one(x))


@torch.library.impl(library, "reduce_scatter", "CPU")
def _reduce_scatter(x, dim, world_size, group_name):
    return flux_tp.matmul_reduce_scatter(x, _one(x))


@torch.library.impl(library, "all_gather", "CPU")
def _all_gather(x, dim, world_size, group_name):
    return flux_tp.all_gather_matmul(x, _one(x))


torch.library.register_fake("vllm::all_reduce", lambda x, group_name: torch.empty_like(x), lib=library)
torch.library.register_fake("vllm::reduce_scatter", lambda x, dim, world, group: x.new_empty(x.shape[0] // world, *x.shape[1:]), lib=library)
torch.library.register_fake("vllm::all_gather", lambda x, dim, world, group: x.new_empty(x.shape[0] * world, *x.shape[1:]), lib=library)


def apply(self, layer, x, bias):
    """vLLM's own product, in torch."""
    if layer.flux_scales == "none":
        return torch.nn.functional.linear(x, layer.weight, bias)
    weight, scale = held(layer, layer.flux_scales)
    given = layer.input_scale if layer.flux_scales == "tensor" else layer.flux_scales
    codes, of_x = flux_tp.quantize_rows(x, given, carried=False)
    return scaled_product(codes, weight, of_x, scale, layer.flux_scales, bias, BF16)


class Unquantized(UnquantizedLinearMethod):
    apply = apply


Unquantized.__name__ = UnquantizedLinearMethod.__name__
Fp8LinearMethod.apply = apply


class Row(RowParallel, Theirs):
    pass


class Column(ColumnParallel, Theirs):
    gather_output = False


def made(of, comm, kind, seed, bias=None, eps=EPS, least=1):
    """A layer that vLLM has loaded, and what the weights of all ranks stand for."""
    if kind == "none":
        wide = [operand(seed + rank, N, K) for rank in range(WORLD)]
        (weight,) = tensors(BF16, wide[comm.rank])
        fields = {"quant_method": Unquantized()}
    else:
        wide = [loaded(kind, rank)[2] for rank in range(WORLD)]
        weight, scale, _ = loaded(kind, comm.rank)
        given = torch.tensor(STATIC, device=place()) if kind == "static" else None
        fields = {"params_dtype": BF16, "weight_scale": Parameter(scale, requires_grad=False), "input_scale": given}
        fields |= {"quant_method": Fp8LinearMethod(*KINDS[kind][:3])}
    # Not the constructor of the plugin, which asks vLLM.
    layer = of.__new__(of)
    Theirs.__init__(layer, comm, weight, bias, **fields)
    assert fusable(layer)
    layer._split(comm, [2, 4], eps, least, GROUP)
    if kind != "none":
        layer.quant_method.process_weights_after_loading(layer)
    return layer, wide


def scattered(layer, x):
    return torch.ops.vllm.reduce_scatter(marked(layer, x), 0, WORLD, GROUP)


def gathered(x):
    return torch.ops.vllm.all_gather(x, 0, WORLD, GROUP)


def split(model, fused=True):
    """The model by torch.compile, and its graphs behind the pass."""
    return compiled(model, True, around=SplitRows if fused else lambda fusion: fusion)


def called(graphs):
    """Arguments of the calls of each op in the one graph, and what of vLLM is beside them."""
    (graph,) = graphs
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    functional = [node for node in nodes if node.args and node.args[0] in OPS.values()]
    theirs = [node.target._opname for node in nodes if getattr(node.target, "namespace", "") in ("vllm", "flux_vllm")]
    return *([node.kwargs for node in functional if node.args[0] is op] for op in OPS.values()), theirs


def inputs(comm, m):
    """This rank's part of a row-parallel layer's input and of a residual that ranks add, side by side; and both whole, in fp64."""
    whole, residual = operand(1, WORLD, m, K), operand(2, m, N)
    (given,) = tensors(BF16, np.concatenate([whole[comm.rank], residual if comm.rank == 0 else 0 * residual], 1))
    torch._dynamo.mark_dynamic(given, 0)
    return given, whole, residual


def partials_of(layer, wide, whole):
    """What each rank adds to a row-parallel layer's result, in fp64."""
    return np.stack([of_rows(layer, *tensors(BF16, x), layer.flux_scales) @ weight.T for x, weight in zip(whole, wide, strict=True)])


def of_rows(layer, x, form):
    """What an 8-bit layer's product takes for ``x``, in fp64."""
    if form == "none":
        return numbers(x)
    codes, scale = flux_tp.quantize_rows(x, layer.input_scale if form == "tensor" else form)
    return dequantised(codes, scale, form)


def split_rows_are_fused(comm):
    """Row-parallel, norm, column-parallel: two ops, and in 8 bits one that quantises the first's rows."""
    gain, bias, row_bias = tensors(BF16, 2.0 ** np.arange(N).clip(0, 3), operand(4 + comm.rank, N), operand(3, N))
    for kind in ("none", "dynamic", "channel", "static", "block"):
        (row, wide), (column, of_column) = made(Row, comm, kind, 10, row_bias), made(Column, comm, kind, 20, bias)

        def model(given):
            x, embedded = given.split([K, N], 1)
            residual = torch.ops.vllm.reduce_scatter(embedded, 0, WORLD, GROUP)
            normed, summed = native(scattered(row, x), residual, gain, EPS)
            return summed * 1, column(gathered(normed))[0] * 1

        with torch.inference_mode():
            fused, graphs = split(model)
            for m in (4, 6, 34):
                given, whole, residual = inputs(comm, m)
                summed, y = fused(given)
                partials = partials_of(row, wide, whole)
                own = rows(WORLD, comm.rank, m)
                close(numbers(summed), (partials.sum(0) + numbers(row_bias) + residual)[own], "bfloat16", np.abs(partials).sum(0)[own])
                sums, columns = gathered(summed), of_column[comm.rank]
                if kind == "none":
                    normed = rms_norm(numbers(sums), numbers(gain), EPS)
                    close(numbers(y), normed @ columns.T + numbers(bias), "bfloat16", np.abs(normed) @ np.abs(columns).T)
                else:
                    form = column.input_scale if kind == "static" else column.flux_scales
                    codes, scale = flux_tp.quantize_rows(sums, form, norm=(gain, EPS))
                    normed = dequantised(codes, scale, column.flux_scales)
                    close(numbers(y), normed @ columns.T + numbers(bias), "bfloat16", 2.0**-12 * np.abs(normed) @ np.abs(columns).T)
        (gather,), (scatter,), reduced, quantised, theirs = called(graphs)
        form = FORMS[row.flux_scales]
        assert not reduced and theirs == ["reduce_scatter"] and len(quantised) == (kind != "none"), graphs[0].graph
        assert scatter["residual"] is not None and scatter["eps"] == EPS and scatter["scales"] == scatter["norm_scales"] == gather["scales"] == form
        assert row.flux_fused and column.flux_fused


def fewer_rows_stay_whole(comm):
    """A graph that vLLM does not split: GEMM-AllReduce, with the norm behind 16-bit layers, and vLLM's own column-parallel product."""
    (gain,) = tensors(BF16, np.ones(N))
    for kind in ("none", "channel"):
        (row, wide), (column, _) = made(Row, comm, kind, 10, least=16), made(Column, comm, kind, 20, least=16)

        def model(given):
            x, residual = given.split([K, N], 1)
            normed, summed = native(row(x)[0], residual * 1, gain, EPS)
            return summed * 1, column(normed)[0] * 1

        with torch.inference_mode():
            (fused, graphs), (plain, _) = split(model), split(model, False)
            given, whole, residual = inputs(comm, 6)
            summed, y = fused(given)
            partials = partials_of(row, wide, whole)
            added = residual if comm.rank == 0 else 0
            # Behind 8-bit layers vLLM's norm rounds a second time.
            close(numbers(summed), partials.sum(0) + added, "bfloat16", 2 * np.abs(partials).sum(0))
            assert (numbers(plain(given)[1]) - numbers(y)).std() < 0.1 * numbers(y).std()
        gathers, scatters, (reduced,), _, theirs = called(graphs)
        assert not gathers and not scatters and theirs == ["linear"] and (reduced["residual"] is None) == (kind == "channel")
        assert row.flux_fused and not column.flux_fused


def what_is_split_otherwise_stays(comm):
    """Graphs with a part that no op is: it is vLLM's, and the others are fused."""
    (gain,) = tensors(BF16, np.ones(N))
    (row, _), (column, _) = made(Row, comm, "none", 10), made(Column, comm, "none", 20)
    (coarse, _), (narrow, _) = made(Row, comm, "channel", 10), made(Column, comm, "channel", 20)

    def used_twice(x, residual):
        y = marked(row, x)
        return torch.ops.vllm.reduce_scatter(y, 0, WORLD, GROUP) + residual, y + 1

    def of_another_group(x, residual):
        return (torch.ops.vllm.reduce_scatter(marked(row, x), 0, WORLD, "ep:0") + residual,)

    def of_other_eps(x, residual):
        return native(scattered(row, x), residual, gain, 2 * EPS)

    def gathered_for_two(x, residual):
        full = gathered(residual)
        return column(full)[0] + 1, full + 1

    def normed_for_two(x, residual):
        normed, _ = native(scattered(coarse, x), residual, gain, EPS)
        return narrow(gathered(normed))[0] + 1, normed + 1

    def of_other_scales(x, residual):
        # The norm of a 16-bit layer in front of an 8-bit one, which no one has built.
        normed, summed = native(scattered(row, x), residual, gain, EPS)
        return narrow(gathered(normed))[0] + 1, summed + 1

    expected = {
        # GEMM-ReduceScatters, norms in them, AllGather-GEMMs, quantisations, and vLLM's calls.
        used_twice: (0, 0, 0, 0, ["linear", "reduce_scatter"]),
        of_another_group: (0, 0, 0, 0, ["linear", "reduce_scatter"]),
        of_other_eps: (1, 0, 0, 0, []),
        gathered_for_two: (0, 0, 0, 0, ["all_gather", "linear"]),
        normed_for_two: (1, 1, 1, 2, []),
        of_other_scales: (1, 1, 1, 1, []),
    }
    for model, counts in expected.items():
        torch._dynamo.reset()

        def whole(given, model=model):
            x, embedded = given.split([K, N], 1)
            return model(x, torch.ops.vllm.reduce_scatter(embedded, 0, WORLD, GROUP))

        with torch.inference_mode():
            (fused, graphs), (plain, _) = split(whole), split(whole, False)
            given, *_ = inputs(comm, 4)
            for found, other in zip(fused(given), plain(given), strict=True):
                found, other = numbers(found), numbers(other)
                assert found.shape == other.shape and np.abs(found - other).max() <= 0.05 * np.abs(other).max(), model
        gathers, scatters, _, quantised, theirs = called(graphs)
        # The first is the residual's.
        found = len(scatters), sum(of["gain"] is not None for of in scatters), len(gathers), len(quantised), theirs[1:]
        assert found == counts, (model, found, graphs[0].graph)
