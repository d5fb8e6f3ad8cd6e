"""One rank of `gpp bench in-flight`: trains a model of two uneven branches with two in-flight rules.

python -m gpp_benchmarks._in_flight_ranks SETTINGS_JSON
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from gpp_plugin.capture.captured_graph import CapturedGraph
from gpp_plugin.capture.export import capture_model
from gpp_plugin.compare.single_process import PeakMemory
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.profile import Profile
from gpp_plugin.launch import emit_event
from gpp_plugin.library.paper_modules import FeedForward
from gpp_plugin.model.graph.captured_part import whole_part
from gpp_plugin.plan.costs.cost_model import CostModel
from gpp_plugin.plan.explicit.explicit_plan import explicit_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.profile.measure import profile_blocks
from gpp_plugin.runtime.lane import Lane, channels_of, make_programs
from gpp_plugin.runtime.messages.transport import make_transport
from gpp_plugin.runtime.stage_module import StageModule
from gpp_plugin.runtime.stage_source import Reference, make_reference
from gpp_plugin.schedule.orders.in_flight import in_flight_from_source, plan_in_flight

TIMEOUT_S = 60.0
RULES: dict[str, Callable[[PipelinePlan], tuple[int, ...]]] = {
    "from sink": plan_in_flight,
    "from source": in_flight_from_source,
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InFlightSettings:
    """The work: two branches of feed-forward layers that meet in a loss; a stage a layer, a rank a stage."""

    long_layers: int
    short_layers: int
    hidden: int
    num_micro_batches: int
    micro_batch_size: int

    @property
    def num_ranks(self) -> int:
        """Return the number of stages: one a layer, and the loss."""
        return self.long_layers + self.short_layers + 1

    @property
    def mini_batch(self) -> int:
        """Return the samples of one step."""
        return self.num_micro_batches * self.micro_batch_size

    def stages(self) -> list[dict[str, object]]:
        """Return the plan as a user writes it."""
        layers = [f"long.{i}" for i in range(self.long_layers)]
        layers += [f"short.{i}" for i in range(self.short_layers)]
        return [{"modules": [path], "ranks": [rank]} for rank, path in enumerate([*layers, "*"])]

    def batch(self) -> dict[str, Tensor]:
        """Return a mini-batch, the same on every rank."""
        generator = torch.Generator().manual_seed(0)
        shapes = {"left": (self.hidden,), "right": (self.hidden,), "labels": ()}
        return {
            name: torch.randn(self.mini_batch, *shape, generator=generator) for name, shape in shapes.items()
        }


class _TwoBranches(nn.Module):
    def __init__(self, settings: InFlightSettings) -> None:
        super().__init__()
        hidden = settings.hidden
        self.long = nn.ModuleList(FeedForward(hidden, 4 * hidden) for _ in range(settings.long_layers))
        self.short = nn.ModuleList(FeedForward(hidden, 4 * hidden) for _ in range(settings.short_layers))
        self.head = nn.Linear(2 * hidden, 1)

    def forward(self, left: Tensor, right: Tensor, labels: Tensor) -> dict[str, Tensor]:
        for layer in self.long:
            left = layer(left)
        for layer in self.short:
            right = layer(right)
        scores = self.head(torch.cat([left, right], dim=-1)).squeeze(-1)
        return {"loss": F.mse_loss(scores, labels)}


class _Hooks:
    """Gradients are left in the parameters and dropped at the end: only activations are looked at."""

    loss_scale = 1.0

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def accumulate(self) -> None:
        pass

    def begin_reduction(self) -> None:
        pass

    def reduce_data(self) -> None:
        pass

    def reduce_tied(self) -> None:
        pass

    def step(self) -> None:
        self._module.zero_grad()


def main() -> None:
    """Measure on this rank; rank 0 reports."""
    settings = InFlightSettings(**json.loads(sys.argv[1]))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model, batch = _TwoBranches(settings), settings.batch()
    captured = capture_model(model, {name: rows[: settings.micro_batch_size] for name, rows in batch.items()})
    reference = make_reference(captured.analysis, "layer")
    told = [_profile(model, captured, reference, batch) if rank == 0 else None]
    dist.broadcast_object_list(told, src=0)
    assert told[0] is not None
    request = _request(settings, reference, told[0])
    plan = explicit_plan({"stages": settings.stages()}, request)
    costs = CostModel(request.graph, request.profile, request.cluster)
    for rule, count in RULES.items():
        ruled = _with_in_flight(plan, count(plan))
        measured = _measure(model, reference, ruled, batch)
        gathered: list[int] = [0] * settings.num_ranks
        dist.all_gather_object(gathered, measured)
        if rank == 0:
            emit_event(event="rule", rows=_rows(rule, ruled, costs, gathered))
    dist.barrier()
    dist.destroy_process_group()


def _profile(
    model: nn.Module, captured: CapturedGraph, reference: Reference, batch: dict[str, Tensor]
) -> Profile:
    return profile_blocks(
        captured,
        reference.block_graph,
        model_state=dict(model.named_parameters()),
        batch=batch,
        sample_counts=[captured.op_graph.num_samples],
        repeats=1,
        use_cache=False,
    )


def _request(settings: InFlightSettings, reference: Reference, profile: Profile) -> PlanRequest:
    device = Device(name="cpu", memory_bytes=1 << 40, flops_per_s=1e10, memory_bytes_per_s=1e9)
    link = Link(name="this machine", span=settings.num_ranks, bytes_per_s=1e9, latency_us=100.0)
    return PlanRequest(
        graph=reference.block_graph,
        profile=profile,
        cluster=Cluster(name="this machine", devices=(device,) * settings.num_ranks, links=(link,)),
        num_ranks=settings.num_ranks,
        mini_batch=settings.mini_batch,
        loss_unit=settings.micro_batch_size,
        micro_batch_sizes={"*": settings.micro_batch_size},
    )


def _with_in_flight(plan: PipelinePlan, counts: tuple[int, ...]) -> PipelinePlan:
    stages = [
        dataclasses.replace(stage, in_flight=count) for stage, count in zip(plan.stages, counts, strict=True)
    ]
    return dataclasses.replace(plan, stages=tuple(stages))


def _measure(model: nn.Module, reference: Reference, plan: PipelinePlan, batch: dict[str, Tensor]) -> int:
    """Train two mini-batches; return the most bytes autograd held on this rank in the second."""
    programs = make_programs(plan, reference)
    cpu = torch.device("cpu")
    transport = make_transport(device=cpu, channels=channels_of(programs), timeout_s=TIMEOUT_S)
    lane = Lane(
        source=whole_part(model, batch),
        reference=reference,
        plan=plan,
        program=next(program for program in programs if program.rank == dist.get_rank()),
        transport=transport,
        device=cpu,
    )
    tensors = dict(model.named_parameters())
    names = lane.prepare(batch).tensors
    module = StageModule(tensors={name: tensors[name] for name in names}, parameters=names)
    lane.bind(module, _Hooks(module))
    lane.run(batch)
    memory = PeakMemory(cpu)
    with memory.watch([*module.parameters(), *batch.values()]):
        lane.run(batch)
    transport.close()
    return memory.peak_bytes


def _rows(rule: str, plan: PipelinePlan, costs: CostModel, measured: list[int]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for stage, num_bytes in zip(plan.stages, measured, strict=True):
        blocks, local = costs.indices(stage.blocks), stage.local_batch_size
        held, empty = (
            costs.stage_memory(blocks, degree=1, local=local, in_flight=count)
            for count in (stage.in_flight, 0)
        )
        rows.append(
            {
                "rule": rule,
                "stage": stage.name,
                "in_flight": stage.in_flight,
                "planned_bytes": held - empty,
                "measured_bytes": num_bytes,
            }
        )
    return rows


if __name__ == "__main__":
    main()
