"""The ops in torch's dispatcher: kernels, and fake kernels for torch.compile.

Invariant: an op's result is allocated by torch on torch's current stream, and the ops exist once a process.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.graph import increment_version

from . import _native, _ops
from ._comm import known
from .errors import FluxError, OperandError

__all__ = ["call", "calls", "gather_for_several", "out_calls", "own_error", "pair_calls", "pair_out_calls"]

_NEEDED = (2, 10)


def _register() -> None:
    found = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if found < _NEEDED:
        raise FluxError(f"torch is {torch.__version__}: flux_tp needs torch {_NEEDED[0]}.{_NEEDED[1]} or later")
    libraries = Path(torch.__file__).parent / "lib"
    cuda = libraries / "libtorch_cuda.so"
    _native.register_torch(str(libraries / "libtorch_cpu.so"), str(cuda) if cuda.exists() else None)


_register()
_packets = {name: getattr(torch.ops.flux_tp, name) for name in ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")}
calls = {name: packet.default for name, packet in _packets.items()}
out_calls = {name: packet.out for name, packet in _packets.items()}
# With a second result: the gathered rows, or the normalised ones.
pair_calls = {name: packet.gathered if name == "all_gather_matmul" else packet.norm for name, packet in _packets.items()}
pair_out_calls = {name: packet.gathered_out if name == "all_gather_matmul" else packet.norm_out for name, packet in _packets.items()}

# By the number of weights. Results go where the caller says, and the gathered rows may.
_several = {count: getattr(_packets["all_gather_matmul"], f"weights{count}") for count in range(2, _ops.MAX_WEIGHTS + 1)}


def gather_for_several(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    activation: int,
    m: int,
    columns: list[int],
    comm: int,
    outs: list[Tensor] | None = None,
    x_full: Tensor | None = None,
) -> list[Tensor]:
    """One gather of ``x`` for several weights: their results, which are new where no ``outs`` are given."""
    outs = [x.new_empty(m, weight.shape[0]) for weight in weights] if outs is None else outs
    named = {f"out{index}": out for index, out in enumerate(outs)}
    _several[len(weights)](x, *weights, *biases, activation, m, *columns, comm, **named, x_full=x_full)
    return outs


_library = torch.library.Library("flux_tp", "FRAGMENT")


def _count_versions(written: OpOverload) -> None:
    """Has autograd hear of what an overload writes: a backward pass that needs the old values then refuses."""
    names = [argument.name for argument in written._schema.arguments if argument.alias_info is not None]

    def kernel(keyset, *arguments, **outs):
        increment_version([outs[name] for name in names if outs.get(name) is not None])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return written.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *arguments, **outs)

    _library.impl(written.name(), kernel, "ADInplaceOrView", with_keyset=True)


for _written in (*out_calls.values(), *pair_out_calls.values(), *_several.values()):
    _count_versions(_written)


def _one_device(x: Tensor, **operands: Tensor | None) -> None:
    # The fake kernels are also those of the meta device: torch calls them if one operand is there.
    for name, tensor in operands.items():
        if tensor is not None and tensor.device != x.device:
            raise OperandError(f"{name} is on {tensor.device}, and x on {x.device}: move it there")


def _all_rows(x: Tensor, m: int, comm: int) -> int:
    return x.shape[0] * known(comm).world_size if isinstance(m, int) and m == -1 else m


@torch.library.register_fake("flux_tp::all_gather_matmul")
def _(x, weight, bias, activation, m, n, comm):
    _one_device(x, weight=weight, bias=bias)
    return x.new_empty(_all_rows(x, m, comm), _ops.columns(activation, weight.shape[0]))


@torch.library.register_fake("flux_tp::all_gather_matmul.gathered")
def _(x, weight, bias, activation, m, n, comm):
    _one_device(x, weight=weight, bias=bias)
    rows = _all_rows(x, m, comm)
    return x.new_empty(rows, _ops.columns(activation, weight.shape[0])), x.new_empty(rows, x.shape[1])


@torch.library.register_fake("flux_tp::all_gather_matmul.gathered_out")
def _(x, weight, bias, activation, m, n, comm, *, out, x_full):
    _one_device(x, weight=weight, bias=bias, out=out, x_full=x_full)


@torch.library.register_fake("flux_tp::all_gather_matmul.out")
def _(x, weight, bias, activation, m, n, comm, *, out):
    _one_device(x, weight=weight, bias=bias, out=out)


def _register_several(count: int) -> None:
    """Registers the fake kernel of an op with so many weights."""

    @torch.library.register_fake(f"flux_tp::all_gather_matmul.weights{count}")
    def _(x, *arguments, x_full, **outs):
        named = {"weight": arguments[:count], "bias": arguments[count : 2 * count], "out": outs.values()}
        operands = {f"{name}[{index}]": tensor for name, tensors in named.items() for index, tensor in enumerate(tensors)}
        _one_device(x, **operands, x_full=x_full)


for _count in _several:
    _register_several(_count)


def _register_fakes(op: str, rows: Callable[[Tensor, int], int]) -> None:
    """Registers the fake kernels of a row-parallel op, whose result has so many rows."""

    @torch.library.register_fake(f"flux_tp::{op}")
    def _(x, weight, bias, residual, k, partials, comm):
        _one_device(x, weight=weight, bias=bias, residual=residual)
        return x.new_empty(rows(x, comm), weight.shape[0])

    @torch.library.register_fake(f"flux_tp::{op}.out")
    def _(x, weight, bias, residual, k, partials, comm, *, out):
        _one_device(x, weight=weight, bias=bias, residual=residual, out=out)

    @torch.library.register_fake(f"flux_tp::{op}.norm")
    def _(x, weight, bias, residual, gain, eps, k, partials, comm):
        _one_device(x, weight=weight, bias=bias, residual=residual, gain=gain)
        shape = (rows(x, comm), weight.shape[0])
        return x.new_empty(shape), x.new_empty(shape)

    @torch.library.register_fake(f"flux_tp::{op}.norm_out")
    def _(x, weight, bias, residual, gain, eps, k, partials, comm, *, out, out_norm):
        _one_device(x, weight=weight, bias=bias, residual=residual, gain=gain, out=out, y_norm=out_norm)


_register_fakes("matmul_reduce_scatter", lambda x, comm: _ops.shard_rows(known(comm), x.shape[0]))
_register_fakes("matmul_all_reduce", lambda x, comm: x.shape[0])


def own_error(error: RuntimeError) -> RuntimeError:
    """The exception of flux_tp behind one of torch's, which has its message alone."""
    return error if isinstance(error, FluxError) else _native.take_error(str(error)) or error


def call(overload: Any, *arguments: Any) -> Any:
    """A call inside a backward pass, of one of the overloads above."""
    try:
        return overload(*arguments)
    except RuntimeError as error:
        raise own_error(error) from None
