"""What collectives take: by hand, against nccl-tests' figures, and the same to every planner."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from gpp_benchmarks.published._nccl import nccl_rows
from gpp_plugin.errors import ConfigError
from gpp_plugin.ir.cluster import Cluster, Link, MeasuredCollective
from gpp_plugin.ir.plan import ModelGrid, Stage
from gpp_plugin.plan.cluster_files import cluster_names, describe_cluster, read_cluster
from gpp_plugin.plan.costs.collective_costs import CollectiveCosts, collectives, stack_lines
from gpp_plugin.plan.costs.cost_model import CostModel
from tests.plan.graphs import chain, make_cluster, make_profile, walked_us

GB = 1e9


def nodes(adapters: int | None = None, num: int = 2, **inner: object) -> Cluster:
    """Nodes of four ranks: 100 GB/s and 2 us inside, 10 GB/s a link or adapter and 5 us between."""
    links = (
        Link(name="inner", span=4, bytes_per_s=100e9, latency_us=2.0, **inner),  # type: ignore[arg-type]
        Link(name="outer", span=4 * num, bytes_per_s=10e9, latency_us=5.0, adapters=adapters),
    )
    return dataclasses.replace(make_cluster(4 * num), links=links)


@pytest.mark.parametrize(
    ("adapters", "ranks", "beside", "us"),
    [
        (None, (0, 1, 2, 3), (), 2 * 3 * 2.0 + 1.5e4),  # inside: 6 steps, 1.5 GB at 100 GB/s
        (None, range(8), (), 2 * 2 * 3.0 * 2.0 + 10.0 + 1.75e6 / 40),  # four links out of a node
        (1, range(8), (), 2 * 2 * 3.0 * 2.0 + 10.0 + 1.75e6 / 10),  # one adapter
        (2, range(8), (), 2 * 2 * 3.0 * 2.0 + 10.0 + 1.75e6 / 20),
        (2, (0, 1, 4, 5), (), 2 * 2 * 2.0 + 10.0 + 1.5e6 / 10),  # ranks 0 and 1 have one adapter between them
        (2, (0, 2, 4, 6), (), 2 * 2 * 2.0 + 10.0 + 1.5e6 / 20),
        (2, (1, 2, 3, 4), (), 2 * 2 * 2.0 + 10.0 + 1.5e6 / 10),  # one link out of the second node
        (None, (0, 4), (), 10.0 + 1e6 / 10),
        (1, (0, 4), range(8), 10.0 + 1e6 / 2.5),  # with three like it on the same adapter
        (None, (0, 4), range(8), 10.0 + 1e6 / 10),
        (None, (3,), (), 0.0),
    ],
)
def test_a_large_all_reduce_is_a_ring_over_all_links_out_of_a_node(adapters, ranks, beside, us):
    found = collectives(nodes(adapters), ranks, beside)
    assert found.all_reduce.us(GB) == pytest.approx(us)
    assert found.gather.us(GB) == pytest.approx(us / 2)
    assert found.all_reduce.us(0) == 0.0 == found.gather.us(0)


def test_a_small_one_goes_up_and_down_a_tree_of_nodes():
    # 16 nodes: in a ring 2 x (16 x 3 x 2 + 15 x 5) us; in a tree 2 x (3 x 2 + 4 x 5)
    found = collectives(nodes(num=16), range(64))
    assert found.all_reduce.us(1.0) == pytest.approx(2 * (3 * 2 + 4 * 5), abs=0.01)
    assert found.gather.us(1.0) == pytest.approx(16 * 3 * 2 + 15 * 5, abs=0.01)
    assert found.all_reduce.us(GB) == pytest.approx(2 * (16 * 3 * 2 + 15 * 5) + 63 / 32 * 1e6 / 40)


def test_a_measured_node_and_sums_in_its_switch():
    ring = nodes(
        all_reduce=MeasuredCollective(bytes_per_s=60e9), all_gather=MeasuredCollective(bytes_per_s=80e9)
    )
    assert collectives(ring, range(4)).all_reduce.us(GB) == pytest.approx(12 + 1.5e6 / 60)
    assert collectives(ring, range(2)).gather.us(GB) == pytest.approx(2 + 0.5e6 / 80)
    fast = MeasuredCollective(bytes_per_s=120e9, latency_us=9.0)
    switch = nodes(all_reduce=fast, all_gather=MeasuredCollective(bytes_per_s=80e9, latency_us=12.0))
    assert collectives(switch, range(4)).all_reduce.us(GB) == pytest.approx(9 + 1.5e6 / 120)
    assert collectives(switch, range(4)).gather.us(GB) == pytest.approx(12 + 0.75e6 / 80)
    # two ranks: a ring sends 1 GB of a rank at 80 GB/s, the switch is sent 1.5 GB at 100
    assert collectives(switch, range(2)).all_reduce.us(GB) == pytest.approx(4 + 1e6 / 80)
    # 1 GB leaves each of two nodes over four links
    assert collectives(switch, range(8)).all_reduce.us(GB) == pytest.approx(9 + 10 + 1e6 / 40)


def test_figures_measured_over_all_ranks_scale_what_fewer_take():
    def of(**measured: MeasuredCollective) -> Cluster:
        plain = nodes()
        outer = dataclasses.replace(plain.links[1], **measured)
        return dataclasses.replace(plain, links=(plain.links[0], outer))

    slow = of(all_reduce=MeasuredCollective(bytes_per_s=20e9, latency_us=52.0))
    assert collectives(slow, range(8)).all_reduce.us(GB) == pytest.approx(1.75e6 / 20, rel=1e-3)
    assert collectives(slow, range(8)).all_reduce.us(1.0) == pytest.approx(52.0, rel=1e-3)
    # half as quick as four links of 10 GB/s: so are two
    assert collectives(slow, (0, 1, 4, 5)).all_reduce.us(GB) == pytest.approx(1.5e6 / 10, rel=1e-3)
    assert collectives(slow, range(4)) == collectives(nodes(), range(4)), "nothing leaves the node"
    assert collectives(slow, range(8)).gather == collectives(nodes(), range(8)).gather


def test_zero_has_a_reduce_scatter_and_an_all_gather_in_place_of_an_all_reduce():
    found = collectives(nodes(all_reduce=MeasuredCollective(bytes_per_s=200e9)), range(4))
    assert found.reduction(0).us(GB) == found.all_reduce.us(GB) == pytest.approx(4 + 1.5e6 / 200)
    assert found.reduction(1).us(GB) == found.reduction(3).us(GB) == 2 * found.gather.us(GB)


def test_the_same_as_walked_on_random_networks():
    rng = random.Random(7)
    for _ in range(300):
        spans = rng.choice([(4, 8, 24), (8, 32), (2, 16), (16,)])
        links = tuple(
            Link(
                name=str(i),
                span=span,
                bytes_per_s=10 ** rng.uniform(9, 11),
                latency_us=rng.uniform(0, 20),
                adapters=rng.choice([None, 1, spans[i - 1] // 2]) if i else None,
            )
            for i, span in enumerate(spans)
        )
        cluster = dataclasses.replace(make_cluster(spans[-1]), links=links)
        ranks = rng.sample(range(spans[-1]), rng.randint(1, spans[-1]))
        beside = rng.sample(range(spans[-1]), rng.randint(0, spans[-1]))
        for num_bytes in (1.0, 1e5, 1e7, 1e10):
            found = collectives(cluster, ranks, beside).all_reduce.us(num_bytes)
            assert found == pytest.approx(walked_us(cluster, ranks, num_bytes, beside=beside)), (
                ranks,
                beside,
            )


@pytest.mark.parametrize("name", cluster_names())
def test_planners_without_ranks_price_what_the_placed_stage_takes(name):
    """Arrays, columns of lines, and numbers: one price (`CollectiveCost`), at every ZeRO stage."""
    graph = chain(2)
    cluster = read_cluster(name, num_devices=32)
    sizes = np.array([[0.0, 1e3], [1e6, 1e9]])
    for zero in range(4):
        costs = CostModel(graph, make_profile(graph, parameter=1e8), cluster, zero_stage=zero)
        for degree, tensor in ((1, 1), (2, 1), (4, 2), (16, 1), (4, 8)):
            price = costs.reduction(degree, ModelGrid(tensor=tensor))
            ranks = tuple(range(degree * tensor))
            stage = Stage(
                name="s",
                blocks=("layers.0",),
                ranks=ranks,
                tensor=tensor,
                micro_batch_size=degree,
                in_flight=1,
            )
            assert costs.reduction_us(stage) == pytest.approx(price.us(costs.group_gradient_bytes([0])))
            latency, per_byte = stack_lines([price, costs.reduction(1)])
            for size, found in np.ndenumerate(price.us(sizes)):
                assert found == pytest.approx(price.us(float(sizes[size])))
                if sizes[size]:
                    assert found == pytest.approx((latency + sizes[size] * per_byte).min(axis=0)[0])
    assert collectives(cluster, (3,)) == CollectiveCosts()


def test_tensor_ranks_sum_by_the_quickest_algorithm_at_each_size():
    """Sums of tensor ranks on several nodes: a tree where they are small, a ring where they are large."""
    cluster = nodes(num=4)
    price = collectives(cluster, range(16)).all_reduce
    assert len(price.lines) == 2
    from tests.plan.test_tensor_sizes import divisible, profile_of

    for num_bytes in (8, 80_000_000):
        graph = divisible(16, num_bytes=num_bytes)
        graph = dataclasses.replace(
            graph, sharding=tuple(dataclasses.replace(each, degrees=(16,)) for each in graph.sharding)
        )
        costs = CostModel(graph, profile_of(graph), cluster)
        own, whole = graph.sharding[0], costs.stage_times([0], 1.0)[0]
        alone = whole * (1 - own.flop_share * 15 / 16)
        sums = own.forward_sums * price.us(own.forward_sum_bytes / own.forward_sums / graph.num_samples)
        assert costs.at_grid(ModelGrid(tensor=16)).stage_times([0], 1.0)[0] == pytest.approx(alone + sums)
        # a stage whose rows are in one node sums there, and one whose row is not over both
        inside = costs.at_grid(ModelGrid(tensor=4), (4, 5, 6, 7))
        assert inside is costs.at_grid(ModelGrid(tensor=4))


def test_published_figures_of_nccl_tests():
    rows = list(nccl_rows())
    held = [row for row in rows if row.limit is not None]
    assert [row.case for row in held if not row.is_within] == []
    assert all(row.limit == 0.15 for row in held)
    names = " ".join(row.case for row in held)
    assert "1 x 8 H100" in names and "2 x 8 H100" in names
    assert any("4 x 8 H100" in row.case for row in rows)


def test_measured_figures_in_descriptions():
    plain = {
        "name": "m",
        "nodes": 2,
        "devices": [{"name": "gpu", "count": 4, "memory_gb": 16, "tflops": 10, "memory_gb_per_s": 900}],
        "links": [
            {"name": "inner", "span": 4, "gb_per_s": 50},
            {"name": "outer", "span": 8, "gb_per_s": 10, "all_reduce": {"gb_per_s": 12.5, "latency_us": 40}},
        ],
    }
    cluster = read_cluster(plain)
    assert cluster.links[1].all_reduce == MeasuredCollective(bytes_per_s=12.5e9, latency_us=40.0)
    assert read_cluster(describe_cluster(cluster)) == cluster
    for value, message in (
        (7, r"links\[1\].all_reduce: expected an object, found int"),
        ({"gb_per_s": 0}, r"links\[1\].all_reduce.gb_per_s is 0; it must be a number above 0"),
        ({"gb_per_s": 1, "latency": 1}, r"links\[1\].all_reduce: unknown key 'latency'"),
        ({"latency_us": 1}, r"links\[1\].all_reduce: gb_per_s is missing"),
        ({"gb_per_s": 1, "latency_us": None}, r"links\[1\].all_reduce.latency_us is null; it must be"),
    ):
        plain["links"][1]["all_reduce"] = value  # type: ignore[index]
        with pytest.raises(ConfigError, match=message) as caught:
            read_cluster(plain)
        assert "\n" not in str(caught.value)
