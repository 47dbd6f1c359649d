"""The package with tensors of PyTorch, on the host transport."""

import pytest

from ranks import Ranks

pytest.importorskip("torch", reason="torch is not installed")

# In this order: one of them asks for torch.distributed before another starts it.
CASES = [
    "all_gather",
    "all_gather_and_gathered_rows",
    "transposed_weights",
    "reduce_scatter",
    "residual_and_norm",
    "residual_and_norm_that_do_not_fit",
    "uneven_rows_and_more_dimensions",
    "out",
    "errors_keep_their_class",
    "others_run_while_a_rank_waits",
    "schemas_and_fakes",
    "compiled",
    "gradients_with_frozen_weights",
    "weights_need_torch_distributed",
    "gradients",
    "gradients_of_random_shapes",
    "gradients_of_a_residual",
    "an_activation_has_a_gradient",
    "gates_have_gradients",
    "gates_compile",
    "modules",
    "modules_without_sequence_parallelism",
    "modules_of_unequal_parts",
    "compiled_with_unequal_parts",
    "groups_inside_a_larger_job",
]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3, "cases_torch") as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES)
def test_ranks(ranks, case):
    ranks.run(case)
