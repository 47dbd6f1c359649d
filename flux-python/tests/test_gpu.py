"""The package with tensors on GPUs: as many ranks as there are, two and four at most."""

import pytest

from ranks import Ranks

torch = pytest.importorskip("torch", reason="torch is not installed")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"two GPUs are needed, and there are {GPUS}")

# In this order: NCCL, which later cases start, calls the driver from threads of its own.
# A capture in torch's default mode fails where another thread does so.
CASES = [
    "ops",
    "graphs",
    "a_norm_in_a_graph",
    "gathered_rows_in_a_graph",
    "another_stream",
    "bad_operands",
    "all_gather",
    "all_gather_and_gathered_rows",
    "transposed_weights",
    "reduce_scatter",
    "residual_and_norm",
    "residual_and_norm_that_do_not_fit",
    "uneven_rows_and_more_dimensions",
    "out",
    "errors_keep_their_class",
    "schemas_and_fakes",
    "compiled",
    "gradients_with_frozen_weights",
    "gradients",
    "gradients_of_random_shapes",
    "gradients_of_a_residual",
    "an_activation_has_a_gradient",
    "gates_have_gradients",
    "modules",
    "modules_without_sequence_parallelism",
    "groups_inside_a_larger_job",
    "a_thousand_steps_without_growth",
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
def test_expandable_segments(world):
    segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    with Ranks(world, "cases_gpu", segments, transport="auto") as ranks:
        for case in ("ops", "graphs", "gradients"):
            ranks.run(case)


@pytest.mark.parametrize("world", WORLDS)
def test_a_killed_rank(world):
    with Ranks(world, "cases_gpu", transport="auto") as ranks:
        ranks.run("rank_1_is_killed", 1)
