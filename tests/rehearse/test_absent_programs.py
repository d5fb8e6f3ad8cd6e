"""A rehearsal's delays under programs of units that lack a branch: tasks that are there, no others, and less time."""

import dataclasses
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from gpp_plugin.ir.tensors import TensorSpec, batch_layout
from gpp_plugin.ir.timeline import Event, EventKind
from gpp_plugin.rehearse.emulated_compute import EmulatedCompute
from gpp_plugin.runtime.compute import boundary_gradients
from gpp_plugin.runtime.executor import StageExecutor
from gpp_plugin.schedule.durations import stage_task_us
from gpp_plugin.simulate.program_times import simulate_programs
from tests.runtime.test_tensor_grids import Hooks, ThreadTransport
from tests.runtime.test_unit_lane import Queues
from tests.schedule.test_absent import VISION, language_model, of_units, programs_of


def rehearse(images: Sequence[bool]) -> tuple[list[Event], float]:
    """Return what the ranks did of a mini-batch, and how long that takes in simulation."""
    plan = language_model(len(images), forward_us=4000.0, backward_us=8000.0)
    tower = dataclasses.replace(plan.stages[VISION], forward_us=9000.0, backward_us=18000.0)
    plan = dataclasses.replace(plan, stages=(tower, *plan.stages[1:]))
    _, programs = programs_of(plan, of_units(images))
    specs = {
        name: TensorSpec(
            name=name,
            dtype="float32",
            shape=(1, 2),
            num_samples=1,
            layout=batch_layout(0, 1),
            requires_grad=True,
        )
        for edge in plan.edges
        for name in edge.batch_tensors
    }
    queues = Queues()
    executors = []
    for program in programs:
        stage = plan.stages[program.stage]
        compute = EmulatedCompute(
            plan,
            program.stage,
            specs=specs,
            gradients=boundary_gradients(program, plan, specs),
            task_us=lambda kind, half, _, stage=stage: stage_task_us(stage, kind, half),  # type: ignore[misc]
        )
        executors.append(
            StageExecutor(
                plan=plan,
                program=program,
                compute=compute,
                specs=specs,
                transport=ThreadTransport(queues),  # type: ignore[arg-type]
                hooks=Hooks(),  # type: ignore[arg-type]
                device=torch.device("cpu"),
            )
        )
    inputs = [()] * len(images)
    with ThreadPoolExecutor(len(executors)) as pool:
        results = list(pool.map(lambda e: e.run(inputs, record=True), executors))
    predicted = simulate_programs(plan, programs)
    return [e for result in results for e in result.events], max(e.end_us for e in predicted.events)


def test_ranks_rehearse_the_tasks_that_are_there() -> None:
    times = []
    for images in ([True] * 4, [True, False, True, False], [False] * 4):
        events, predicted = rehearse(images)
        forwards = [e for e in events if e.kind is EventKind.FORWARD]
        assert sorted(e.micro_batch for e in forwards if e.stage == VISION) == [
            unit for unit, image in enumerate(images) if image
        ]
        assert len([e for e in forwards if e.stage != VISION]) == 3 * len(images)
        times.append(predicted)
    assert times[0] > times[1] > times[2]
