"""The convolutional network operator by operator."""

import pytest

from gpp_plugin.errors import PlanError
from gpp_plugin.library.paper_graphs import build_model


def test_sizes_are_those_of_the_published_networks():
    """DawnPiper trains 28 M parameters; torchgpipe's AmoebaNet-D (18, 208) has 81.5 M without its classifier."""
    model = build_model("amoebanet")
    assert len(model.graph.blocks) > 1000
    assert sum(s.parameters for s in model.specs) / 1e6 == pytest.approx(28, rel=0.02)
    large = build_model("amoebanet", filters=208)
    assert sum(s.parameters for s in large.specs) / 1e6 == pytest.approx(81.5, rel=0.01)


def test_order_is_topological_and_what_is_kept_adds_up():
    graph = build_model("amoebanet", layers=3, filters=16, image=64).graph
    position = {block.name: i for i, block in enumerate(graph.blocks)}
    assert all(position[edge.src] < position[edge.dst] for edge in graph.edges)
    charged = dict.fromkeys(position, 0)
    for tensor in graph.saved:
        charged[tensor.kept_by[0]] += tensor.bytes
        assert all(position[tensor.made_by] <= position[keeper] for keeper in tensor.kept_by)
    assert charged == {block.name: block.saved_bytes for block in graph.blocks}
    shared = [tensor for tensor in graph.saved if len(tensor.kept_by) > 1]
    assert shared, "a cell's input is kept by several operators and counted once"


@pytest.mark.parametrize("sizes", [{"layers": 4}, {"filters": 20}])
def test_odd_sizes_get_one_line(sizes):
    with pytest.raises(PlanError, match="multiple of 3"):
        build_model("amoebanet", **sizes)
