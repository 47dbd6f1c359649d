"""The package with tensors on GPUs: as many ranks as there are, two and four at most."""

import pytest

from ranks import Ranks

MODULES = "cases_torch cases_compiled cases_gradients cases_modules cases_training cases_gpu"
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
    "several_weights_in_a_graph",
    "another_stream",
    "bad_operands",
    "all_gather",
    "all_gather_and_gathered_rows",
    "several_weights",
    "transposed_weights",
    "reduce_scatter",
    "residual_and_norm",
    "residual_and_norm_that_do_not_fit",
    "partials_in_float32",
    "uneven_rows_and_more_dimensions",
    "out",
    "errors_keep_their_class",
    "threads_keep_their_errors",
    "others_run_while_a_rank_waits",
    "schemas_and_fakes",
    "compiled",
    "several_weights_compile",
    "compiled_with_unequal_parts",
    "training_compiles",
    "gates_compile",
    "gradients_with_frozen_weights",
    "a_communicator_lives_until_the_backward_pass",
    "gradients",
    "gradients_of_random_shapes",
    "gradients_of_several_weights",
    "gradients_of_a_residual",
    "an_activation_has_a_gradient",
    "gates_have_gradients",
    "gates_of_unequal_parts_have_gradients",
    "modules",
    "modules_without_sequence_parallelism",
    "modules_of_unequal_parts",
    "attention_with_shared_heads",
    "gradients_of_own_rows_are_summed",
    "wrappers_of_torch",
    "groups_inside_a_larger_job",
    "a_thousand_steps_without_growth",
]
WORLDS = [world for world in (2, 4) if world <= GPUS]


@pytest.fixture(scope="module", params=WORLDS)
def ranks(request):
    with Ranks(request.param, MODULES, transport="auto") as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES)
def test_ranks(ranks, case):
    ranks.run(case)


@pytest.mark.parametrize("world", WORLDS)
def test_expandable_segments(world):
    segments = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    with Ranks(world, MODULES, segments, transport="auto") as ranks:
        for case in ("ops", "graphs", "gradients"):
            ranks.run(case)


@pytest.mark.parametrize("world", WORLDS)
def test_a_killed_rank(world):
    with Ranks(world, MODULES, transport="auto") as ranks:
        ranks.run("rank_1_is_killed", 1)
