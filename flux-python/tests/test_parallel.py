"""Models of transformers split over ranks, on the host transport, and on GPUs where there are four."""

import pytest

from ranks import Ranks

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0

CASES = [
    "llama_learns_alike",
    "mistral_learns_alike",
    "qwen2_learns_alike",
    "qwen3_learns_alike",
    "gpt_neox_learns_alike",
    "inference_is_alike",
    "inference_adds_residuals_and_normalises_in_its_ops",
    "inference_in_8_bits",
    "rows_are_split_without_gradients_and_hidden_states",
    "inference_has_gradients",
    "checkpoints_load_at_other_degrees",
    "fully_sharded_on_the_other_dimension",
    "compiled_models",
    "compiled_layers",
    "styles_stand_beside_those_of_torch",
    "default_styles_are_those_of_torch",
    "a_replicated_loss_counts_once",
    "norms_have_gradients_of_all_rows",
    "communicators_of_meshes_are_shared",
    "what_cannot_be_split_is_named",
    "examples_run",
]


@pytest.fixture(scope="module", params=["host", "auto"] if GPUS > 3 else ["host"])
def ranks(request):
    with Ranks(4, "cases_parallel", forked=True, transport=request.param) as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES)
def test_ranks(ranks, case):
    ranks.run(case)
