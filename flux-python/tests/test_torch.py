"""The package with tensors of PyTorch, on the host transport."""

import subprocess
import sys

import pytest

from ranks import Ranks

pytest.importorskip("torch", reason="torch is not installed")

MODULES = "cases_torch cases_compiled cases_gradients cases_modules cases_autograd cases_training"
# In this order: one of them asks for torch.distributed before another starts it.
CASES = [
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
    "gradients_with_frozen_weights",
    "a_communicator_lives_until_the_backward_pass",
    "weights_need_torch_distributed",
    "gradients",
    "gradients_of_random_shapes",
    "gradients_of_several_weights",
    "gradients_of_a_residual",
    "gradients_of_a_norm",
    "an_activation_has_a_gradient",
    "gates_have_gradients",
    "gates_of_unequal_parts_have_gradients",
    "gates_compile",
    "modules",
    "modules_without_sequence_parallelism",
    "modules_of_unequal_parts",
    "copies_of_modules_share_the_communicator",
    "modules_refuse_other_dtypes",
    "one_seed_is_one_model",
    "modules_of_unequal_rows",
    "what_a_call_writes_is_noticed_by_autograd",
    "other_derivatives_are_refused",
    "autocast_casts",
    "gradients_off_a_border_are_copied",
    "zero_rows_in_more_dimensions",
    "batch_first_operands",
    "groups_of_another_kind",
    "compiled_with_unequal_parts",
    "training_compiles",
    "scaled_ops_compile",
    "quantised_norms_compile",
    "attention_with_shared_heads",
    "gradients_of_own_rows_are_summed",
    "wrappers_of_torch",
    "groups_inside_a_larger_job",
]


@pytest.fixture(scope="module")
def ranks():
    with Ranks(3, MODULES, forked=True) as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES)
def test_ranks(ranks, case):
    ranks.run(case)


def test_a_failed_registration_fails_again():
    program = """
import torch
library = torch.library.Library("flux_tp", "FRAGMENT")
library.define("all_gather_matmul(Tensor x) -> Tensor")
from flux_tp import FluxError
for _ in range(2):
    try:
        import flux_tp._kernels
    except FluxError as error:
        print(error)
    else:
        raise AssertionError("registered")
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0 and ended.stdout.count("torch's operator failed") == 2, ended.stdout + ended.stderr
