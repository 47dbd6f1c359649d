"""The ops, for tensors of PyTorch and arrays of NumPy."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, Literal, TypeVar, overload

from . import _native
from ._arguments import (
    INPUTS,
    activation_number,
    as_rows,
    check_extents,
    check_norm,
    check_pair,
    check_several,
    dtype_name,
    lists,
    named,
    partials_number,
    results_lead,
    sequence_dimension,
    swapped,
)
from ._comm import Communicator, chosen
from .errors import OperandError

__all__ = ["all_gather_matmul", "matmul_all_reduce", "matmul_reduce_scatter", "prepare"]

Operand = TypeVar("Operand")
"""A torch.Tensor or a numpy.ndarray."""


@overload
def all_gather_matmul(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    activation: str | None = None,
    group: Communicator | None = None,
    return_gathered: Literal[False] = False,
    *,
    m: int | None = None,
    n: int | None = None,
    sequence_dim: int = 0,
    keep_gathered: bool = False,
    out: Operand | None = None,
    scale_a: Operand | None = None,
    scale_b: Operand | None = None,
    out_dtype: Any = None,
) -> Operand: ...
@overload
def all_gather_matmul(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    activation: str | None = None,
    group: Communicator | None = None,
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
    group: Communicator | None = None,
    return_gathered: bool = False,
    *,
    m: int | None = None,
    n: Sequence[int] | None = None,
    sequence_dim: int = 0,
    keep_gathered: bool = False,
    out: tuple[Operand, ...] | None = None,
    scale_a: Operand | None = None,
    scale_b: Sequence[Operand] | None = None,
    out_dtype: Any = None,
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
    scale_a: Any = None,
    scale_b: Any = None,
    out_dtype: Any = None,
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
            :meth:`flux_tp.Communicator.features`, of 8-bit operands with its ``multiple``. ``None``: ``W`` times those of this rank.
            Of several weights a list of as many.
        sequence_dim: the dimension of ``x`` and of the result that is split over the ranks: 1 of a batch-first ``[b, s_r, k]``,
            which is copied, and whose result ``[b, s, n_r]`` is a transposed view.
        return_gathered: whether the gathered ``x`` is returned, too. It has no gradient.
        keep_gathered: whether autograd keeps the gathered ``x`` for the gradient of ``weight``, ``[m, k]`` in place of
            ``[m_r, k]``. The backward pass then gathers nothing. Nothing is kept where ``weight`` needs none. The same on every rank.
        out: where the result goes, ``[m, n_r]``. With ``return_gathered`` a pair of both results. Of several weights a tuple of
            all results.
        scale_a, scale_b: fp32 scales of ``x`` and of ``weight``, which are ``torch.float8_e4m3fn`` then, in the shapes of
            ``torch._scaled_mm``: one element each; of rows ``[m_r, 1]`` and ``[1, n_r]``; of blocks ``[m_r, k/128]`` and
            ``[n_r/128, k/128]``. ``n_r`` and ``k`` are multiples of 16, with blocks of 128. Of several weights ``scale_b`` is a
            list. Rows travel with their scales: those of :func:`flux_tp.quantize_rows` lie so, others are copied. No gradients.
        out_dtype: dtype of the result, ``bias`` and ``out`` of such operands: ``torch.bfloat16``, which is the default, or
            ``torch.float16``.

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
    check_extents(m=m)
    comm, number = chosen(group), activation_number(activation)
    several = isinstance(weight, (list, tuple))
    if several:
        check_several("weight", weight, number, out, return_gathered)
        weights, biases, columns = list(weight), lists(bias, "bias", len(weight)), lists(n, "n", len(weight))
    else:
        check_extents(n=n)
        if return_gathered:
            check_pair(out, "return_gathered", "(y, x_full)")
        weights, biases, columns = _one(weight, bias, n)
    options = {"activation": number, "m": m, "second": "x_full" if return_gathered else None, "keep": keep_gathered, "several": several}
    options |= {"scale_a": scale_a, "scale_b": scale_b, "out_dtype": out_dtype}
    return _run("all_gather_matmul", comm, x, weights, {"bias": biases}, columns, out, sequence_dim, **options)


@overload
def matmul_reduce_scatter(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    residual: Operand | None = None,
    norm: None = None,
    group: Communicator | None = None,
    out: Operand | None = None,
    *,
    k: int | None = None,
    partials: str | None = None,
    sequence_dim: int = 0,
    scale_a: Operand | None = None,
    scale_b: Operand | None = None,
    out_dtype: Any = None,
) -> Operand: ...
@overload
def matmul_reduce_scatter(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    residual: Operand | None = None,
    *,
    norm: tuple[Operand, float],
    group: Communicator | None = None,
    out: tuple[Operand, Operand] | None = None,
    k: int | None = None,
    partials: str | None = None,
    sequence_dim: int = 0,
    scale_a: Operand | None = None,
    scale_b: Operand | None = None,
    out_dtype: Any = None,
) -> tuple[Operand, Operand]: ...
@overload
def matmul_reduce_scatter(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    residual: Operand | None = None,
    *,
    norm: tuple[Operand, float],
    norm_scales: str | Operand,
    norm_carried: bool = True,
    group: Communicator | None = None,
    out: Operand | None = None,
    k: int | None = None,
    partials: str | None = None,
    sequence_dim: int = 0,
    scale_a: Operand | None = None,
    scale_b: Operand | None = None,
    out_dtype: Any = None,
) -> tuple[Operand, Operand, Operand]: ...
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
    scale_a: Any = None,
    scale_b: Any = None,
    out_dtype: Any = None,
    norm_scales: Any = None,
    norm_carried: bool = True,
) -> Any:
    """``scatter(sum over ranks of x @ weight.T) + bias + residual``: a row-parallel linear layer whose output is split by rows.

    Args:
        x: ``[m, k_r]``, this rank's part of the inner dimension. More dimensions are taken as rows.
        weight: ``[n, k_r]``, or its transposed view. ``n`` and ``k_r`` are multiples of 8.
        bias: ``[n]``, the same on every rank.
        residual: ``[m_r, n]``, added in fp32 before the one rounding. ``out`` may be the same memory.
        norm: ``(gain, eps)`` of an RMSNorm of the result's rows, with a gain of ``[n]``. The gradient of the gain is that of this
            rank's rows (:func:`flux_tp.sum_gradients`). Where a gradient is needed, torch computes the norm.
        group: the communicator; the first that :func:`flux_tp.init` made.
        out: where the result goes, ``[m_r, n]``. With a norm a pair of both results, with ``norm_scales`` that of the sum alone.
        k: the inner dimension of all ranks together, where ranks have different parts of it: each has that of
            :meth:`flux_tp.Communicator.features`, of 8-bit operands with its ``multiple``. ``None``: ``W`` times that of this rank.
        partials: ``float32`` sends partial sums in fp32, twice the bytes: the result is rounded once, and no fp16 partial
            sum overflows where the total does not. ``None``: in the result's dtype. The same on every rank.
        sequence_dim: the dimension of ``x``, ``residual`` and the result that is split over the ranks, as in
            :func:`all_gather_matmul`: 1 of a batch-first ``[b, s, k_r]``, whose result is ``[b, s_r, n]``.
        scale_a, scale_b, out_dtype: as in :func:`all_gather_matmul`, of this rank's part: ``[m, 1]`` and ``[1, n]``, or
            ``[m, k_r/128]`` and ``[n/128, k_r/128]``. ``scale_a`` is not copied where the scales of a row lie together.
        norm_scales: has the op write the norm in 8 bits, for the next op, as :func:`flux_tp.quantize_rows` with a norm makes it
            of ``y``: ``"row"``, ``"block"``, or the scale of all as a tensor of one element. No gradients.
        norm_carried: whether scales of rows and blocks lie behind the codes of each row, as :func:`all_gather_matmul` takes
            them without a copy, or apart, as ``torch._scaled_mm`` does.

    Returns:
        ``[m_r, n]``: this rank's rows of the sum, as ``torch.tensor_split`` cuts ``m`` rows. With a norm a pair
        ``(y, y_norm)``, where ``y_norm`` is ``y / sqrt(mean(y**2) + eps) * gain`` of each row, rounded once. With ``norm_scales``
        ``(y, codes, scale)``.

    Dtypes, layouts and errors are those of :func:`all_gather_matmul`.
    """
    return _row_parallel("matmul_reduce_scatter", x, weight, bias, residual, norm, group, out, k, partials, (scale_a, scale_b, out_dtype), (norm_scales, norm_carried), sequence_dim)


@overload
def matmul_all_reduce(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    residual: Operand | None = None,
    norm: None = None,
    group: Communicator | None = None,
    out: Operand | None = None,
    *,
    k: int | None = None,
    partials: str | None = None,
    scale_a: Operand | None = None,
    scale_b: Operand | None = None,
    out_dtype: Any = None,
) -> Operand: ...
@overload
def matmul_all_reduce(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    residual: Operand | None = None,
    *,
    norm: tuple[Operand, float],
    group: Communicator | None = None,
    out: tuple[Operand, Operand] | None = None,
    k: int | None = None,
    partials: str | None = None,
    scale_a: Operand | None = None,
    scale_b: Operand | None = None,
    out_dtype: Any = None,
) -> tuple[Operand, Operand]: ...
@overload
def matmul_all_reduce(
    x: Operand,
    weight: Operand,
    bias: Operand | None = None,
    residual: Operand | None = None,
    *,
    norm: tuple[Operand, float],
    norm_scales: str | Operand,
    norm_carried: bool = True,
    group: Communicator | None = None,
    out: Operand | None = None,
    k: int | None = None,
    partials: str | None = None,
    scale_a: Operand | None = None,
    scale_b: Operand | None = None,
    out_dtype: Any = None,
) -> tuple[Operand, Operand, Operand]: ...
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
    scale_a: Any = None,
    scale_b: Any = None,
    out_dtype: Any = None,
    norm_scales: Any = None,
    norm_carried: bool = True,
) -> Any:
    """``sum over ranks of x @ weight.T, + bias + residual``: a row-parallel linear layer whose output every rank has whole.

    Args:
        x: ``[m, k_r]``, this rank's part of the inner dimension. More dimensions are taken as rows.
        weight: ``[n, k_r]``, or its transposed view. ``n`` and ``k_r`` are multiples of 8.
        bias: ``[n]``, the same on every rank.
        residual: ``[m, n]``, the same on every rank, as for :func:`matmul_reduce_scatter`.
        norm: ``(gain, eps)``, the same on every rank, as for :func:`matmul_reduce_scatter`.
        group: the communicator; the first that :func:`flux_tp.init` made.
        out: where the result goes, ``[m, n]``. With a norm a pair of both results, with ``norm_scales`` that of the sum alone.
        k, partials, scale_a, scale_b, out_dtype, norm_scales, norm_carried: as for :func:`matmul_reduce_scatter`.

    Returns:
        ``[m, n]``, with the same bits on every rank. With a norm a pair ``(y, y_norm)``, with ``norm_scales`` ``(y, codes, scale)``.

    Dtypes, layouts and errors are those of :func:`all_gather_matmul`.
    """
    return _row_parallel("matmul_all_reduce", x, weight, bias, residual, norm, group, out, k, partials, (scale_a, scale_b, out_dtype), (norm_scales, norm_carried))


def prepare(
    op: str,
    n: int | Sequence[int],
    k: int,
    *,
    rows: Sequence[int] = (),
    dtype: Any = "bfloat16",
    scales: str | None = None,
    out_dtype: Any = "bfloat16",
    transposed: bool = False,
    bias: bool = False,
    activation: str | None = None,
    residual: bool = False,
    eps: float | None = None,
    norm_scales: str | None = None,
    partials: str | None = None,
    group: Communicator | None = None,
) -> None:
    """Builds an op before its first call. Collective.

    Args:
        op: the op's name, as ``all_gather_matmul``.
        n, k: output features and inner dimension, both global. Of several weights ``n`` is a list of those of each.
        rows: numbers ``m`` of rows whose calls are to be captured in CUDA graphs: captured calls build nothing.
        dtype: ``bfloat16``, ``float16`` or ``float8_e4m3fn``: a name, or a dtype of torch or NumPy.
        scales: of ``dtype="float8_e4m3fn"`` the form of the scales, ``tensor``, ``row`` or ``block``.
        out_dtype: of ``dtype="float8_e4m3fn"`` the result's.
        transposed: whether the weight of calls is a transposed view, as in :func:`all_gather_matmul`.
        bias: whether calls have one.
        activation: as in :func:`all_gather_matmul`.
        residual: whether calls have one, as in :func:`matmul_reduce_scatter`.
        eps: that of the norm, where calls have one.
        norm_scales: the form of the scales of norms in 8 bits, ``tensor``, ``row`` or ``block``.
        partials: as in :func:`matmul_reduce_scatter`.
        group: the communicator; the first that :func:`flux_tp.init` made.
    """
    comm, number = chosen(group), activation_number(activation)
    if isinstance(n, (list, tuple)):
        if op != "all_gather_matmul":
            raise OperandError(f"n is a {type(n).__name__}, and {op} takes one weight: give a number")
        columns = lists(n, "n", len(n))
        check_several("n", n, number)
    else:
        check_extents(n=n)
        columns = [n]
    check_extents(k=k)
    operands = [name for name, given in {"bias": bias, "residual": residual}.items() if given]
    forms = _native.scales_of_operands()
    if (scales or "none") not in forms or (scales is None) == (dtype_name(dtype) == "float8_e4m3fn"):
        raise OperandError(f"scales = {scales!r} with dtype = {dtype_name(dtype)}: give {', '.join(forms[1:])} with float8_e4m3fn, and None with others")
    types = (dtype_name(dtype), dtype_name(out_dtype), forms.index(scales or "none"))
    if norm_scales is not None and (eps is None or norm_scales not in forms[1:]):
        raise OperandError(f"norm_scales = {norm_scales!r} with eps = {eps}: give {', '.join(forms[1:])} with eps, or None")
    norm = None if eps is None else (eps, forms.index(norm_scales or "none"))
    of = (types, transposed, operands, number, norm, partials_number(partials) != 0)
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
    scales: tuple[Any, Any, Any],
    of_norm: tuple[Any, bool],
    sequence_dim: int = 0,
) -> Any:
    check_extents(k=k)
    if isinstance(weight, (list, tuple)):
        raise OperandError(f"weight is a {type(weight).__name__} of {len(weight)}: all_gather_matmul alone takes several weights")
    norm_scales, norm_carried = of_norm
    quantised = norm_scales is not None
    if norm is not None:
        check_norm(norm, out, quantised)
    elif quantised:
        raise OperandError("norm_scales= without norm=: give both, or neither")
    gain, eps = (None, None) if norm is None else (norm[0], float(norm[1]))
    weights, biases, split = _one(weight, bias, k)
    options = {"eps": eps, "partials": partials_number(partials), "second": None if norm is None or quantised else "y_norm"}
    options |= {"norm_scales": norm_scales, "norm_carried": norm_carried}
    options |= dict(zip(("scale_a", "scale_b", "out_dtype"), scales))
    operands = {"bias": biases, "residual": residual, "gain": gain}
    return _run(op, chosen(group), x, weights, operands, split, out, sequence_dim, **options)


def _one(weight: Any, bias: Any, extent: int | None) -> tuple[list[Any], list[Any] | None, list[int] | None]:
    """One weight as a list of weights, with what belongs to each."""
    return [weight], None if bias is None else [bias], None if extent is None else [extent]


def _run(
    op: str,
    comm: Communicator,
    x: Any,
    weights: list[Any],
    operands: Mapping[str, Any],
    split: list[int] | None,
    out: Any,
    dim: int,
    *,
    several: bool = False,
    eps: float | None = None,
    m: int | None = None,
    second: str | None = None,
    scale_a: Any = None,
    scale_b: Any = None,
    out_dtype: Any = None,
    norm_scales: Any = None,
    norm_carried: bool = True,
    **options: Any,
) -> Any:
    """Makes a call by the library of ``x``, with rows in two dimensions.

    ``operands``: the others by name, a list of those that each weight has, or ``None``. ``second``: the name of the result
    behind those of the weights.
    """
    library = _library(x)
    take, count, is_tuple = library.taking(x, comm), len(weights), several or second is not None
    dim = sequence_dimension(x, dim, out) if dim else 0
    x = swapped(take("x", x), dim)
    weights = [take(named("weight", index, count), weight) for index, weight in enumerate(weights)]
    given = {}
    for name, of in operands.items():
        if of is None:
            continue
        if INPUTS[name].of_weight:
            given[name] = [take(named(name, index, count), operand) for index, operand in enumerate(of)]
        else:
            given[name] = swapped(take(name, of), dim if INPUTS[name].of_result else 0)
    given_scale = None
    if norm_scales is not None:
        form, given_scale = library.norm_form(norm_scales, x)
        given |= {} if given_scale is None else {"norm_scale": given_scale.reshape(1, 1)}
        options["quantised"] = form, norm_carried
    outs = None
    if out is not None:
        outs = list(out) if is_tuple else [out]
        for index, result in enumerate(outs):
            library.check_result(named("out", index, count) if index < count else second, result)
    lead = x.shape[:-1]
    if len(lead) > 1:
        leads = results_lead(op, lead, m, comm)
        x = x.reshape(prod(lead), x.shape[-1])
        given |= {name: as_rows(name, of, lead) for name, of in given.items() if INPUTS[name].of_result}
    # What the shapes of results are taken from.
    for index, operand in enumerate((x, *weights)):
        if operand.ndim != 2:
            name = named("weight", index - 1, count) if index else "x"
            raise OperandError(f"{name} has {operand.ndim} dimensions, and 2 are needed")
    if scale_a is not None or scale_b is not None or dtype_name(x.dtype).startswith("float8"):
        scale_a = swapped(scale_a, dim if len(getattr(scale_a, "shape", ())) == len(lead) + 1 else 0)
        if len(lead) > 1 and len(getattr(scale_a, "shape", ())) == len(lead) + 1:
            scale_a = scale_a.reshape(prod(lead), scale_a.shape[-1])
        if out_dtype is None and outs:
            out_dtype = outs[0].dtype
        x, scales, of_scales = library.scaled(op, x, weights, scale_a, scale_b, out_dtype, given, second)
        given |= scales
        options |= of_scales
    elif out_dtype is not None and out_dtype != x.dtype:
        raise OperandError(f"out_dtype = {out_dtype}: results of {x.dtype} have the dtype of their operands, leave it out")
    results = library.run(op, comm, x, weights, given, outs, eps=eps, m=m, split=split, second=second, **options)
    if out is not None and norm_scales is None:
        return out
    if len(lead) > 1:
        results = [result.reshape(*leads, result.shape[1]) for result in results]
    if dim:
        results = [swapped(result, dim) for result in results]
    if norm_scales is not None:
        y, *others = results
        return (y if out is None else out, *others, *([] if given_scale is None else [norm_scales]))
    return tuple(results) if is_tuple else results[0]


def _library(x: Any) -> Any:
    """The module that computes with operands such as ``x``."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(x, torch.Tensor):
        from . import _torch

        return _torch
    if hasattr(x, "__array_interface__"):
        from . import _numpy

        return _numpy
    raise OperandError(f"x is a {type(x).__name__}: give a torch.Tensor or a numpy.ndarray")
