"""A pass of vLLM's compiler: linear layers take the collectives that vLLM's sequence parallelism has put beside them.

Invariant: the passes of all ranks change the same calls, to ops that are built already. A captured call builds nothing. Rows
of all ranks are a multiple of their number, as vLLM pads them.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import SymInt, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._inductor.pattern_matcher import stable_topological_sort
from torch.fx.experimental.symbolic_shapes import statically_known_true

from .._scales import E4M3, FORMS, width_of_rows
from ._vllm_linear import LINEAR, layer_of
from ._vllm_norms import Epilogue, NormFusion, epilogue_of

__all__ = ["SplitRows"]


class SplitRows:
    """The pass, in front of vLLM's InductorPass. ``norms``: the pass that gives ops behind row-parallel layers the norm."""

    def __init__(self, norms: NormFusion) -> None:
        self.norms = norms

    def __call__(self, graph: fx.Graph) -> None:
        # vLLM's pass leaves nodes out of order, and sizes that nothing needs.
        stable_topological_sort(graph)
        graph.eliminate_dead_code()
        calls = [_Linear(node) for node in graph.find_nodes(op="call_function", target=LINEAR)]
        for call in calls:
            if call.layer.flux_op != "all_gather_matmul":
                call.fuse_row()
        self.norms(graph)
        # Behind these norms are final.
        for call in calls:
            if call.layer.flux_op == "all_gather_matmul":
                call.fuse_column(self.norms.built)

    def is_applicable_for_range(self, compile_range: Any) -> bool:
        return True

    def uuid(self) -> str:
        return hashlib.sha256(Path(__file__).read_bytes() + self.norms.uuid().encode()).hexdigest()


class _Linear:
    """A layer's product in a graph."""

    def __init__(self, node: fx.Node) -> None:
        self.node, self.graph = node, node.graph
        self.x, self.weight, self.scale, self.given, self.bias, number = node.args
        self.layer = layer_of(number)
        self.comm, self.form = self.layer.flux_comm, self.layer.flux_scales
        self.fake_mode = node.meta["val"].fake_mode

    def fuse_row(self) -> None:
        """Takes the reduce-scatter, or all-reduce, of the product."""
        if len(self.node.users) != 1:
            return
        (user,) = self.node.users
        if self._is_collective(user, torch.ops.vllm.reduce_scatter.default):
            op = "matmul_reduce_scatter"
        elif self._is_collective(user, torch.ops.vllm.all_reduce.default):
            op = "matmul_all_reduce"
        else:
            return
        with self.graph.inserting_before(user):
            m = self._rows(self.x)
            rows = m if op == "matmul_all_reduce" else self._add(operator.floordiv, m, self.comm.world_size)
            x, scale_x = self.x, self.given
            if self.form == "tensor":
                x = self._quantised(x)
            elif self.form != "none":
                wide, k = self._quantised(x), x.meta["val"].shape[1]
                x = self._add(torch.ops.aten.slice.Tensor, wide, 1, 0, k)
                behind = self._add(torch.ops.aten.view.dtype, wide, torch.float32)
                scale_x = self._add(torch.ops.aten.slice.Tensor, behind, 1, k // 4, k // 4 + (1 if self.form == "row" else k // 128))
            self._replace(user, self._call(op, x, scale_x, m, rows))

    def fuse_column(self, built: set[Any]) -> None:
        """Takes the all-gather of the product's input, where nothing else needs its rows."""
        gather = self.x
        if not self._is_collective(gather, torch.ops.vllm.all_gather.default) or len(gather.users) != 1:
            return
        with self.graph.inserting_before(self.node):
            x = gather.args[0]
            if self.form != "none":
                x = self._normalised(x, built) or self._quantised(x)
            m = self._whole(x)
            self._replace(self.node, self._call("all_gather_matmul", x, self.given, m, m))
        self.graph.erase_node(gather)

    def _normalised(self, x: fx.Node, built: set[Epilogue]) -> fx.Node | None:
        """The norm of a row-parallel op as quantised rows, which the op writes; ``None`` where it cannot, or others need the norm."""
        call = x.args[0] if x.target is operator.getitem and x.args[1] == 2 else None
        if call is None or call.target is not auto_functionalized or len(x.users) > 1:
            return None
        epilogue = epilogue_of(call)
        if epilogue is None or epilogue._replace(norm_scales=FORMS[self.form]) not in built:
            return None
        if self.given is not None:
            if any(node.op != "placeholder" for node in self.given.all_input_nodes):
                return None
            if self.given.op != "placeholder":
                # It may stand behind the call that takes it.
                call.prepend(self.given)
        second = call.kwargs["second"]
        with self.graph.inserting_before(call):
            wide = self._empty(second.args[0][0], width_of_rows(self.form, x.meta["val"].shape[1]), E4M3)
        call.kwargs = call.kwargs | {"second": wide, "norm_scales": FORMS[self.form], "norm_scale": self.given}
        call.meta["val"] = (*call.meta["val"][:2], wide.meta["val"], *call.meta["val"][3:])
        self.graph.erase_node(second)
        return self._add(operator.getitem, call, 2)

    def _quantised(self, x: fx.Node) -> fx.Node:
        """Rows with their scales behind them."""
        out = self._empty(self._rows(x), width_of_rows(self.form, x.meta["val"].shape[1]), E4M3)
        arguments = {"x": x, "gain": None, "scale": self.given, "eps": 0.0, "scales": FORMS[self.form], "comm": self.comm.id}
        done = self._add(auto_functionalized, torch.ops.flux_tp.quantize_rows.default, **arguments, out=out, out_scale=None)
        return self._add(operator.getitem, done, 1)

    def _call(self, op: str, x: fx.Node, scale_x: fx.Node | None, m: Any, rows: Any) -> fx.Node:
        """The one result of an op without norm."""
        value = self.node.meta["val"]
        arguments: Mapping[str, Any] = {
            "x": x,
            "weight": [self.weight],
            "scale_x": scale_x,
            "scale_w": None if self.scale is None else [self.scale],
            "bias": None if self.bias is None else [self.bias],
            "residual": None,
            "gain": None,
            "norm_scale": None,
            "eps": 0.0,
            "activation": 0,
            "m": m,
            "split": None,
            "partials": 0,
            "scales": FORMS[self.form],
            "norm_scales": 0,
            "constant_weights": True,
            "comm": self.comm.id,
            "out": [self._empty(rows, value.shape[1], value.dtype)],
            "second": None,
            "second_scale": None,
        }
        done = self._add(auto_functionalized, getattr(torch.ops.flux_tp, op).default, **arguments)
        return self._add(operator.getitem, self._add(operator.getitem, done, 1), 0)

    def _replace(self, node: fx.Node, by: fx.Node) -> None:
        node.replace_all_uses_with(by)
        self.graph.erase_node(node)
        if node is not self.node:
            self.graph.erase_node(self.node)
        self.layer.flux_fused = True

    def _is_collective(self, node: fx.Node, op: Any) -> bool:
        """Whether a node is this collective of all rows in the layer's group."""
        if node.op != "call_function" or node.target is not op:
            return False
        names = [argument.name for argument in op._schema.arguments]
        given = dict(zip(names, node.args)) | node.kwargs
        return given["group_name"] == self.layer.flux_group and given.get("dim", 0) == 0

    def _empty(self, rows: Any, columns: Any, dtype: torch.dtype) -> fx.Node:
        device = self.node.meta["val"].device
        return self._add(torch.ops.aten.empty.memory_format, [rows, columns], dtype=dtype, device=device, pin_memory=False)

    def _whole(self, x: fx.Node) -> Any:
        """The rows of all ranks: as the graph has them, since consumers of the product are compiled for that extent."""
        rows = self.node.meta["val"].shape[0]
        return self._known(rows) or self._add(operator.mul, self._rows(x), self.comm.world_size)

    def _rows(self, x: fx.Node) -> Any:
        return self._known(x.meta["val"].shape[0]) or self._add(torch.ops.aten.sym_size.int, x, 0)

    def _known(self, extent: int | SymInt) -> Any:
        """An extent as an argument of nodes: a number, or the graph's input that is it."""
        if not isinstance(extent, SymInt):
            return extent
        for node in self.graph.find_nodes(op="placeholder"):
            if isinstance(node.meta.get("val"), SymInt) and statically_known_true(node.meta["val"] == extent):
                return node
        return None

    def _add(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """A call with the fake value of its result; of numbers alone that result."""
        if not any(isinstance(of, fx.Node) for of in (*args, *kwargs.values())) and target is operator.floordiv:
            return target(*args)
        node = self.graph.call_function(target, args, kwargs)
        with self.fake_mode:
            node.meta["val"] = target(*fx.map_arg(args, _value), **fx.map_arg(kwargs, _value))
        return node


def _value(node: fx.Node) -> Any:
    return node.meta["val"]
