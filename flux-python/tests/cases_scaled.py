"""Cases of 8-bit operands with scales; see ``ranks``."""

from __future__ import annotations

import numpy as np
import torch

import flux_tp
from cases_numpy import raises
from cases_torch import BF16, F16, NAMES, place
from flux_tp._scales import scaled_product
from oracle import UNIT, activate, close, operand, rms_norm, rows

E4M3 = torch.float8_e4m3fn
FORMS = ("tensor", "row", "block")


def codes(seed, *shape):
    """Values that codes have: multiples of 1/8."""
    return torch.from_numpy(operand(seed, *shape)).to(place(), torch.float32).to(E4M3)


def powers(seed, *shape):
    """Scales that change no bit of a product."""
    numbers = np.random.default_rng(seed).integers(-3, 3, shape)
    return torch.from_numpy(2.0**numbers).to(place(), torch.float32)


def scale_of_x(form, seed, rows, k):
    return powers(seed, *{"tensor": (1,), "row": (rows, 1), "block": (rows, k // 128)}[form])


def scale_of_w(form, seed, n, k):
    return powers(seed, *{"tensor": (1, 1), "row": (1, n), "block": (n // 128, k // 128)}[form])


def dequantised(of, scale, form, weight=False):
    wide, scale = of.double().cpu().numpy(), scale.double().cpu().numpy()
    if form == "tensor":
        return wide * scale.item()
    if form == "row":
        return wide * (scale.T if weight else scale)
    spread = scale.repeat(128, 1)
    return wide * (spread.repeat(128, 0) if weight else spread)


def numbers(tensor):
    values = tensor.double().cpu().numpy()
    flux_tp.check()
    return values


def gathered(comm, form, m, n, k):
    """Operands of this rank, and the result without bias in fp64."""
    own = rows(comm.world_size, comm.rank, m)
    x, of_x = codes(1, m, k), scale_of_x(form, 2, m, k)
    w, of_w = codes(3 + comm.rank, n, k), scale_of_w(form, 20 + comm.rank, n, k)
    y = dequantised(x, of_x, form) @ dequantised(w, of_w, form, True).T
    return x[own], of_x if form == "tensor" else of_x[own], w, of_w, y


def scaled_all_gather(comm):
    for form in FORMS:
        for m, dtype in ((comm.world_size * 8, BF16), (comm.world_size * 4 + 1, F16), (1, BF16)):
            n, k = 256, 384
            x, of_x, w, of_w, y = gathered(comm, form, m, n, k)
            bias = torch.from_numpy(operand(9, n)).to(place(), dtype)
            found = flux_tp.all_gather_matmul(x, w, bias, "relu", m=m, scale_a=of_x, scale_b=of_w, out_dtype=dtype)
            assert found.dtype == dtype
            close(numbers(found), activate("relu", y + bias.double().cpu().numpy()), NAMES[dtype], slope=2.0**10)
            out = torch.empty_like(found)
            assert flux_tp.all_gather_matmul(x, w, bias, "relu", m=m, scale_a=of_x, scale_b=of_w, out=out) is out and torch.equal(out, found)
    m = comm.world_size * 8
    x, of_x, w, of_w, y = gathered(comm, "row", m, 64, 32)
    several = flux_tp.all_gather_matmul(x, (w, w[:32]), scale_a=of_x, scale_b=[of_w, of_w[:, :32]])
    for found, expected in zip(several, (y, y[:, :32]), strict=True):
        close(numbers(found), expected, "bfloat16")
    found = flux_tp.all_gather_matmul(x.reshape(4, 2, 32), w, scale_a=of_x.reshape(4, 2, 1), scale_b=of_w)
    assert found.shape == (4 * comm.world_size, 2, 64) and torch.equal(found.reshape(m, 64), several[0])


def scaled_sums(comm):
    world = comm.world_size
    for form in FORMS:
        for op, dtype in ((flux_tp.matmul_reduce_scatter, BF16), (flux_tp.matmul_all_reduce, F16)):
            m, n, k = world * 4 + 1, 256, 256
            parts = [(codes(rank, m, k), scale_of_x(form, 30 + rank, m, k), codes(60 + rank, n, k), scale_of_w(form, 90 + rank, n, k)) for rank in range(world)]
            products = [dequantised(x, of_x, form) @ dequantised(w, of_w, form, True).T for x, of_x, w, of_w in parts]
            own = rows(world, comm.rank, m) if op is flux_tp.matmul_reduce_scatter else slice(m)
            residual = operand(7, m, n)[own]
            gain = operand(8, n)
            x, of_x, w, of_w = parts[comm.rank]
            added, of_norm = (torch.from_numpy(of).to(place(), dtype) for of in (residual, gain))
            y, y_norm = op(x, w, None, added, (of_norm, 1e-3), partials="float32", scale_a=of_x, scale_b=of_w, out_dtype=dtype)
            close(numbers(y), sum(products)[own] + residual, NAMES[dtype])
            unit = UNIT[NAMES[dtype]]
            expected = rms_norm(numbers(y), gain, 1e-3)
            assert (np.abs(numbers(y_norm) - expected) <= 2 * unit * np.abs(expected) + 2.0**-14).all()


def products_of_any_rows(comm):
    n, k = 256, 384
    for form in FORMS:
        w, of_w = codes(3, n, k), scale_of_w(form, 4, n, k)
        for m in (1, 3, 8):
            x, of_x = codes(5, m, k), scale_of_x(form, 6, m, k)
            expected = dequantised(x, of_x, form) @ dequantised(w, of_w, form, True).T
            out = torch.empty(m, n, dtype=BF16, device=place())
            assert scaled_product(x, w, of_x, of_w, form, out=out) is out
            close(numbers(out), expected, "bfloat16", slope=2.0**10)
            assert torch.equal(scaled_product(x[None], w, of_x if form == "tensor" else of_x[None], of_w, form)[0], out)


def quantised_rows(comm):
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(1)).to(place(), BF16)
    x[3] = 0
    gain = torch.linspace(0.5, 2, 256).to(place(), BF16)
    for scales, shape in (("row", (6, 1)), ("block", (6, 2))):
        for norm in (None, (gain, 1e-5)):
            found, scale = flux_tp.quantize_rows(x, scales, norm=norm)
            assert found.dtype == E4M3 and found.shape == x.shape and scale.shape == shape
            expected = x.double().cpu().numpy()
            expected = expected if norm is None else rms_norm(expected, gain.double().cpu().numpy(), 1e-5)
            steps = np.maximum(np.abs(expected) / 16, numbers(scale).repeat(256 // shape[1], 1) * 2.0**-10)
            assert (np.abs(dequantised(found, scale, scales) - expected) <= steps * (1 + 1e-5)).all()
            # They lie as a gather takes them.
            assert scale.data_ptr() == found.data_ptr() + 256 and scale.stride(0) * 4 == found.stride(0)
            apart = flux_tp.quantize_rows(x, scales, norm=norm, carried=False)
            assert torch.equal(apart[0].view(torch.uint8), found.view(torch.uint8)) and torch.equal(apart[1], scale)
            # They lie as torch._scaled_mm takes them.
            assert apart[0].is_contiguous() and apart[1].stride() == (1, 1 if scales == "row" else 6)
    given = torch.tensor(2.0**-6, device=place())
    found, scale = flux_tp.quantize_rows(x.reshape(2, 3, 256), given)
    assert scale is given and found.shape == (2, 3, 256)
    found, scale = flux_tp.quantize_rows(x.reshape(2, 3, 256), "block")
    assert found.shape == (2, 3, 256) and scale.shape == (2, 3, 2)
    apart = flux_tp.quantize_rows(x.reshape(2, 3, 256), "block", carried=False)
    assert torch.equal(apart[1], scale) and apart[1].flatten(0, 1).stride() == (1, 6)
    for carried in (False, True):
        assert flux_tp.quantize_rows(x[:0], "block", carried=carried)[1].shape == (0, 2)
        assert flux_tp.quantize_rows(x, given, carried=carried)[1] is given
    again = flux_tp.quantize_rows(x)
    w, of_w = codes(5, 64, 256), powers(6, 1, 64)
    one = flux_tp.all_gather_matmul(*again[:1], w, scale_a=again[1], scale_b=of_w)
    apart = flux_tp.all_gather_matmul(again[0].clone(), w, scale_a=again[1].clone(), scale_b=of_w)
    assert torch.equal(one, apart)


def quantised_norms(comm):
    """What an op writes of its norm, and what a quantiser makes of the op's result."""
    world, n, k = comm.world_size, 256, 32
    gain = torch.linspace(0.5, 2, n).to(place(), BF16)
    given = torch.tensor(2.0**-6, device=place())
    up, of_up = codes(5, 64, n), {form: scale_of_w(form, 6, 128 if form == "block" else 64, n) for form in FORMS}
    for op in (flux_tp.matmul_reduce_scatter, flux_tp.matmul_all_reduce):
        scatters = op is flux_tp.matmul_reduce_scatter
        for m in (world * 4 + 1, 1):
            own = rows(world, comm.rank, m) if scatters else slice(m)
            x, w = (torch.from_numpy(operand(seed + comm.rank, *shape)).to(place(), BF16) for seed, shape in ((1, (m, k)), (20, (n, k))))
            residual = torch.from_numpy(operand(7, m, n)[own]).to(place(), BF16)
            plain, _ = op(x, w, None, residual, (gain, 1e-3))
            for form in ("row", "block", given):
                for carried in (True, False):
                    place_of_y = residual.clone()
                    y, found, scale = op(x, w, None, place_of_y, (gain, 1e-3), out=place_of_y, norm_scales=form, norm_carried=carried)
                    expected = flux_tp.quantize_rows(y, form, norm=(gain, 1e-3), carried=carried)
                    assert y is place_of_y and torch.equal(y, plain) and found.dtype == E4M3
                    assert torch.equal(found.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])
                    assert (found.stride(), scale.stride()) == (expected[0].stride(), expected[1].stride())
                    assert (scale is given) == (form is given)
                    if carried and form is not given and y.shape[0]:
                        assert scale.data_ptr() == found.data_ptr() + n
    # As rows of more dimensions, which the next op gathers.
    x, w = (torch.from_numpy(operand(seed + comm.rank, *shape)).to(place(), BF16) for seed, shape in ((1, (2, world * 3, k)), (20, (n, k))))
    for form in ("row", given):
        y, found, scale = flux_tp.matmul_reduce_scatter(x, w, norm=(gain, 1e-3), sequence_dim=1, norm_scales=form)
        name = "tensor" if form is given else form
        assert found.shape == y.shape == (2, 3, n) and scale.shape == (() if form is given else (2, 3, 1))
        next_y = flux_tp.all_gather_matmul(found, up, scale_a=scale, scale_b=of_up[name], sequence_dim=1)
        again = flux_tp.quantize_rows(y, form, norm=(gain, 1e-3))
        assert next_y.shape == (2, world * 3, 64)
        assert torch.equal(next_y, flux_tp.all_gather_matmul(again[0], up, scale_a=again[1], scale_b=of_up[name], sequence_dim=1))
    # Of 8-bit operands.
    x, of_x, w, of_w = codes(1, 4 * world, 128), powers(2, 4 * world, 1), codes(3 + comm.rank, n, 128), powers(20 + comm.rank, 1, n)
    y, found, scale = flux_tp.matmul_all_reduce(x, w, norm=(gain, 1e-3), norm_scales="row", scale_a=of_x, scale_b=of_w)
    expected = flux_tp.quantize_rows(y, norm=(gain, 1e-3))
    assert torch.equal(found.view(torch.uint8), expected[0].view(torch.uint8)) and torch.equal(scale, expected[1])
    flux_tp.prepare("matmul_all_reduce", n, 128 * world, dtype="float8_e4m3fn", scales="row", eps=1e-3, norm_scales="row")
    bad, (x, w) = flux_tp.OperandError, (torch.ones(shape, device=place(), dtype=BF16) for shape in ((4, k), (n, k)))
    norm = gain, 1e-3
    raises(bad, lambda: flux_tp.matmul_all_reduce(x, w, norm_scales="row"), "norm_scales= without norm=")
    raises(bad, lambda: flux_tp.matmul_all_reduce(x, w, norm=norm, norm_scales="tensor"), "norm_scales = 'tensor'", "a tensor of one element")
    raises(bad, lambda: flux_tp.matmul_all_reduce(x, w, norm=norm, norm_scales=gain), "norm_scales is torch.bfloat16")
    raises(bad, lambda: flux_tp.matmul_all_reduce(x, w[:144], norm=(gain[:144], 1e-3), norm_scales="block"), "n = 144", "multiple of 128")
    raises(bad, lambda: flux_tp.matmul_all_reduce(x, w.clone().requires_grad_(), norm=norm, norm_scales="row"), "norm_scales= takes no part in autograd")
    raises(bad, lambda: flux_tp.prepare("matmul_all_reduce", n, 128 * world, norm_scales="row"), "norm_scales = 'row' with eps = None")
    if comm.device is None:
        numbers_of = np.ones((4, 16), np.float16), np.ones((16, 16), np.float16)
        raises(bad, lambda: flux_tp.matmul_all_reduce(*numbers_of, norm=(np.ones(16, np.float16), 1e-3), norm_scales="row"), "NumPy has not")


def what_does_not_fit_is_refused(comm):
    bad, m = flux_tp.OperandError, comm.world_size * 2
    x, of_x, w, of_w, _ = gathered(comm, "row", m, 64, 32)
    gather, reduce = flux_tp.all_gather_matmul, flux_tp.matmul_all_reduce
    for op in (gather, reduce):
        raises(bad, lambda: op(x, w), "scale_a is not given", "scale_a= and scale_b=")
        raises(bad, lambda: op(x, w, scale_a=of_x), "scale_b is not given")
        raises(bad, lambda: op(x.to(BF16), w, scale_a=of_x, scale_b=of_w), "x is torch.bfloat16", "leave the scales out")
        raises(bad, lambda: op(x, w.to(BF16), scale_a=of_x, scale_b=of_w), "weight is torch.bfloat16")
        raises(bad, lambda: op(x, w, scale_a=of_x.to(BF16), scale_b=of_w), "scale_a is torch.bfloat16", "float32")
        raises(bad, lambda: op(x, w, scale_a=of_x[:1], scale_b=of_w), "scale_a is [1, 1]", "[2, 1]")
        raises(bad, lambda: op(x, w, scale_a=of_x, scale_b=of_w.t()), "scale_b is [64, 1]")
        raises(bad, lambda: op(x, w, scale_a=of_x, scale_b=of_w, out_dtype=torch.float32), "out_dtype = torch.float32")
        bias = torch.zeros(64, dtype=BF16, device=place(), requires_grad=True)
        raises(bad, lambda: op(x, w, bias, scale_a=of_x, scale_b=of_w), "have no gradients", "no_grad")
        raises(bad, lambda: op(x, w, scale_a=1.0, scale_b=of_w), "scale_a is a float")
    raises(bad, lambda: gather(x, w, return_gathered=True, scale_a=of_x, scale_b=of_w), "return_gathered=")
    raises(bad, lambda: gather(x.to(BF16), w.to(BF16), out_dtype=F16), "out_dtype = torch.float16")
    raises(bad, lambda: gather(x, w, n=16 * comm.world_size, scale_a=of_x, scale_b=of_w), "weight is [64, 32]", "full[comm.features(n, multiple=16)]")
    raises(bad, lambda: flux_tp.quantize_rows(x), "x is torch.float8_e4m3fn")
    raises(bad, lambda: flux_tp.quantize_rows(x.to(BF16), "column"), "scales = 'column'")
    raises(bad, lambda: flux_tp.quantize_rows(x.to(BF16), "block"), "multiple of 128")
    if comm.device is None:
        raises(bad, lambda: reduce(np.zeros((2, 16)), np.zeros((16, 16)), scale_a=1, scale_b=1), "NumPy has not")


def quantised_modules(comm):
    world = comm.world_size
    for form, group in (("row", 16), ("block", 128)):
        torch.manual_seed(1)
        features, hidden = group, 2 * group * world
        up = flux_tp.ColumnParallelLinear(features, 2 * hidden, activation="swiglu", dtype=BF16)
        down = flux_tp.RowParallelLinear(hidden, features, dtype=BF16, partials="float32")
        x = torch.from_numpy(operand(2 + comm.rank, 4, features)).to(place(), BF16)
        model = torch.nn.Sequential(up, down)
        with torch.no_grad():
            plain = model(x)
        assert flux_tp.quantize(model, form, keep=lambda name, _: name == "1") is model
        assert up.weight.dtype == E4M3 and down.weight.dtype == BF16 and down.scales is None
        flux_tp.quantize(model, form)
        assert sorted(model.state_dict()) == ["0.bias", "0.weight", "0.weight_scale", "1.bias", "1.weight", "1.weight_scale"]
        with torch.no_grad():
            found = model(x)
        # Four roundings of 1/16 each, of sums of numbers of either sign.
        error = torch.linalg.vector_norm((found - plain).float()) / torch.linalg.vector_norm(plain.float())
        assert found.dtype == BF16 and 0 < error < 0.1, error
        raises(flux_tp.OperandError, lambda: model(x.requires_grad_()), "no gradient", "no_grad")
    whole = flux_tp.ColumnParallelLinear(16, 16 * world, sequence_parallel=False)
    x = torch.from_numpy(operand(5, 3, 2, 16)).to(place(), BF16)
    with torch.no_grad():
        plain, found = whole(x), flux_tp.quantize(whole)(x)
    error = torch.linalg.vector_norm((found - plain).float()) / torch.linalg.vector_norm(plain.float())
    assert found.shape == plain.shape and 0 < error < 0.1, error
    odd = flux_tp.RowParallelLinear(16 * world, 24)
    raises(flux_tp.OperandError, lambda: flux_tp.quantize(odd), "out_features = 24", "multiples of 16")
    raises(flux_tp.OperandError, lambda: flux_tp.quantize(odd, "tensor"), "scales = 'tensor'")


def prepared_ops_are_those_of_calls(comm):
    flux_tp.prepare("matmul_all_reduce", 64, 32 * comm.world_size, dtype=E4M3, scales="row", out_dtype=F16, rows=[3])
    x, w = codes(1, 3, 32), codes(2, 64, 32)
    y = flux_tp.matmul_all_reduce(x, w, scale_a=powers(3, 3, 1), scale_b=powers(4, 1, 64), out_dtype=F16)
    assert y.dtype == F16
    raises(flux_tp.OperandError, lambda: flux_tp.prepare("matmul_all_reduce", 64, 32, dtype=E4M3), "scales = None", "row")
