"""`gpp bench topologies`: its graphs, its comparison, and one cell for real."""

from __future__ import annotations

import argparse

import pytest
import torch

from gpp_benchmarks import topologies as bench
from gpp_benchmarks._topology_models import (
    TopologyStage,
    input_names,
    largest_error,
    output_names,
    reference_gradients,
    topologies,
)


def arguments(**changes: object) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    return argparse.Namespace(**{**vars(parser.parse_args([])), **changes})


def test_every_stage_has_its_ranks() -> None:
    for topology in topologies():
        ranks = [rank for node in topology.nodes for rank in topology.ranks(node)]
        assert ranks == list(range(topology.num_ranks))
        assert all(topology.node_of_rank(rank) in topology.nodes for rank in ranks)


@pytest.mark.parametrize("topology", topologies(), ids=lambda topology: topology.name)
def test_the_reference_is_the_gradient_of_the_summed_losses(topology) -> None:  # type: ignore[no-untyped-def]
    """Finite differences along a random direction agree."""
    gradients = reference_gradients(topology)
    generator = torch.Generator().manual_seed(1)
    directions = {
        name: torch.randn(g.shape, generator=generator, dtype=g.dtype) for name, g in gradients.items()
    }

    def loss(step: float) -> float:
        known = topology.batch()
        total = 0.0
        for node in topology.nodes:
            stage = TopologyStage(topology, node)
            with torch.no_grad():
                for name, parameter in stage.named_parameters():
                    parameter += step * directions.get(f"{node.name}.{name}", torch.zeros_like(parameter))
                made = stage(**{name: known[name] for name in input_names(topology, node)})
            known.update(zip(output_names(topology, node), made, strict=True))
            total += float(made[0]) if topology.is_sink(node) else 0.0
        return total

    slope = (loss(1e-6) - loss(-1e-6)) / 2e-6
    assert slope == pytest.approx(
        sum(float((gradients[n] * directions[n]).sum()) for n in gradients), rel=1e-6
    )


def test_a_missing_or_wrong_gradient_is_an_error() -> None:
    wanted = {"a": torch.ones(2), "b": torch.ones(2)}
    assert largest_error(wanted, wanted) == 0.0
    assert largest_error({"a": torch.ones(2)}, wanted) == 1.0
    assert largest_error({"a": torch.ones(2), "b": torch.full((2,), 1.5)}, wanted) == pytest.approx(0.5)
    assert largest_error({"a": torch.ones(2), "b": torch.full((2,), torch.nan)}, wanted) == float("inf")
    assert largest_error({**wanted, "c": torch.ones(2)}, wanted) > 1.0  # a gradient where there is none


@pytest.mark.timeout(240)
def test_a_cell_is_exact() -> None:
    report = bench.run(arguments(systems=["gpp"], topologies=["tensor 2 beside 1"], rounds=1, limit=100.0))
    (row,) = report["rows"]
    assert (row["status"], row["detail"]) == ("exact", "")
    assert row["max_relative_gradient_error"] <= 1e-12
    assert row["iteration_ms"] > 0
