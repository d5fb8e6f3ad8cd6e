"""Predicts what a plan gains where its frozen branch runs a mini-batch ahead.

All ranks step together, so a mini-batch takes as long as its steady part (`schedule.look_ahead`) from an idle start:
what the branch made before is there, and what it makes meanwhile nobody waits for but the step.

Source: this project
Tests: tests/schedule/test_look_ahead.py
"""

from __future__ import annotations

from dataclasses import dataclass

from gpp_plugin.ir.cluster import Cluster
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.schedule.event_loop import message_transfers, run_task_graph
from gpp_plugin.schedule.look_ahead import ahead_graphs
from gpp_plugin.schedule.orders.forward_only import forward_only_stages, frozen_branch
from gpp_plugin.schedule.windows import part_durations
from gpp_plugin.simulate.predict import predict_iteration_us


@dataclass(frozen=True, slots=True, kw_only=True)
class AheadPrediction:
    """Microseconds of a mini-batch by itself, and with its frozen branch a mini-batch ahead.

    Args:
        stages: names of those that run ahead.
    """

    stages: tuple[str, ...]
    whole_us: float
    steady_us: float


def predict_ahead(plan: PipelinePlan, *, cluster: Cluster | None = None) -> AheadPrediction | None:
    """Predict a plan with and without look-ahead, reductions and steps left out; None where nothing runs ahead.

    Args:
        cluster: links; without one messages take no time.
    """
    branch = frozen_branch(plan)
    if plan.mode != "sync" or not branch:
        return None
    part = ahead_graphs(plan)["steady"]
    transfers = message_transfers(part, cluster) if cluster is not None else None
    times = run_task_graph(part, part_durations(part), transfers=transfers)
    frozen = forward_only_stages(plan)
    return AheadPrediction(
        stages=tuple(plan.stages[index].name for index in sorted(branch)),
        whole_us=predict_iteration_us(plan, cluster=cluster, forward_only_stages=frozen),
        steady_us=max(times.end),
    )
