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
