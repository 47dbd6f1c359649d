"""A pass of vLLM's compiler: a GEMM-AllReduce or GEMM-ReduceScatter takes the residual and the RMSNorm that follow it.

Invariant: the passes of all ranks change the same calls, to ops that are built already. A captured call builds nothing.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._inductor.pattern_matcher as pm
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .. import _kernels  # noqa: F401 (it registers the ops)

__all__ = ["Epilogue", "Norm", "NormFusion", "epilogue_of"]

_OPS = (torch.ops.flux_tp.matmul_all_reduce.default, torch.ops.flux_tp.matmul_reduce_scatter.default)

Norm = Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
"""Of input, residual, weight and epsilon: the normalised sum, and the sum."""
_NAMES = ["input", "residual", "weight", "eps"]
# Stands for any epsilon in a traced norm, where no other number is the same.
_EPS = 0.8125


class Epilogue(NamedTuple):
    """An op with residual and norm: the communicator, the op's name, the weight's extents, the result's type, and forms by number."""

    comm: int
    op: str
    n: int
    k: int
    dtype: torch.dtype
    scales: int
    bias: bool
    eps: float
    norm_scales: int = 0


class NormFusion:
    """The pass, in front of vLLM's InductorPass.

    ``norms``: the forms that vLLM's norm has in a graph. ``built``: the ops that calls may become. ``most``: rows of the
    largest graph that is changed.
    """

    def __init__(self, norms: Sequence[Norm], dtype: torch.dtype, built: set[Epilogue], most: int) -> None:
        self.dtype, self.built, self.most = dtype, built, most
        self._patterns = pm.PatternMatcherPass(pass_name="flux_tp_norms")
        for norm in norms:
            # A graph that ends with the norm has no use for the sum.
            for results in (2, 1):
                pattern = _traced(norm, dtype, results)
                pm.register_graph_pattern(pattern, extra_check=self._fits, pass_dict=self._patterns)(_fuse)

    def __call__(self, graph: fx.Graph) -> None:
        self._patterns.apply(graph)

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        return compile_range.end <= self.most

    def uuid(self) -> str:
        """Names what a graph of vLLM's cache depends on. It has no numbers of communicators, which end with the rank."""
        of = [*sorted(str(epilogue[1:]) for epilogue in self.built), str(self.dtype), str(self.most)]
        return hashlib.sha256(Path(__file__).read_bytes() + "\n".join(of).encode()).hexdigest()

    def _fits(self, match: pm.Match) -> bool:
        """Whether what is normalised is the whole use of a call, and the call with residual and norm is built."""
        result, residual, gain, eps = (match.kwargs[name] for name in _NAMES)
        call = _call(result)
        if call is None or not isinstance(residual, fx.Node) or not set(result.users) <= set(match.nodes):
            return False
        if call.kwargs["residual"] is not None or call.kwargs["gain"] is not None:
            return False
        y, added, scale = (node.meta["val"] for node in (result, residual, gain))
        if not (_is_shape(added, y.shape) and _is_shape(scale, y.shape[1:]) and added.dtype == y.dtype == scale.dtype and added.stride(-1) == 1):
            return False
        return epilogue_of(call)._replace(eps=eps) in self.built


def epilogue_of(call: fx.Node) -> Epilogue | None:
    """The op of a functionalised call; ``None`` where it is none that takes a norm."""
    op, given = call.args[0], call.kwargs
    if op not in _OPS:
        return None
    n, k = given["weight"][0].meta["val"].shape
    dtype = given["out"][0].meta["val"].dtype
    return Epilogue(given["comm"], op._opname, n, k, dtype, given["scales"], given["bias"] is not None, given["eps"], given["norm_scales"])


def _traced(norm: Norm, dtype: torch.dtype, results: int) -> pm.PatternExpr:
    """The pattern of a norm, of which a graph uses so many results."""

    def search(input: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Any:
        found = norm(input, residual, weight, eps)
        return found if results == 2 else found[0]

    with torch._guards.tracing(None), unset_fake_temporarily(), FakeTensorMode():
        rows, gain = torch.empty(5, 16, dtype=dtype), torch.empty(16, dtype=dtype)
        graph = pm.fwd_only(search, [rows, torch.empty_like(rows), gain, _EPS])
    return pm.fx_to_pattern(graph, argnames=_NAMES, scalar_workaround={"eps": _EPS})


def _is_shape(tensor: Tensor, shape: Sequence[Any]) -> bool:
    """Whether it has this shape for all numbers of rows of the graph."""
    return tensor.dim() == len(shape) and all(statically_known_true(a == b) for a, b in zip(tensor.shape, shape))


def _call(result: fx.Node) -> fx.Node | None:
    """The functionalised call of which this is the one result."""
    outs = result.args[0] if _is_item(result, 0) else None
    call = outs.args[0] if _is_item(outs, 1) else None
    if call is None or call.target is not auto_functionalized or epilogue_of(call) is None:
        return None
    return call if len(outs.users) == 1 else None


def _is_item(node: Any, index: int) -> bool:
    return isinstance(node, fx.Node) and node.target is operator.getitem and node.args[1] == index and isinstance(node.args[0], fx.Node)


def _fuse(match: pm.Match, input: fx.Node, residual: fx.Node, weight: fx.Node, eps: float) -> None:
    """Puts the call with residual and norm behind all that it takes, in place of the call and the norm."""
    graph, call = match.graph, _call(input)
    order = {node: index for index, node in enumerate(graph.nodes)}
    outs, (out,) = input.args[0], call.kwargs["out"]
    normed, *summed = match.output_nodes()
    with graph.inserting_after(max((call, residual, weight), key=order.__getitem__)):
        second = graph.node_copy(out)
    with graph.inserting_after(second):
        fused = graph.call_function(auto_functionalized, call.args, call.kwargs | {"residual": residual, "gain": weight, "eps": eps, "second": second})
    with graph.inserting_after(fused):
        items = [graph.call_function(operator.getitem, (fused, 1)), graph.call_function(operator.getitem, (fused, 2))]
    with graph.inserting_after(items[0]):
        y = graph.call_function(operator.getitem, (items[0], 0))
    value = input.meta["val"]
    fused.meta["val"], items[0].meta["val"] = (None, [value], value), [value]
    y.meta["val"], items[1].meta["val"] = value, normed.meta["val"]
    normed.replace_all_uses_with(items[1])
    for node in summed:
        node.replace_all_uses_with(y)
    match.erase_nodes()
    for node in (input, outs, call):
        graph.erase_node(node)
