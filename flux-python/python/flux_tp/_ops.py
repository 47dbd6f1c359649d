"""The ops, for tensors of PyTorch and arrays of NumPy."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import prod
from typing import Any, Literal, TypeVar, overload

from . import _comm, _native
from .errors import OperandError

__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "prepare"]

Operand = TypeVar("Operand")
"""A torch.Tensor or a numpy.ndarray."""

ACTIVATIONS = {name: number for number, name in enumerate(_native.activations())}
# Numbers of the activations with gates.
GATED = frozenset(number for name, number in ACTIVATIONS.items() if "glu" in name)

MAX_WEIGHTS = _native.max_weights()

# Set by `_torch`: its module and torch's Tensor.
_torch: Any = None
_Tensor: Any = ()


@overload
def all_gather_matmul(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    activation: str | None = None,
    group: _comm.Communicator | None = None,
    return_gathered: Literal[False] = False,
    *,
    m: int | None = None,
    n: int | None = None,
    sequence_dim: int = 0,
    keep_gathered: bool = False,
    out: Operand | None = None,
) -> Operand: ...
@overload
def all_gather_matmul(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    activation: str | None = None,
    group: _comm.Communicator | None = None,
    *,
    return_gathered: Literal[True],
    m: int | None = None,
    n: int | None = None,
    sequence_dim: int = 0,
    keep_gathered: bool = False,
    out: tuple[Operand, Operand] | None = None,
) -> tuple[Operand, Operand]: ...
@overload
def all_gather_matmul(
    x: Operand,
    weight: Sequence[Operand],
    bias: Sequence[Operand] | None = None,
    activation: str | None = None,
    group: _comm.Communicator | None = None,
    return_gathered: bool = False,
    *,
    m: int | None = None,
    n: Sequence[int] | None = None,
    sequence_dim: int = 0,
    keep_gathered: bool = False,
    out: tuple[Operand, ...] | None = None,
) -> tuple[Operand, ...]: ...
def all_gather_matmul(
    x: Any,
    weight: Any,
    bias: Any = None,
    activation: str | None = None,
    group: Any = None,
    return_gathered: bool = False,
    *,
    m: int | None = None,
    n: Any = None,
    sequence_dim: int = 0,
    keep_gathered: bool = False,
    out: Any = None,
) -> Any:
    """``activation(gather(x) @ weight.T + bias)``: a column-parallel linear layer whose input is split by rows.

    Args:
        x: ``[m_r, k]``, this rank's rows. More dimensions are taken as rows.
        weight: ``[n_r, k]``, this rank's columns. ``n_r`` and ``k`` are multiples of 8. It may be the transposed
            view ``w.t()`` of a ``w`` of ``[k, n_r]``, which is read as it is stored. A list or tuple of 2 to 4 weights, such as
            those of queries, keys and values, shares one gather of ``x``. Each has an ``n_r`` of its own, and none is a view.
        bias: ``[n_r]``. Of several weights a list of as many, or ``None``.
        activation: ``gelu`` (tanh form), ``silu`` or ``relu``, applied in fp32. ``geglu``, ``swiglu`` and ``reglu`` also
            multiply: ``act(gate) * up``, with the gates in the first half of this rank's ``n_r`` rows of ``weight`` and
            ``bias``, and their ups in the second; with ``_interleaved`` behind the name, each gate before its up.
            This rank has ``group.features(n // 2)`` of the gates
            and of the ups, and the result is ``[m, n_r/2]``.
        group: the communicator; the first that :func:`flux_tp.init` made.
        m: rows of all ranks together, where ranks have different numbers of rows: rank ``r`` has those that
            ``torch.tensor_split`` cuts for it. ``None``: ``W`` times the rows of ``x``.
        n: columns of all ranks together, where ranks have different numbers of columns: each has those of
            :meth:`flux_tp.Communicator.features`. ``None``: ``W`` times those of this rank. Of several weights a list of as many.
        sequence_dim: the dimension of ``x`` and of the result that is split over the ranks: 1 of a batch-first ``[b, s_r, k]``,
            which is copied, and whose result ``[b, s, n_r]`` is a transposed view.
        return_gathered: whether the gathered ``x`` is returned, too. It has no gradient.
        keep_gathered: whether autograd keeps the gathered ``x`` for the gradient of ``weight``, ``[m, k]`` in place of
            ``[m_r, k]``. The backward pass then gathers nothing. Nothing is kept where ``weight`` needs none. The same on every rank.
        out: where the result goes, ``[m, n_r]``. With ``return_gathered`` a pair of both results. Of several weights a tuple of
            all results.

    All operands are bfloat16, or all float16, in row-major order with 16-byte aligned rows. They are on the
    communicator's device.

    Returns:
        ``[m, n_r]``, or with gates ``[m, n_r/2]``: all rows of this rank's columns, from torch's allocator on torch's current stream. With
        ``return_gathered`` a pair ``(y, x_full)``, where ``x_full`` is ``[m, k]``, the rows of all ranks. Of several weights a
        tuple with a ``y`` for each, and ``x_full`` behind them.

    Raises:
        OperandError: a shape, dtype, device or layout that does not fit; nothing was launched.
        BuildError, DisagreedError: on the first call of a shape.
        PeerLostError, PeerLeftError, TimeoutError, AbortedError: see :mod:`flux_tp.errors`.
    """
    _check_extents(m=m)
    comm, number = _comm.chosen(group), _number(activation)
    backend = _backend(x)
    dim = _sequence_dim(x, sequence_dim, out)
    x = _swapped(x, dim)
    # Arrays of NumPy have no gradients.
    kept = {"keep": keep_gathered} if backend is _torch else {}
    if isinstance(weight, (list, tuple)):
        weight, bias, n = _several(weight, bias, n, out, number, return_gathered)
        results = backend.run_several(x, weight, bias, comm, out, activation=number, m=m, columns=n, gathered=return_gathered, **kept)
        return _swapped(results, dim)
    _check_extents(n=n)
    if return_gathered:
        _check_pair(out, "return_gathered", "(y, x_full)")
    kept |= {"activation": number, "m": m, "split": n, "gathered": return_gathered}
    return _swapped(backend.run("all_gather_matmul", x, weight, bias, comm, out, **kept), dim)


@overload
def matmul_reduce_scatter(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    residual: Operand | None = None,
    norm: None = None,
    group: _comm.Communicator | None = None,
    out: Operand | None = None,
    *,
    k: int | None = None,
    partials: str | None = None,
    sequence_dim: int = 0,
) -> Operand: ...
@overload
def matmul_reduce_scatter(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    residual: Operand | None = None,
    *,
    norm: tuple[Operand, float],
    group: _comm.Communicator | None = None,
    out: tuple[Operand, Operand] | None = None,
    k: int | None = None,
    partials: str | None = None,
    sequence_dim: int = 0,
) -> tuple[Operand, Operand]: ...
def matmul_reduce_scatter(
    x: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    norm: Any = None,
    group: Any = None,
    out: Any = None,
    *,
    k: int | None = None,
    partials: str | None = None,
    sequence_dim: int = 0,
) -> Any:
    """``scatter(sum over ranks of x @ weight.T) + bias + residual``: a row-parallel linear layer whose output is split by rows.

    Args:
        x: ``[m, k_r]``, this rank's part of the inner dimension. More dimensions are taken as rows.
        weight: ``[n, k_r]``, or its transposed view. ``n`` and ``k_r`` are multiples of 8.
        bias: ``[n]``, the same on every rank.
        residual: ``[m_r, n]``, added in fp32 before the one rounding. ``out`` may be the same memory.
        norm: ``(gain, eps)`` of an RMSNorm of the result's rows, with a gain of ``[n]``. It has no gradient.
        group: the communicator; the first that :func:`flux_tp.init` made.
        out: where the result goes, ``[m_r, n]``. With a norm a pair of both results.
        k: the inner dimension of all ranks together, where ranks have different parts of it: each has that of
            :meth:`flux_tp.Communicator.features`. ``None``: ``W`` times that of this rank.
        partials: ``float32`` sends partial sums in fp32, twice the bytes: the result is rounded once, and no fp16 partial
            sum overflows where the total does not. ``None``: in the operands' dtype. The same on every rank.
        sequence_dim: the dimension of ``x``, ``residual`` and the result that is split over the ranks, as in
            :func:`all_gather_matmul`: 1 of a batch-first ``[b, s, k_r]``, whose result is ``[b, s_r, n]``.

    Returns:
        ``[m_r, n]``: this rank's rows of the sum, as ``torch.tensor_split`` cuts ``m`` rows. With a norm a pair
        ``(y, y_norm)``, where ``y_norm`` is ``y / sqrt(mean(y**2) + eps) * gain`` of each row, rounded once.

    Dtypes, layouts and errors are those of :func:`all_gather_matmul`.
    """
    return _row_parallel("matmul_reduce_scatter", x, weight, bias, residual, norm, group, out, k, partials, sequence_dim)


@overload
def matmul_all_reduce(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    residual: Operand | None = None,
    norm: None = None,
    group: _comm.Communicator | None = None,
    out: Operand | None = None,
    *,
    k: int | None = None,
    partials: str | None = None,
) -> Operand: ...
@overload
def matmul_all_reduce(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    residual: Operand | None = None,
    *,
    norm: tuple[Operand, float],
    group: _comm.Communicator | None = None,
    out: tuple[Operand, Operand] | None = None,
    k: int | None = None,
    partials: str | None = None,
) -> tuple[Operand, Operand]: ...
def matmul_all_reduce(
    x: Any,
    weight: Any,
    bias: Any = None,
    residual: Any = None,
    norm: Any = None,
    group: Any = None,
    out: Any = None,
    *,
    k: int | None = None,
    partials: str | None = None,
) -> Any:
    """``sum over ranks of x @ weight.T, + bias + residual``: a row-parallel linear layer whose output every rank has whole.

    Args:
        x: ``[m, k_r]``, this rank's part of the inner dimension. More dimensions are taken as rows.
        weight: ``[n, k_r]``, or its transposed view. ``n`` and ``k_r`` are multiples of 8.
        bias: ``[n]``, the same on every rank.
        residual: ``[m, n]``, the same on every rank, as for :func:`matmul_reduce_scatter`.
        norm: ``(gain, eps)``, the same on every rank, as for :func:`matmul_reduce_scatter`.
        group: the communicator; the first that :func:`flux_tp.init` made.
        out: where the result goes, ``[m, n]``. With a norm a pair of both results.
        k, partials: as for :func:`matmul_reduce_scatter`.

    Returns:
        ``[m, n]``, with the same bits on every rank. With a norm a pair ``(y, y_norm)``.

    Dtypes, layouts and errors are those of :func:`all_gather_matmul`.
    """
    return _row_parallel("matmul_all_reduce", x, weight, bias, residual, norm, group, out, k, partials)


def prepare(
    op: str,
    n: int | Sequence[int],
    k: int,
    *,
    rows: Sequence[int] = (),
    dtype: Any = "bfloat16",
    transposed: bool = False,
    bias: bool = False,
    activation: str | None = None,
    residual: bool = False,
    eps: float | None = None,
    partials: str | None = None,
    group: _comm.Communicator | None = None,
) -> None:
    """Builds an op before its first call. Collective.

    Args:
        op: the op's name, as ``all_gather_matmul``.
        n, k: output features and inner dimension, both global. Of several weights ``n`` is a list of those of each.
        rows: numbers ``m`` of rows whose calls are to be captured in CUDA graphs: captured calls build nothing.
        dtype: ``bfloat16`` or ``float16``: a name, or a dtype of torch or NumPy.
        transposed: whether the weight of calls is a transposed view, as in :func:`all_gather_matmul`.
        bias: whether calls have one.
        activation: as in :func:`all_gather_matmul`.
        residual: whether calls have one, as in :func:`matmul_reduce_scatter`.
        eps: that of the norm, where calls have one.
        partials: as in :func:`matmul_reduce_scatter`.
        group: the communicator; the first that :func:`flux_tp.init` made.
    """
    comm, number = _comm.chosen(group), _number(activation)
    if isinstance(n, (list, tuple)):
        if op != "all_gather_matmul":
            raise OperandError(f"n is a {type(n).__name__}, and {op} takes one weight: give a number")
        columns = _lists(n, "n", len(n))
        _check_several("n", n, number)
    else:
        _check_extents(n=n)
        columns = [n]
    _check_extents(k=k)
    of = (_dtype_name(dtype), transposed, bias, residual, number, eps, partials_number(partials) != 0)
    _native.prepare(comm.id, op, (columns, k), of, list(rows))


def _row_parallel(
    op: str,
    x: Any,
    weight: Any,
    bias: Any,
    residual: Any,
    norm: Any,
    group: Any,
    out: Any,
    k: int | None,
    partials: Any,
    sequence_dim: int = 0,
) -> Any:
    _check_extents(k=k)
    if isinstance(weight, (list, tuple)):
        raise OperandError(f"weight is a {type(weight).__name__} of {len(weight)}: all_gather_matmul alone takes several weights")
    if norm is not None:
        _check_norm(norm, out)
    comm, number = _comm.chosen(group), partials_number(partials)
    backend = _backend(x)
    dim = _sequence_dim(x, sequence_dim, out)
    x, residual = _swapped(x, dim), _swapped(residual, dim)
    return _swapped(backend.run(op, x, weight, bias, comm, out, split=k, residual=residual, norm=norm, partials=number), dim)


def _several(weights: Any, biases: Any, columns: Any, out: Any, activation: int, gathered: bool) -> tuple[list, list, list]:
    """Several weights, a bias or ``None`` and ``n`` or ``None`` for each."""
    count = len(weights)
    _check_several("weight", weights, activation)
    results = count + gathered
    if out is not None and not (isinstance(out, tuple) and len(out) == results):
        found = f"has {len(out)} elements" if isinstance(out, tuple) else f"is a {type(out).__name__}"
        names = ", ".join([*(f"y{index}" for index in range(count)), *["x_full"] * gathered])
        raise OperandError(f"out {found}: there are {results} results, so give a tuple ({names})")
    return list(weights), _lists(biases, "bias", count), _lists(columns, "n", count)


def _check_several(name: str, given: Sequence[Any], activation: int) -> None:
    found = f"{name} is a {type(given).__name__} of {len(given)}"
    if not 2 <= len(given) <= MAX_WEIGHTS:
        raise OperandError(f"{found}: an op takes 2 to {MAX_WEIGHTS} weights, or one that is in no list; give more in several calls")
    if activation in GATED:
        raise OperandError(f"activation = {list(ACTIVATIONS)[activation]!r}: gates take one weight, and {found}: give none, gelu, silu or relu")


def _lists(of: Any, name: str, count: int) -> list:
    """Optional values of ``count`` weights: all or none."""
    if of is None:
        return [None] * count
    if not isinstance(of, (list, tuple)) or len(of) != count:
        found = f"has {len(of)} elements" if isinstance(of, (list, tuple)) else f"is a {type(of).__name__}"
        raise OperandError(f"{name} {found}, and there are {count} weights: give a list of {count}, or None")
    for index, value in enumerate(of):
        if value is None:
            raise OperandError(f"{name}[{index}] is None: give one for each weight, or None in place of the list")
        if name == "n":
            _check_extents(**{f"n[{index}]": value})
    return list(of)


def _check_extents(**extents: int | None) -> None:
    for name, extent in extents.items():
        if extent is None:
            continue
        try:
            negative = extent < 0
        except TypeError:
            raise OperandError(f"{name} is a {type(extent).__name__}: give a number from 0 on") from None
        if negative:
            raise OperandError(f"{name} = {extent}: give a number from 0 on")


def check_gates(name: str, n: int, world: int) -> None:
    """Refuses gates and ups that the ranks cannot split: each has 8 of both at least."""
    padded = 16 * max(-(-n // 16), world)
    if n != padded:
        raise OperandError(f"{name} = {n}: gates and ups are split over {world} ranks in groups of 16; pad them to {padded}")


def _check_norm(norm: Any, out: Any) -> None:
    if not (isinstance(norm, tuple) and len(norm) == 2 and isinstance(norm[1], (int, float))):
        raise OperandError(f"norm is a {type(norm).__name__}: give a tuple (gain, eps) of an operand and a number")
    _check_pair(out, "a norm", "(y, y_norm)")


def _check_pair(out: Any, why: str, pair: str) -> None:
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise OperandError(f"out is a {type(out).__name__}: with {why} there are two results, so give a tuple {pair}")


def as_rows(residual: Any, lead: Sequence[int]) -> Any:
    """A residual as rows, for an ``x`` whose dimensions but the last are ``lead``. Each rank has its own first of them."""
    if residual is None or len(residual.shape) != len(lead) + 1:
        return residual
    if tuple(residual.shape[1:-1]) != tuple(lead[1:]):
        raise OperandError(f"residual is {list(residual.shape)}, and x is [{', '.join(map(str, lead))}, k_r]: only the first may differ")
    return residual.reshape(prod(residual.shape[:-1]), residual.shape[-1])


def _sequence_dim(x: Any, dim: int, out: Any) -> int:
    """The dimension that the ranks share, from 0 on."""
    dims = len(x.shape)
    if not -dims <= dim < dims or (dim % dims == dims - 1 and dim):
        raise OperandError(f"sequence_dim = {dim}: x has {dims} dimensions, of which all but the last may be split over the ranks")
    dim %= dims
    if dim and out is not None:
        raise OperandError(f"sequence_dim = {dim} with out=: results that the caller places have rows by the first dimension, leave one out")
    return dim


def _swapped(of: Any, dim: int) -> Any:
    """The shared dimension in the first place, or back there; a view."""
    if not dim or of is None:
        return of
    return tuple(_swapped(part, dim) for part in of) if isinstance(of, tuple) else of.swapaxes(0, dim)


def results_lead(op: str, lead: Sequence[int], m: int | None, comm: _comm.Communicator) -> tuple[int, ...]:
    """The dimensions but the last of a result, for an ``x`` whose dimensions but the last are ``lead``."""
    if len(lead) < 2 or op == "matmul_all_reduce":
        return tuple(lead)
    (first, *others), world = lead, comm.world_size
    each = prod(others)
    if op == "all_gather_matmul":
        if m is not None and each == 1:
            return (m, *others)
        if m is not None and m != world * first * each:
            raise OperandError(f"m = {m}: x is [{', '.join(map(str, lead))}, k], and {world} ranks with as many rows have {world * first * each}: give x as [rows, k]")
        return (world * first, *others)
    if each > 1 and first % world:
        padded = -(-first // world) * world
        shape = ", ".join(map(str, lead))
        raise OperandError(f"x is [{shape}, k_r]: its first dimension is split over {world} ranks, pad it to {padded}, or give x as [rows, k_r]")
    return (shard_rows(comm, first), *others)


def shard_rows(comm: _comm.Communicator, m: int) -> int:
    """The rows of this rank, of ``m``."""
    return m // comm.world_size + (comm.rank < m % comm.world_size)


def _dtype_name(dtype: Any) -> str:
    return getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")


def partials_number(partials: Any) -> int:
    """The number by which ops take a type of partial sums."""
    if partials is None:
        return 0
    if _dtype_name(partials) != "float32":
        raise OperandError(f"partials = {partials!r}: give 'float32', or None for the operands' dtype")
    return 1


def _number(activation: str | None) -> int:
    if activation is None:
        return 0
    number = ACTIVATIONS.get(activation)
    if number is None:
        raise OperandError(f"activation = {activation!r}: there are {', '.join(ACTIVATIONS)}")
    return number


def columns(activation: int, n: int) -> int:
    """Columns of a result, for ``n`` rows of the weight."""
    return n // 2 if activation in GATED else n


def _backend(x: Any) -> Any:
    if isinstance(x, _Tensor):
        return _torch
    if hasattr(x, "__array_interface__"):
        from . import _numpy

        return _numpy
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        from . import _torch as backend

        return backend
    raise OperandError(f"x is a {type(x).__name__}: give a torch.Tensor or a numpy.ndarray")
