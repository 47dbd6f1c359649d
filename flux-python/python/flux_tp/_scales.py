"""8-bit operands and their scales, in the shapes of ``torch._scaled_mm``; and rows that are quantised.

Invariant: rows that are gathered carry their scales: the codes of each row, its fp32 scales behind them, and what fills
a multiple of 128 bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, pad

from . import _native
from ._arguments import BLOCK, check_gain, lists, named
from ._comm import Communicator, chosen
from ._kernels import quantized
from .errors import OperandError

__all__ = [
    "E4M3",
    "FORMS",
    "Quantisable",
    "check_groups",
    "dequantised",
    "norm_form",
    "places_of_rows",
    "quantize_rows",
    "quantized_weight",
    "rows_in",
    "scale_of",
    "scaled",
    "scaled_product",
    "width_of_rows",
    "with_scales",
]

E4M3 = torch.float8_e4m3fn
FORMS = {name: number for number, name in enumerate(_native.scales_of_operands())}
_MOST = torch.finfo(E4M3).max
_LEAST = torch.finfo(torch.float32).tiny
_OUTPUTS = (torch.bfloat16, torch.float16)


def scaled(
    op: str, x: Tensor, weights: list[Tensor], scale_a: Any, scale_b: Any, out_dtype: Any, others: Mapping[str, Any], second: str | None
) -> tuple[Tensor, dict[str, Any], dict[str, Any]]:
    """``x`` as the op takes it, the scales among its operands, and the options of a call of 8-bit operands, checked.

    ``x`` and the weights have two dimensions. ``others``: what may need a gradient.
    """
    count = len(weights)
    for name, operand in {"x": x, **{named("weight", index, count): weight for index, weight in enumerate(weights)}}.items():
        if operand.dtype != E4M3:
            raise OperandError(f"{name} is {operand.dtype}, and operands with scales are torch.float8_e4m3fn: convert it, or leave the scales out")
    if scale_a is None or scale_b is None:
        missing = "scale_a" if scale_a is None else "scale_b"
        raise OperandError(f"{missing} is not given: operands of torch.float8_e4m3fn have scale_a= and scale_b=")
    if second == "x_full":
        raise OperandError("return_gathered= with torch.float8_e4m3fn: gathered rows are returned of 16-bit operands alone, leave it out")
    tensors = [tensor for of in (x, *weights, *others.values()) for tensor in (of if isinstance(of, list) else [of])]
    if torch.is_grad_enabled() and any(isinstance(tensor, Tensor) and tensor.requires_grad for tensor in tensors):
        raise OperandError("operands of torch.float8_e4m3fn have no gradients: call the op under torch.no_grad()")
    scale_b = [scale_b] if count == 1 and not isinstance(scale_b, (list, tuple)) else lists(scale_b, "scale_b", count)
    shapes = [tuple(weight.shape) for weight in weights]
    form = _form(scale_a, scale_b, shapes[0])
    for index, (scale, (n, k)) in enumerate(zip(scale_b, shapes)):
        expected = {"tensor": None, "row": (1, n), "block": (-(-n // BLOCK), -(-k // BLOCK))}[form]
        _check(named("scale_b", index, count), scale, expected, form, x)
    rows, k = x.shape
    _check("scale_a", scale_a, {"tensor": None, "row": (rows, 1), "block": (rows, -(-k // BLOCK))}[form], form, x)
    if form == "tensor":
        operands = {"scale_x": scale_a.reshape(1, 1)}
    elif op == "all_gather_matmul":
        operands, x = {}, with_scales(x, scale_a, form)
    else:
        rows_lie = scale_a.shape[1] == 1 or scale_a.stride(1) == 1
        operands = {"scale_x": scale_a if rows_lie else scale_a.contiguous()}
    operands["scale_w"] = [scale.reshape(1, 1) if form == "tensor" else scale.contiguous() for scale in scale_b]
    return x, operands, {"scales": FORMS[form], "out_dtype": output_dtype(out_dtype)}


def output_dtype(dtype: Any) -> torch.dtype:
    """The dtype of the result of 8-bit operands."""
    dtype = torch.bfloat16 if dtype is None else dtype
    if dtype not in _OUTPUTS:
        raise OperandError(f"out_dtype = {dtype}: give torch.bfloat16 or torch.float16")
    return dtype


def _form(scale_a: Any, scale_b: list[Any], shape: tuple[int, int]) -> str:
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b[0])):
        if not isinstance(scale, Tensor):
            raise OperandError(f"{name} is a {type(scale).__name__}: give a tensor of torch.float32")
    found, (n, k) = scale_b[0], shape
    # One block has one scale; so has a tensor.
    if found.numel() == 1 and (scale_a.numel() == 1 or (n, k) != (BLOCK, BLOCK)):
        return "tensor"
    return "row" if tuple(found.shape) == (1, n) else "block"


def _check(name: str, scale: Any, expected: tuple[int, int] | None, form: str, x: Tensor) -> None:
    if not isinstance(scale, Tensor):
        raise OperandError(f"{name} is a {type(scale).__name__}: give a tensor of torch.float32")
    if scale.dtype != torch.float32:
        raise OperandError(f"{name} is {scale.dtype}: convert it to torch.float32")
    if scale.device != x.device:
        raise OperandError(f"{name} is on {scale.device}, and x on {x.device}: move it there")
    if scale.numel() != 1 if expected is None else tuple(scale.shape) != expected:
        shape = "one element" if expected is None else list(expected)
        raise OperandError(f"{name} is {list(scale.shape)}, and {form} scales of these operands have {shape}")


def _bytes_behind(form: str, k: int) -> int:
    """Bytes behind the codes of a row: its own scales, and what fills a cache line of 128."""
    groups = _groups(form, k)
    return -(-(k + 4 * groups) // 128) * 128 - k if groups else 0


def width_of_rows(form: str, k: int) -> int:
    """Bytes of a row that carries its scales."""
    return k + _bytes_behind(form, k)


def with_scales(x: Tensor, scale: Tensor, form: str) -> Tensor:
    """Rows that carry their scales: the memory of ``x`` where they lie behind each row, as :func:`quantize_rows` has them, else a copy."""
    rows, k = x.shape
    wide = width_of_rows(form, k)
    if not torch.compiler.is_compiling():
        storage = x.untyped_storage()
        first = x.storage_offset()
        behind = scale.untyped_storage().data_ptr() == storage.data_ptr() and scale.data_ptr() == x.data_ptr() + k
        strides = x.stride(0), 4 * scale.stride(0)
        dense = (rows < 2 or (strides[0] == strides[1] >= wide)) and x.stride(1) == 1 and (scale.shape[1] < 2 or scale.stride(1) == 1)
        step = max(strides[0], wide)
        aligned = x.data_ptr() % 16 == step % 16 == 0
        if rows and behind and dense and aligned and first + (rows - 1) * step + wide <= storage.nbytes():
            return x.as_strided((rows, wide), (step, 1))
    # As integers of a scale's size: torch may lay a column of scales out in any way.
    codes, behind = x.contiguous().view(torch.int32), scale.view(torch.int32)
    padding = behind.new_zeros(rows, wide // 4 - codes.shape[1] - behind.shape[1])
    return torch.cat([codes, behind, padding], 1).view(E4M3)


def _form_of_rows(name: str, scales: Any, x: Tensor) -> tuple[str, Tensor | None]:
    """The form of the scales of quantised rows, and the given scale of all."""
    if isinstance(scales, Tensor):
        _check(name, scales, None, "tensor", x)
        return "tensor", scales
    if scales not in ("row", "block"):
        raise OperandError(f"{name} = {scales!r}: give 'row', 'block', or a tensor of one element")
    return scales, None


def norm_form(norm_scales: Any, x: Tensor) -> tuple[str, Tensor | None]:
    """The form in which an op writes the norm of its result."""
    return _form_of_rows("norm_scales", norm_scales, x)


def _groups(form: str, k: int) -> int:
    """Scales of a row's own."""
    return {"tensor": 0, "row": 1, "block": -(-k // BLOCK)}[form]


def places_of_rows(rows: int, k: int, form: str, carried: bool, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Where rows are quantised to: codes, and their scales behind each row or apart."""
    count = _groups(form, k)
    apart = count > 0 and not carried
    out = torch.empty(rows, k if apart else width_of_rows(form, k), dtype=E4M3, device=device)
    # No operand is without columns.
    return out, torch.empty(count, max(rows, 1), dtype=torch.float32, device=device) if apart else None


def rows_in(places: tuple[Tensor, Tensor | None], k: int, form: str) -> list[Tensor]:
    """The codes ``[rows, k]`` in such places, and scales of rows or blocks."""
    out, out_scale = places
    codes = out[:, :k]
    if form == "tensor":
        return [codes]
    if out_scale is None:
        return [codes, out.view(torch.float32)[:, k // 4 : k // 4 + _groups(form, k)]]
    out_scale = out_scale[:, : out.shape[0]]
    return [codes, out_scale.t() if form == "block" else out_scale.view(-1, 1)]


def quantize_rows(
    x: Tensor, scales: str | Tensor = "row", *, norm: tuple[Tensor, float] | None = None, carried: bool = True, group: Communicator | None = None
) -> tuple[Tensor, Tensor]:
    """Rows of bfloat16 or float16 as ``(codes, scale)`` in one launch; ``codes * scale`` is nearly ``x``.

    Args:
        x: ``[..., k]``, contiguous rows. ``k`` is a multiple of 16, with scales of blocks of 128.
        scales: ``"row"`` for one of each row, ``[..., 1]``; ``"block"`` for one of each 128 elements, ``[..., k/128]``; or the
            scale of all as a tensor of one element, which is returned.
        norm: ``(gain, eps)`` of an RMSNorm of rows before, in fp32 and not rounded between.
        carried: whether scales of rows and blocks lie behind the codes of each row, as :func:`all_gather_matmul` takes them
            without a copy. Else codes are contiguous, and scales have memory of their own in which each of the ``k/128`` columns is
            contiguous, as ``torch._scaled_mm`` takes both.
        group: the communicator, on whose device it works; the first that :func:`flux_tp.init` made.

    A scale is ``max(absmax / 448, 2**-126)``. Codes are rounded to nearest even, 448 at most. A NaN stays one; an infinity
    makes all that share its scale NaN. There is no gradient.
    """
    comm = chosen(group)
    if not isinstance(x, Tensor) or x.dtype not in _OUTPUTS:
        found = x.dtype if isinstance(x, Tensor) else f"a {type(x).__name__}"
        raise OperandError(f"x is {found}: give a tensor of torch.bfloat16 or torch.float16")
    if x.ndim == 0:
        raise OperandError("x has 0 dimensions, and rows are needed")
    gain, eps = (None, 0.0) if norm is None else (norm[0], float(norm[1]))
    check_gain(gain, eps, x.shape[-1])
    if torch.is_grad_enabled() and (x.requires_grad or (gain is not None and gain.requires_grad)):
        raise OperandError("quantize_rows has no gradient: call it under torch.no_grad(), or detach x")
    form, given = _form_of_rows("scales", scales, x)
    lead, k = x.shape[:-1], x.shape[-1]
    rows = x.reshape(-1, k) if x.numel() else x.reshape(lead.numel(), k)
    places = places_of_rows(rows.shape[0], k, form, carried, x.device)
    quantized(comm, rows, gain, None if given is None else given.reshape(1, 1), eps, FORMS[form], *places)
    results = [of.unflatten(0, lead) if len(lead) != 1 else of for of in rows_in(places, k, form)]
    return (results[0], given) if given is not None else (results[0], results[1])


class Quantisable:
    """A linear layer that :func:`flux_tp.quantize` can have compute in 8 bits."""

    scales: str | None = None
    """The form of its scales, once it does."""

    def check_quantisable(self, form: str, name: str) -> None:
        """Refuses scales of a form that do not fit the layer of this name."""
        raise NotImplementedError

    def hold_quantised(self, form: str) -> None:
        """Holds the weight as ``weight`` and ``weight_scale``."""
        raise NotImplementedError


def check_groups(name: str, form: str, extents: Mapping[str, tuple[int, int]]) -> None:
    """Refuses features of a layer, by name with their extent and in how many parts it is split, that groups of scales do not divide."""
    for feature, (extent, parts) in extents.items():
        multiple = parts * (BLOCK if form == "block" else 16)
        if extent % multiple:
            raise OperandError(f"{name}: {feature} = {extent}, and {form} scales need multiples of {multiple}: leave it out by keep=")


def dequantised(codes: Tensor, scale: Tensor, form: str, of_weight: bool = False) -> Tensor:
    """What codes and scales stand for, in fp32."""
    if form == "block":
        scale = scale.repeat_interleave(BLOCK, 1)
        scale = scale.repeat_interleave(BLOCK, 0) if of_weight else scale
    elif form == "row" and of_weight:
        scale = scale.t()
    return codes.float() * scale


def scaled_product(
    x: Tensor, weight: Tensor, scale_a: Tensor, scale_b: Tensor, form: str, bias: Tensor | None = None, out_dtype: Any = None, out: Tensor | None = None
) -> Tensor:
    """``x @ weight.T + bias`` of this rank's 8-bit operands, by ``torch._scaled_mm``; on the CPU, where it lacks scales, in fp32."""
    dtype, lead = output_dtype(out_dtype), x.shape[:-1]
    if len(lead) > 1:
        x, scale_a = x.flatten(0, -2), scale_a if form == "tensor" else scale_a.flatten(0, -2)
        rows = None if out is None else out.view(-1, out.shape[-1])
        return scaled_product(x, weight, scale_a, scale_b, form, bias, dtype, rows).unflatten(0, lead)
    if x.device.type == "cpu":
        wide = dequantised(x, scale_a, form) @ dequantised(weight, scale_b, form, True).t()
        y = (wide if bias is None else wide + bias).to(dtype)
        return y if out is None else out.copy_(y)
    kept = {} if out is None else {"out": out}
    if form == "row":
        scale_a = scale_a.contiguous()
    elif form == "block":
        # cuBLAS takes a multiple of four rows.
        if more := -x.shape[0] % 4:
            wider = [torch.cat([of, of.new_zeros(more, of.shape[1])]) for of in (x.view(torch.uint8), scale_a)]
            y = scaled_product(wider[0].view(E4M3), weight, wider[1], scale_b, form, bias, dtype)[:-more]
            return y if out is None else out.copy_(y)
        # torch takes the scales of x one column behind the other.
        if scale_a.stride() != (1, scale_a.shape[0]):
            scale_a = torch.empty_like(scale_a.t(), memory_format=torch.contiguous_format).copy_(scale_a.t()).t()
        # cuBLAS reads rows of a multiple of four scales of the weight.
        # With others the results of `torch._scaled_mm` are wrong.
        if more := -scale_b.shape[1] % 4:
            scale_b = pad(scale_b, (0, more))
        forms = [ScalingType.BlockWise1x128.value], [ScalingType.BlockWise128x128.value]
        return torch._scaled_mm_v2(x, weight.t(), [scale_a], forms[0], [], [scale_b.t()], forms[1], [], bias, dtype, **kept)
    return torch._scaled_mm(x, weight.t(), scale_a, scale_b, bias, out_dtype=dtype, **kept)


def scale_of(most: Tensor) -> Tensor:
    """The fp32 scale of elements whose largest magnitude is ``most``."""
    return (most.float() / _MOST).clamp_min(_LEAST)


def quantized_weight(weight: Tensor, form: str, of_ranks: Callable[[Tensor], Tensor] = lambda most: most) -> tuple[Tensor, Tensor]:
    """A weight ``[n, k]`` as codes and scales: of all ``[1, 1]``, of rows ``[1, n]``, or of 128 x 128 ``[n/128, k/128]``.

    ``of_ranks``: from the largest magnitudes of this rank's part of rows, those of whole rows.
    """
    n, k = weight.shape
    groups = weight.detach().float()
    if form == "block":
        groups = groups.reshape(n // BLOCK, BLOCK, k // BLOCK, BLOCK).transpose(1, 2).flatten(2).flatten(0, 1)
    most = groups.abs().amax() if form == "tensor" else groups.abs().amax(1, keepdim=True)
    scale = scale_of(of_ranks(most) if form == "row" else most)
    codes = (groups / scale).clamp(-_MOST, _MOST).to(E4M3)
    if form == "block":
        blocks = codes.view(torch.uint8).reshape(n // BLOCK, k // BLOCK, BLOCK, BLOCK)
        return blocks.transpose(1, 2).reshape(n, k).view(E4M3), scale.reshape(n // BLOCK, k // BLOCK)
    return codes, scale.reshape(1, n if form == "row" else 1)
