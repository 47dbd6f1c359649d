"""The package with arrays of NumPy, on the host transport."""

import os
import subprocess
import sys

import pytest

from ranks import Ranks, lateness

CASES = [
    "all_gather",
    "all_gather_bias_and_activations",
    "all_gather_gates",
    "all_gather_uneven_rows",
    "all_gather_and_gathered_rows",
    "several_weights",
    "several_weights_of_unequal_parts",
    "several_weights_are_prepared",
    "several_weights_that_do_not_fit",
    "transposed_weights",
    "reduce_scatter",
    "reduce_scatter_uneven_rows",
    "all_reduce",
    "residual_and_norm",
    "residual_and_norm_that_do_not_fit",
    "partials_in_float32",
    "unequal_parts",
    "out_and_strided_operands",
    "heads_of_ranks",
    "more_dimensions",
    "bad_operands_name_what_to_do_and_harm_nothing",
    "arrays_that_need_a_copy",
    "extents_below_0",
    "prepared",
    "the_ranks_disagree",
    "others_run_while_a_rank_waits",
    "a_forked_child_harms_nobody",
    "a_second_communicator",
    "equal_rows_have_equal_bits",
]


@pytest.fixture(scope="module", params=[1, 3])
def ranks(request):
    with Ranks(request.param, "cases_numpy") as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES)
def test_ranks(ranks, case):
    alone = len(ranks.processes) == 1
    if alone and case in ("the_ranks_disagree", "others_run_while_a_rank_waits"):
        pytest.skip("one rank has no peers")
    ranks.run(case)


@pytest.mark.parametrize("world", [1, 2])
def test_the_default_communicator(world):
    with Ranks(world, "cases_numpy") as ranks:
        ranks.run("a_closed_or_broken_default_gives_way")


@pytest.mark.parametrize(("case", "silent"), [("rank_1_is_killed", [1]), ("rank_1_is_late", []), ("rank_1_leaves", [])])
def test_faults(case, silent):
    # A deadline that healthy calls keep; the late rank is told it.
    seconds = 2.0 * lateness() if case == "rank_1_is_late" else 120.0
    with Ranks(2, "cases_numpy", {"FLUX_TEST_SECONDS": str(seconds)}, timeout=seconds) as ranks:
        ranks.run(case, *silent)


def run(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)


def test_without_a_launcher_the_error_says_how_to_start():
    clean = [f"os.environ.pop({name!r}, None)" for name in os.environ if name.startswith(("FLUX_R", "SLURM_", "OMPI_", "PMI_"))]
    ended = run("import os; " + "; ".join([*clean, "import flux_tp; flux_tp.init()"]))
    assert ended.returncode == 1 and "flux_tp.errors.ConnectError" in ended.stderr and "torchrun" in ended.stderr


def test_torch_and_numpy_are_imported_when_they_are_used():
    ended = run("import sys, flux_tp; assert set(flux_tp.__all__) | {'__version__'} == set(dir(flux_tp)); assert not {'torch', 'numpy'} & set(sys.modules)")
    assert ended.returncode == 0, ended.stderr


def test_calls_need_a_communicator():
    ended = run("import numpy, flux_tp; x = numpy.zeros((8, 8), 'f2'); flux_tp.all_gather_matmul(x, x)")
    assert ended.returncode == 1 and "call flux_tp.init() on every rank first" in ended.stderr
