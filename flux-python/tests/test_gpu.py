"""The package with tensors on GPUs: as many ranks as there are, two and four at most."""

import pytest

from ranks import Ranks

torch = pytest.importorskip("torch", reason="torch is not installed")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"two GPUs are needed, and there are {GPUS}")

CASES = [
    "ops",
    "all_reduce",
    "another_stream",
    "graphs",
    "compiled",
    "gradients",
    "a_thousand_steps_without_growth",
    "bad_operands",
]
WORLDS = [world for world in (2, 4) if world <= GPUS]


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request):
    with Ranks(request.param, "cases_gpu", transport="auto") as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES)
def test_ranks(ranks, case):
    ranks.run(case)


@pytest.mark.parametrize("world", WORLDS)
def test_a_killed_rank(world):
    with Ranks(world, "cases_gpu", transport="auto") as ranks:
        ranks.run("rank_1_is_killed", 1)
