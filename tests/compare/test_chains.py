"""The peers really run the chain: no iteration is shorter than the chain allows, all repeats are there."""

import pytest

from gpp_plugin.compare.alternated_benchmarks import RUNTIMES, Chain, make_iteration, time_iterations
from tests.ranks import run_kept_ranks


def _measure(chain: Chain, repeats: int) -> dict[str, list[float]]:
    return time_iterations(
        {name: make_iteration(name, chain) for name in RUNTIMES}, repeats=repeats, warm_up=1
    )


def test_an_iteration_takes_at_least_its_critical_path():
    # 4 and 2 ms forward, 6 and 2 ms backward: what stage 1 does is hidden behind stage 0
    chain = Chain(
        forward_us=(4000.0, 2000.0), backward_us=(6000.0, 2000.0), boundary_bytes=(256,), num_micro_batches=3
    )
    times = run_kept_ranks(_measure, 2, chain, 2)[0]
    assert set(times) == {"deepspeed", "torch_1f1b"}
    for measured in times.values():
        assert len(measured) == 2
        assert min(measured) >= 3 * (4.0 + 6.0)


def test_a_chain_whose_numbers_disagree_is_refused():
    with pytest.raises(ValueError, match="2 forward times, 1 backward times and 1 boundaries"):
        Chain(forward_us=(1.0, 1.0), backward_us=(1.0,), boundary_bytes=(4,), num_micro_batches=1)
