"""Arguments of the ops, checked, in the form in which calls of both libraries take them.

Invariant: an error names the argument, its value and what to give in its place. Nothing was launched by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from . import _native
from .errors import OperandError

if TYPE_CHECKING:
    from ._comm import Communicator

__all__ = [
    "ACTIVATIONS",
    "BLOCK",
    "GATED",
    "INPUTS",
    "activation_number",
    "as_rows",
    "check_extents",
    "check_gain",
    "check_gates",
    "check_norm",
    "check_pair",
    "check_several",
    "dtype_name",
    "lists",
    "named",
    "partials_number",
    "result_shapes",
    "results_lead",
    "sequence_dimension",
    "swapped",
]


class Input(NamedTuple):
    """What is told of an operand."""

    of_weight: bool
    of_result: bool


ACTIVATIONS = {name: number for number, (name, *_) in enumerate(_native.activations())}
# Numbers of the activations with gates.
GATED = frozenset(number for number, (*_, gated, _) in enumerate(_native.activations()) if gated)

# Operands beside x and weights, in the order of the kernels' arguments: whether each weight has
# one, and whether they have the shape of the result.
INPUTS = {name: Input(of_weight, of_result) for name, of_weight, of_result in _native.further_inputs()}

_MAX_WEIGHTS = _native.max_weights()
BLOCK = 128
"""Elements along each dimension of a block of an 8-bit weight with one scale."""


def named(name: str, index: int, count: int) -> str:
    """The name of an operand of one weight of so many."""
    return name if count == 1 else f"{name}[{index}]"


def activation_number(activation: str | None) -> int:
    """The number by which ops take an activation."""
    if activation is None:
        return 0
    number = ACTIVATIONS.get(activation)
    if number is None:
        raise OperandError(f"activation = {activation!r}: there are {', '.join(ACTIVATIONS)}")
    return number


def dtype_name(dtype: Any) -> str:
    """The name of a dtype of torch or NumPy, or a name."""
    return getattr(dtype, "name", None) or str(dtype).removeprefix("torch.")


def partials_number(partials: Any) -> int:
    """The number by which ops take a type of partial sums."""
    if partials is None:
        return 0
    if dtype_name(partials) != "float32":
        raise OperandError(f"partials = {partials!r}: give 'float32', or None for the result's dtype")
    return 1


def check_extents(**extents: int | None) -> None:
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
        raise OperandError(f"{name} = {n}: gates and ups are split over {world} ranks in groups of 8 of both; pad each with zeros to {padded // 2}")


def check_norm(norm: Any, out: Any, quantised: bool) -> None:
    if not (isinstance(norm, tuple) and len(norm) == 2 and isinstance(norm[1], (int, float))):
        raise OperandError(f"norm is a {type(norm).__name__}: give a tuple (gain, eps) of an operand and a number")
    if not quantised:
        check_pair(out, "a norm", "(y, y_norm)")


def check_gain(gain: Any, eps: float | None, n: int) -> None:
    """Refuses a norm that does not fit rows of ``n``, where no op has looked at it."""
    if gain is None:
        return
    if tuple(gain.shape) != (n,):
        raise OperandError(f"gain is {list(gain.shape)}, and rows have {n} elements: give [{n}]")
    if not 0 <= eps < float("inf"):
        raise OperandError(f"eps = {eps} of norm: give a number of 0 or above")


def check_pair(out: Any, why: str, pair: str) -> None:
    if out is not None and not (isinstance(out, tuple) and len(out) == 2):
        raise OperandError(f"out is a {type(out).__name__}: with {why} there are two results, so give a tuple {pair}")


def check_several(name: str, given: Sequence[Any], activation: int, out: Any = None, gathered: bool = False) -> None:
    """Refuses a list, of weights or of their columns, and places of results that an op with several weights does not take."""
    count = len(given)
    found = f"{name} is a {type(given).__name__} of {count}"
    if not 2 <= count <= _MAX_WEIGHTS:
        raise OperandError(f"{found}: an op takes 2 to {_MAX_WEIGHTS} weights, or one that is in no list; give more in several calls")
    if activation in GATED:
        *others, last = (name for name, number in ACTIVATIONS.items() if number not in GATED)
        raise OperandError(f"activation = {list(ACTIVATIONS)[activation]!r}: gates take one weight, and {found}: give {', '.join(others)} or {last}")
    results = count + gathered
    if out is not None and not (isinstance(out, tuple) and len(out) == results):
        found = f"has {len(out)} elements" if isinstance(out, tuple) else f"is a {type(out).__name__}"
        names = ", ".join([*(f"y{index}" for index in range(count)), *["x_full"] * gathered])
        raise OperandError(f"out {found}: there are {results} results, so give a tuple ({names})")


def lists(of: Any, name: str, count: int) -> list | None:
    """Optional values of ``count`` weights: all or none."""
    if of is None:
        return None
    if not isinstance(of, (list, tuple)) or len(of) != count:
        found = f"has {len(of)} elements" if isinstance(of, (list, tuple)) else f"is a {type(of).__name__}"
        raise OperandError(f"{name} {found}, and there are {count} weights: give a list of {count}, or None")
    for index, value in enumerate(of):
        if value is None:
            raise OperandError(f"{name}[{index}] is None: give one for each weight, or None in place of the list")
        if name == "n":
            check_extents(**{f"n[{index}]": value})
    return list(of)


def as_rows(name: str, of: Any, lead: Sequence[int]) -> Any:
    """An operand of the result's shape as rows, for an ``x`` whose dimensions but the last are ``lead``. Each rank has its own first of them."""
    if len(of.shape) != len(lead) + 1:
        return of
    if tuple(of.shape[1:-1]) != tuple(lead[1:]):
        raise OperandError(f"{name} is {list(of.shape)}, and x is [{', '.join(map(str, lead))}, k_r]: only the first may differ")
    return of.reshape(prod(of.shape[:-1]), of.shape[-1])


def sequence_dimension(x: Any, dim: int, out: Any) -> int:
    """The dimension that the ranks share, from 0 on."""
    dims = len(x.shape)
    if not dim or not dims:
        return 0
    if not -dims <= dim < dims or dim % dims == dims - 1:
        raise OperandError(f"sequence_dim = {dim}: x has {dims} dimensions, of which all but the last may be split over the ranks")
    dim %= dims
    if dim and out is not None:
        raise OperandError(f"sequence_dim = {dim} with out=: results that the caller places have rows by the first dimension, leave one out")
    return dim


def swapped(of: Any, dim: int) -> Any:
    """The shared dimension in the first place, or back there; a view."""
    return of.swapaxes(0, dim) if dim and of is not None else of


def results_lead(op: str, lead: Sequence[int], m: int | None, comm: Communicator) -> tuple[int, ...]:
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
    return (_shard_rows(comm, first), *others)


def result_shapes(
    op: str, comm: Communicator, x: Any, weights: Sequence[Any], activation: int, m: int | None, second: str | None
) -> tuple[int, list[tuple[int, int]]]:
    """The rows of all ranks together; rows and columns of a result for each weight, and of the ``second``: ``x_full`` or ``y_norm``."""
    if m is None:
        m = x.shape[0] * comm.world_size if op == "all_gather_matmul" else x.shape[0]
    rows = _shard_rows(comm, m) if op == "matmul_reduce_scatter" else m
    shapes = [(rows, weight.shape[0] // 2 if activation in GATED else weight.shape[0]) for weight in weights]
    if second is not None:
        shapes.append((m, x.shape[1]) if second == "x_full" else shapes[0])
    return m, shapes


def _shard_rows(comm: Communicator, m: int) -> int:
    """The rows of this rank, of ``m``."""
    return m // comm.world_size + (comm.rank < m % comm.world_size)
