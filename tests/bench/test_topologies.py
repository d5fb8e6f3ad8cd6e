"""`gpp bench topologies`: its graphs, and what they are compared with."""

from __future__ import annotations

import pytest
import torch

from gpp_benchmarks._topology_models import (
    TopologyStage,
    input_names,
    output_names,
    reference_gradients,
    topologies,
)


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
