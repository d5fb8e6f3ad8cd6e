"""One rank of a rehearsed plan: the executor and transport of the runtime around an emulated stage."""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.schedule import Task
from gpp_plugin.ir.timeline import Timeline
from gpp_plugin.rehearse.compute import EmulatedCompute, EmulatedHooks
from gpp_plugin.rehearse.programs import make_programs
from gpp_plugin.rehearse.settings import LEAST_COMM_TIMEOUT_S, RehearsalSettings, scale_tensors
from gpp_plugin.runtime.compute import boundary_gradients
from gpp_plugin.runtime.executor import StageExecutor
from gpp_plugin.runtime.meeting import Meeting
from gpp_plugin.runtime.pipeline import channels_of
from gpp_plugin.runtime.timelines import gather_timeline, start_clock
from gpp_plugin.runtime.transport import make_transport
from gpp_plugin.simulate.durations import Durations, duration_reader

CPU = torch.device("cpu")


class RehearsalRank:
    """This rank's part of a plan; made on all ranks of the plan together, which are those of the joined
    process group.

    Args:
        plan: with times that are already scaled.
        has_step: ranks agree with each other before the optimizer step, as they do on the gradients' norm.
        durations: of single tasks, where the plan's times do not hold.
    """

    def __init__(
        self,
        plan: PipelinePlan,
        settings: RehearsalSettings,
        *,
        has_step: bool = True,
        durations: Durations | None = None,
    ) -> None:
        rank = dist.get_rank()
        timeout_s = settings.comm_timeout_s or LEAST_COMM_TIMEOUT_S
        programs = make_programs(plan, validate=False)
        specs = scale_tensors(plan, settings.scale_bytes)
        data_groups = [
            _make_groups([stage.data_ranks(t) for t in range(stage.tensor)], timeout_s)
            for stage in plan.stages
        ]
        tensor_groups = [
            _make_groups([stage.tensor_ranks(d) for d in range(stage.degree)], timeout_s)
            for stage in plan.stages
        ]
        transport = make_transport(
            device=CPU,
            channels=channels_of(programs),
            names=[f"{plan.stages[e.src].name} -> {plan.stages[e.dst].name}" for e in plan.edges],
            timeout_s=timeout_s,
        )
        program = programs[rank]
        index = program.stage
        read = duration_reader(plan, durations)
        self._plan = plan
        everyone = dist.group.WORLD if plan.num_ranks > 1 else None
        self._meeting = Meeting(
            group=everyone, who=f"rank {rank}, stage {plan.stages[index].name!r}", timeout_s=timeout_s
        )
        self._inputs: list[tuple[Tensor, ...]] = [()] * plan.num_micro_batches(index)
        self._executor = StageExecutor(
            plan=plan,
            program=program,
            compute=EmulatedCompute(
                plan,
                index,
                specs=specs,
                gradients=boundary_gradients(program, plan, specs),
                task_us=lambda kind, half, micro_batch: read(
                    Task(stage=index, kind=kind, micro_batch=micro_batch, half=half), rank
                ),
                tensor_group=tensor_groups[index],
            ),
            specs=specs,
            transport=transport,
            hooks=EmulatedHooks(
                data_group=data_groups[index],
                gradient_bytes=plan.stages[index].gradient_bytes * settings.scale_bytes,
                world_group=everyone if has_step else None,
            ),
            device=CPU,
        )

    def iterate(self) -> None:
        """Run one mini-batch."""
        self._executor.run(self._inputs)

    def run(self) -> Timeline | None:
        """Run one mini-batch; return all ranks' timeline on the first one, None elsewhere."""
        clock = start_clock(self._meeting)
        result = self._executor.run(self._inputs, record=True)
        timeline = gather_timeline(result.events, clock, plan=self._plan, meeting=self._meeting)
        return None if timeline is None else dataclasses.replace(timeline, source="rehearsed")


def _make_groups(rows: Sequence[tuple[int, ...]], timeout_s: float) -> dist.ProcessGroup | None:
    """Make a gloo group of each row of ranks, by all ranks alike; return this rank's, None where it is alone in it."""
    own = None
    for row in rows:
        if len(row) > 1:
            group = dist.new_group(list(row), timeout=datetime.timedelta(seconds=timeout_s), backend="gloo")
            own = group if dist.get_rank() in row else own
    return own
