"""Megatron-Core's layers computed by flux_tp, on the host transport, and on GPUs where there are two."""

import pytest

from ranks import Ranks

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("megatron.core", reason="megatron-core is not installed")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.fixture(scope="module", params=["host", "auto"] if GPUS > 1 else ["host"])
def ranks(request):
    with Ranks(2, "cases_megatron", forked=True, transport=request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("case", ["needs_a_communicator", "a_gpt_learns_alike"])
def test_ranks(ranks, case):
    ranks.run(case)


def test_a_loss_that_is_not_finite_is_a_difference():
    from flux_tp.bench.stack import difference

    nan, inf = float("nan"), float("inf")
    assert difference([2.0, 4.0], [2.0, 5.0]) == 0.25 and difference([-4.0], [-5.0]) == 0.25
    assert difference([8.0, 1.0], [8.0, 2.0], 0.25) == 0.5 and difference([8.0, 4.0], [8.0, 5.0], 0.25) == 0.25
    for bad in (nan, inf, -inf):
        for losses, others in (([1.0, 2.0], [1.0, bad]), ([1.0, bad], [1.0, 2.0]), ([bad, 1.0], [bad, 1.0])):
            assert difference(losses, others) == inf, (losses, others)
