"""8-bit operands on the host transport, and on GPUs that multiply them."""

import pytest

from ranks import Ranks

torch = pytest.importorskip("torch", reason="torch is not installed")
HOPPERS = torch.cuda.is_available() and [torch.cuda.get_device_capability(at)[0] for at in range(torch.cuda.device_count())].count(9)

CASES = [
    "scaled_all_gather",
    "scaled_sums",
    "products_of_any_rows",
    "quantised_rows",
    "quantised_norms",
    "what_does_not_fit_is_refused",
    "quantised_modules",
    "prepared_ops_are_those_of_calls",
]
PLACES = [(world, transport) for transport in ("host", "auto") for world in (1, 2) if transport == "host" or HOPPERS >= world]


@pytest.fixture(scope="module", params=PLACES, ids=lambda place: f"{place[1]}-{place[0]}")
def ranks(request):
    world, transport = request.param
    with Ranks(world, "cases_scaled", forked=True, transport=transport) as ranks:
        yield ranks


@pytest.mark.parametrize("case", CASES)
def test_ranks(ranks, case):
    ranks.run(case)
