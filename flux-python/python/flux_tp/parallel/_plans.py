"""Plans for the causal language models of transformers, found by the names and shapes of their modules.

Invariant: a module whose computation is not known stays as it is, and the table names it. It sees whole tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from .._comm import Communicator
from ..errors import OperandError
from ._decoder import fuse_residuals, is_known, is_known_stack, least_rows, split_rows
from ._loss import causal_lm_loss
from ._mesh import arrange, communicator, present
from ._styles import ColwiseParallel, Fused, RowwiseParallel, SequenceParallel, replicate

__all__ = ["parallelize"]

# Names of column-parallel layers that share an input, and of the row-parallel layer behind them.
_ATTENTIONS = ((("q_proj", "k_proj", "v_proj"), "o_proj"), (("query_key_value",), "dense"))
_MLPS = ((("gate_proj", "up_proj"), "down_proj"), (("dense_h_to_4h",), "dense_4h_to_h"))


class _Replicated(ParallelStyle):
    """A module that every rank computes alike, or by heads: then gradients of its parameters are summed."""

    def __init__(self, by_heads: bool) -> None:
        self.by_heads = by_heads

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        replicate(module, device_mesh, self.src_data_rank, summing=self.by_heads)
        return module


class _Row(NamedTuple):
    """What a module becomes."""

    module: str
    style: ParallelStyle
    words: str


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    mode: Literal["training", "inference"] = "training",
    *,
    keep_gathered: bool = False,
    split_rows: int | None = None,
    verbose: bool = True,
    src_data_rank: int | None = 0,
    **options: Any,
) -> nn.Module:
    """Splits a causal language model of transformers over the ranks of a mesh, in place; collective.

    Known are the families Llama, Mistral, Qwen2, Qwen3 and GPT-NeoX, and models with modules of the same names and shapes.
    Inputs, labels, loss and hidden states between model and caller are whole and the same on every rank.

    Args:
        model: in bfloat16 or float16, on any device or on ``meta``; parameters of ``meta`` get storage by ``to_empty``.
        mesh: the tensor-parallel dimension of a mesh, as ``mesh["tp"]``.
        mode: ``training``: between attention and MLP each rank has its part of the sequence, whose length the ranks divide.
            ``outputs.logits`` is a DTensor that is split along the vocabulary, and ``outputs.loss`` is computed from it. Under
            ``torch.compile`` it is the rank's part as a plain tensor.
            ``inference``: every rank has all activations, for any length, with caches; ``outputs.logits`` is a whole tensor.
        keep_gathered: as of :class:`flux_tp.ColumnParallelLinear`.
        split_rows: in inference without gradients, from how many rows, the tokens of all sequences of a call, the ranks split the rows of
            hidden states between the layers: then a layer is two AllGather-GEMMs and two GEMM-ReduceScatters. ``None``: from where the
            cost model says that this is faster. It is for Llama, Mistral, Qwen2 and Qwen3; a caller that asks for hidden states gets whole ones.
        verbose: whether rank 0 prints a table of what became what.
        src_data_rank: the rank of the mesh whose values the parameters have. ``None``: each rank has its own, all alike.
        options: those of :func:`flux_tp.init`, for a communicator of the mesh. ``max_m`` is the tokens of a batch at least.

    Returns:
        ``model``.

    Raises:
        OperandError: a module that the ranks cannot split evenly, or in training an unknown one in a layer, by name; nothing was changed.
    """
    if mode not in ("training", "inference"):
        raise OperandError(f"mode = {mode!r}: there are 'training' and 'inference'")
    if split_rows is not None and (mode == "training" or split_rows < 1):
        raise OperandError(f"split_rows = {split_rows} with mode = {mode!r}: give 1 or more, with 'inference'")
    comm = communicator(mesh, **options)
    plan = _Plan(model, comm, mode == "training", keep_gathered, split_rows)
    for row in plan.rows:
        parallelize_module(model.get_submodule(row.module), mesh, row.style, src_data_rank=src_data_rank)
    plan.borders(mesh)
    if verbose and comm.rank == 0:
        print(plan.table())
    if plan.unknown:
        warnings.warn(f"flux_tp.parallelize: {', '.join(plan.unknown)} stay as they are, and every rank has all of them", stacklevel=2)
    return model


class _Plan:
    """The styles of a model's modules, checked before the first is applied."""

    def __init__(self, model: nn.Module, comm: Communicator, training: bool, keep_gathered: bool, split_rows: int | None) -> None:
        self.model, self.comm, self.training, self.keep, self.split_rows = model, comm, training, keep_gathered, split_rows
        self.rows: list[_Row] = []
        self.groups: list[tuple[nn.Module, int]] = []
        self.stack, self.layers, self.final_norm = self._stack()
        self.head = getattr(model, "get_output_embeddings", lambda: None)()
        for name, module in model.named_modules():
            self._plan(name, module)
        planned = {id(parameter) for row in self.rows for parameter in _parameters(model.get_submodule(row.module), row.style)}
        self.unknown = sorted(name for name, parameter in model.named_parameters() if id(parameter) not in planned)
        inside = {id(parameter) for parameter in self.layers.parameters()} - planned
        if training and inside:
            names = ", ".join(name for name, parameter in model.named_parameters() if id(parameter) in inside)
            raise OperandError(
                f"{names}: what computes with them is not known, and would see a rank's part of the sequence: write a plan of flux_tp's styles, "
                "with SequenceParallel where it computes row by row, or take mode='inference'"
            )

    def _stack(self) -> tuple[nn.Module, nn.ModuleList, nn.Module]:
        """What has the decoder layers, these, and the norm behind them."""
        for parent in self.model.modules():
            for layers in parent.children():
                known = isinstance(layers, nn.ModuleList) and len(layers) and any(_children(of, _ATTENTIONS) for of in layers[0].modules())
                norms = [child for child in parent.children() if _is_norm(child)]
                if known and len(norms) == 1:
                    return parent, layers, norms[0]
        names = " or ".join(", ".join([*columns, row]) for columns, row in _ATTENTIONS)
        raise OperandError(
            f"{type(self.model).__name__} has no list of layers whose attention has the linear layers {names}: "
            "write a plan of flux_tp's styles for torch.distributed.tensor.parallel.parallelize_module"
        )

    def _plan(self, name: str, module: nn.Module) -> None:
        sequence = Shard(1) if self.training else Replicate()
        if found := _children(module, _ATTENTIONS):
            self._columns_and_row(name, module, *found, self._heads(name, module) if len(found[0]) > 1 else self._whole_heads(name, module))
        elif found := _children(module, _MLPS):
            self._columns_and_row(name, module, *found, {})
        elif isinstance(module, nn.Embedding) and module is self.model.get_input_embeddings():
            self._add(name, RowwiseParallel(), "vocabulary split; AllReduce")
        elif module is self.head and isinstance(module, nn.Linear):
            output = Shard(-1) if self.training else Replicate()
            style = ColwiseParallel(input_layouts=sequence, output_layouts=output, keep_gathered=self.keep)
            self._add(name, style, "vocabulary split; AllGather-GEMM" if self.training else "vocabulary split; logits gathered")
        elif _is_norm(module):
            parent = self.model.get_submodule(name.rpartition(".")[0])
            if _children(parent, _ATTENTIONS):
                if module.weight.shape == (getattr(parent, "head_dim", None),):
                    self._add(name, _Replicated(by_heads=True), "replicated; gradients summed over heads")
            elif self.training:
                self._add(name, SequenceParallel(), "part of the sequence; gradients summed")
            else:
                self._add(name, _Replicated(by_heads=False), "replicated")

    def _add(self, name: str, style: ParallelStyle, words: str) -> None:
        if not isinstance(style, (SequenceParallel, _Replicated)):
            try:
                style.check(self.model.get_submodule(name), self.comm.world_size)
            except OperandError as error:
                raise OperandError(f"{name}: {error}") from None
        self.rows.append(_Row(name, style, words))

    def _columns_and_row(self, name: str, module: nn.Module, columns: tuple[str, ...], row: str, features: dict[str, slice]) -> None:
        whole = "".join(f"; {column} whole, its heads shared" for column in features)
        if self.training:
            style = Fused(*columns, keep_gathered=self.keep, features=features)
            self._add(name, style, f"{', '.join(columns)} in one AllGather-GEMM{whole}")
        elif len(columns) > 1 and is_known(self.model.get_submodule(name.rpartition(".")[0])):
            style = Fused(*columns, input_layouts=Replicate(), features=features)
            self._add(name, style, f"{', '.join(columns)} of one input; GEMMs{whole}")
        else:
            for column in columns:
                part = "its heads shared" if column in features else "output features split"
                self._add(f"{name}.{column}", ColwiseParallel(features=features.get(column)), f"{part}; GEMM")
        output = Shard(1) if self.training else Replicate()
        op = "GEMM-ReduceScatter" if self.training else "GEMM-AllReduce"
        self._add(f"{name}.{row}", RowwiseParallel(output_layouts=output), f"input features split; {op}")

    def _heads(self, name: str, module: nn.Module) -> dict[str, slice]:
        """The features of keys and values that this rank uses, where their heads are fewer than the ranks; the groups that it reads."""
        size = module.head_dim
        count, kv = (getattr(module, layer).out_features // size for layer in ("q_proj", "k_proj"))
        try:
            heads = self.comm.heads(count, kv)
        except OperandError as error:
            raise OperandError(f"{name}: {error}") from None
        own, group = heads.kv.stop - heads.kv.start, count // self.comm.world_size // (heads.kv.stop - heads.kv.start)
        if heads.reads != [head // max(1, group) for head in range(count // self.comm.world_size)]:
            raise OperandError(
                f"{name}: {kv} key and value heads over {self.comm.world_size} ranks: neither divides the other, "
                "so heads are read unevenly; choose another number of ranks"
            )
        self.groups.append((module, group))
        if own * self.comm.world_size == kv:
            return {}
        return dict.fromkeys(("k_proj", "v_proj"), slice(heads.kv.start * size, heads.kv.stop * size))

    def _whole_heads(self, name: str, module: nn.Module) -> dict[str, slice]:
        heads = module.query_key_value.out_features // (3 * module.head_size)
        if heads % self.comm.world_size:
            raise OperandError(f"{name}: {heads} heads over {self.comm.world_size} ranks: each takes as many, choose another number of ranks")
        return {}

    def borders(self, mesh: DeviceMesh) -> None:
        """What lies between whole tensors of the caller and parts of the ranks."""
        for attention, group in self.groups:
            attention.num_key_value_groups = group
        if not self.training:
            fused = {id(row) for row in fuse_residuals(self.layers, self.final_norm)}
            self.rows = [
                row._replace(words=f"{row.words} with residual and norm") if id(self.model.get_submodule(row.module)) in fused else row
                for row in self.rows
            ]
            if is_known_stack(self.stack, self.layers):
                self.split_rows = self.split_rows or least_rows(self.layers[0], self.comm)
                split_rows(self.stack, self.layers, self.final_norm, self.comm, self.split_rows)
            return
        world, model = self.comm.world_size, self.model

        def split(layer: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            own = lambda x: _own_rows(x, mesh, world)
            return ((own(args[0]), *args[1:]), named) if args else (args, named | {"hidden_states": own(named["hidden_states"])})

        self.layers[0].register_forward_pre_hook(split, with_kwargs=True)
        if self.head is None:
            self.final_norm.register_forward_hook(lambda norm, args, y: arrange(y, mesh, Shard(1), Replicate()))
            return
        model.loss_function = partial(causal_lm_loss, mesh=mesh)
        model.register_forward_pre_hook(_refuse_parts, with_kwargs=True)
        self.head.register_forward_hook(lambda head, args, y: _as_dtensor(y, mesh))

    def table(self) -> str:
        """What became what, a line for each kind of layer."""
        found: dict[tuple[str, str], int] = {}
        for row in self.rows:
            key = ".".join("*" if part.isdigit() else part for part in row.module.split(".")), row.words
            found[key] = found.get(key, 0) + 1
        lines = [(name, str(count), words) for (name, words), count in found.items()]
        stay = {".".join("*" if part.isdigit() else part for part in name.split(".")) for name in self.unknown}
        lines += [(name, "", "stays as it is") for name in sorted(stay)]
        title = f"{type(self.model).__name__} on {self.comm.world_size} ranks, for {'training' if self.training else 'inference'}"
        width = max(len(name) for name, _, _ in lines)
        lines = [f"  {name:{width}} {count:>4}  {words}" for name, count, words in lines]
        if not self.training and self.split_rows is not None and self.split_rows <= self.comm.max_m:
            lines.append(f"  from {self.split_rows} rows on each rank has its part of them between layers: AllGather-GEMM and GEMM-ReduceScatter")
        return "\n".join([title, *lines])


def _own_rows(x: Tensor, mesh: DeviceMesh, world: int) -> Tensor:
    if x.shape[1] % world:
        padded = -(-x.shape[1] // world) * world
        raise OperandError(
            f"the sequence has {x.shape[1]} tokens, and {world} ranks have equal parts of it: pad tokens to {padded}, and labels with -100"
        )
    return arrange(x, mesh, Replicate(), Shard(1))


def _as_dtensor(logits: Tensor, mesh: DeviceMesh) -> Tensor:
    # A compiled backward pass refuses a DTensor among the model's results that has no gradient.
    return logits if torch.compiler.is_compiling() else present(logits, mesh, Shard(-1), Shard(-1), use_local=False)


def _refuse_parts(model: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    if not isinstance(keep := named.get("logits_to_keep", 0), int) or keep:
        raise OperandError("logits_to_keep: in training each rank has its part of the sequence, leave it out, or parallelize with mode='inference'")


def _children(module: nn.Module, kinds: tuple[tuple[tuple[str, ...], str], ...]) -> tuple[tuple[str, ...], str] | None:
    """Which of the kinds of layers a module has as children."""
    children = dict(module.named_children())
    for columns, row in kinds:
        if all(isinstance(children.get(name), nn.Linear) for name in (*columns, row)):
            return columns, row
    return None


def _is_norm(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return "Norm" in type(module).__name__ and bool(parameters) and all(parameter.ndim == 1 for parameter in parameters)


def _parameters(module: nn.Module, style: ParallelStyle) -> Iterator[nn.Parameter]:
    """The parameters that a style places."""
    for part in [module.get_submodule(name) for name in style.layers] if isinstance(style, Fused) else [module]:
        yield from part.parameters()
