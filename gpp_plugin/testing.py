"""Checks that any planner, schedule or transport must pass; ours run them too, and so should those of other packages.

In a package's own tests, in a few lines::

    import gpp_plugin.testing

    def test_planner() -> None:
        gpp_plugin.testing.check_planner("halves")           # a name, or the function itself

    def test_schedule() -> None:
        gpp_plugin.testing.check_schedule("patient")         # a name, or the object

    def test_transport() -> None:
        gpp_plugin.testing.check_transport("relay")          # a name: three processes on this machine use it

What is wrong is a `CheckFailed` (an AssertionError) that says in which case. The judges share no code with what they
judge: plans are held against `plan.validate_plan`, programs against `schedule.checks.validate_programs`, which
recompute what they look at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from gpp_plugin.errors import GppError, PlanError, PlanInfeasible
from gpp_plugin.ir.cluster import Cluster, Device, Link
from gpp_plugin.ir.plan import PipelinePlan, Stage, StageEdge
from gpp_plugin.ir.schedule import StageSchedule, TaskKind
from gpp_plugin.ir.serialize import fingerprint
from gpp_plugin.launch import run_ranks
from gpp_plugin.library.analytic_models import AnalyticModel, assemble, linear, path_edges, profile_model
from gpp_plugin.plan.registry import make_plan
from gpp_plugin.plan.request import PlanRequest
from gpp_plugin.plugins import PLANNERS, SCHEDULES, TRANSPORTS, Planner, Schedule
from gpp_plugin.rehearse.rehearsal import make_async_programs, programs_of_plan
from gpp_plugin.schedule.build import build_schedules, plan_in_flight
from gpp_plugin.schedule.checks.order_check import check_schedules
from gpp_plugin.schedule.checks.validate_programs import validate_programs
from gpp_plugin.schedule.lower import lower_schedules
from gpp_plugin.simulate.predict import predict_iteration_us

__all__ = [
    "CheckFailed",
    "check_planner",
    "check_schedule",
    "check_transport",
    "planner_requests",
    "schedule_plans",
]

TRANSPORT_RANKS = 3
TRANSPORT_TIMEOUT_S = 180.0


class CheckFailed(AssertionError):
    """Something contributed is wrong; the text names it, the case, and what is wrong."""


# ---- planners ------------------------------------------------------------------------------------------------


def check_planner(planner: str | Planner) -> dict[str, PipelinePlan | None]:
    """Run a planner on small requests of every kind and prove each of its plans.

    In each case of `planner_requests`: the plan is valid for model, memory and request; its programs finish and keep
    to its in-flight counts; the same request gives the same plan; and the request is left as it was. It may find
    a case infeasible, in one line, but not the plain ones.

    Args:
        planner: a registered name, or the function.

    Returns:
        The plan of each case; None where there is none.

    Raises:
        CheckFailed: names the case.
    """
    if not isinstance(planner, str):
        with PLANNERS.lent("checked planner", planner) as name:
            return check_planner(name)
    return {
        case: _check_plan(
            f"planner {planner!r}, {case}", planner, request, may_fail=not case.startswith("plain")
        )
        for case, request in planner_requests().items()
    }


def planner_requests() -> Mapping[str, PlanRequest]:
    """Return small requests, each of another kind, by the name of the case; those called plain have an answer."""
    # Sixteen samples a step, all of them one loss unless a case says otherwise. A chain has one way to be cut for
    # every number of stages, branches have many; the memory of "little memory" holds half of the whole model's
    # parameters, gradients and optimizer on a rank, so that one data-parallel stage never fits there.
    chain, branches = _chain(8), _branches(2, 3)
    tight = _request(chain, 4)
    most = sum(
        cost.parameter_bytes + cost.gradient_bytes + cost.optimizer_bytes for cost in tight.profile.costs
    )
    return {
        "plain chain on one rank": _request(chain, 1),
        "plain chain on two ranks": _request(chain, 2),
        "plain chain on four ranks": _request(chain, 4),
        "plain branches on four ranks": _request(branches, 4),
        "two stages": _request(branches, 4, num_stages=2),
        "a stage for every rank": _request(chain, 4, num_stages=4),
        "two ranks a stage": _request(chain, 4, data_parallel=2),
        "micro-batches of four samples": _request(branches, 2, micro_batch_sizes={"*": 4}),
        "one loss unit a rank": _request(chain, 4, keep_units=True, loss_unit=2),
        "gpipe": _request(branches, 4, schedule="gpipe"),
        "zero 2": _request(chain, 4, zero_stage=2),
        "zero 3": _request(chain, 4, zero_stage=3),
        "mode async": _request(chain, 2, mode="async", loss_unit=2, micro_batch_sizes={"*": 2}),
        "three ranks": _request(branches, 3),
        "little memory": dataclasses.replace(tight, memory_limit_bytes=most // 2),
        "hardly any memory": dataclasses.replace(tight, memory_limit_bytes=1),
    }


def _check_plan(where: str, planner: str, request: PlanRequest, *, may_fail: bool) -> PipelinePlan | None:
    before = fingerprint(request.graph), fingerprint(request.profile)
    with _failing(where):
        # many planners know synchronous pipelines only, and may say so in their own way
        refusal = PlanError if request.mode == "async" else PlanInfeasible
        try:
            plan = make_plan(planner, request)
        except refusal as error:
            _require(may_fail, where, f"finds no plan where there is one: {error}")
            _require(
                "\n" not in str(error).strip(), where, f"says why there is no plan in several lines: {error}"
            )
            return None
        _require(make_plan(planner, request) == plan, where, "makes another plan of the same request")
        if plan.mode == "async":
            make_async_programs(plan)
        else:
            programs_of_plan(plan)
    after = fingerprint(request.graph), fingerprint(request.profile)
    _require(before == after, where, "changes the request it is given")
    return plan


def _chain(length: int) -> AnalyticModel:
    """Return layers one behind the other, each twice as dear as the one before, four times at most."""
    specs = [linear(f"layers.{i}", 256, 256, rows=1 << (i % 3)) for i in range(length)]
    return assemble("chain", specs, path_edges([spec.name for spec in specs]), loss=specs[-1].name)


def _branches(count: int, length: int) -> AnalyticModel:
    """Return branches of layers that meet in a head; the first one is twice as dear as the others."""
    paths = [
        [linear(f"branch{b}.layers.{i}", 256, 256, rows=2 if b == 0 else 1) for i in range(length)]
        for b in range(count)
    ]
    head = linear("head", count * 256, 1)
    edges = [edge for path in paths for edge in path_edges([*(spec.name for spec in path), head.name])]
    return assemble("branches", [*(spec for path in paths for spec in path), head], edges, loss=head.name)


def _request(model: AnalyticModel, num_ranks: int, **changes: object) -> PlanRequest:
    device = Device(name="unit", memory_bytes=1 << 34, flops_per_s=1e12, memory_bytes_per_s=1e11)
    cluster = Cluster(
        name="test",
        devices=(device,) * num_ranks,
        links=(Link(name="all", span=num_ranks, bytes_per_s=1e9, latency_us=5.0),),
    )
    plain = PlanRequest(
        graph=model.graph,
        profile=profile_model(model, device, largest=16),
        cluster=cluster,
        num_ranks=num_ranks,
        mini_batch=16,
        loss_unit=16,
    )
    return dataclasses.replace(plain, **changes)  # type: ignore[arg-type]


# ---- schedules -----------------------------------------------------------------------------------------------


def check_schedule(schedule: str | Schedule) -> dict[str, tuple[StageSchedule, ...]]:
    """Let a schedule order the stages of small plans of every shape, and prove the programs that come of it.

    In each case of `schedule_plans`: every stage runs all its micro-batches, each forward before its backward, within
    its in-flight count; the programs of all ranks finish even serially, with rendezvous messages; a second call gives
    the same orders. Cases are tried with the counts that the schedule asks for and with one more, on all stages and
    beside 1F1B on every second one, with stages that train nothing, with ZeRO 2's reductions, and in halves.

    Args:
        schedule: a registered name, or the object.

    Returns:
        The orders of each case, in the order of stages.

    Raises:
        CheckFailed: names the case, and shows the orders where they are at fault.
    """
    if not isinstance(schedule, str):
        with SCHEDULES.lent("checked schedule", schedule) as name:
            return check_schedule(name)
    traits: Schedule = SCHEDULES.load(schedule)
    return {
        case: _check_orders(f"schedule {schedule!r}, {case}", schedule, traits, plan)
        for case, plan in schedule_plans(schedule).items()
    }


def schedule_plans(schedule: str) -> Mapping[str, PipelinePlan]:
    """Return small plans whose stages have ``schedule``, by the name of the case, with no in-flight counts yet."""
    # Links are (producer, consumer) by stage; sizes are samples of a micro-batch, of twelve in a mini-batch: [2, 4, 6]
    # run six, three and two micro-batches, and a task of the second reads rows of two tasks of the first.
    chain, branches = [(0, 1), (1, 2), (2, 3)], [(0, 1), (1, 4), (2, 3), (3, 4)]
    diamond = [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)]
    return {
        "one stage": _plan(schedule, [2], []),
        "a chain of four": _plan(schedule, [2, 2, 2, 2], chain),
        "a chain with one micro-batch": _plan(schedule, [12, 12, 12, 12], chain),
        "a chain whose last stage is slow": _plan(
            schedule, [2, 2, 2, 2], chain, forward_us=(1.0, 1.0, 1.0, 9.0)
        ),
        "two branches": _plan(schedule, [2] * 5, branches),
        "branches of other micro-batches": _plan(schedule, [2, 4, 6, 2, 12], branches),
        "a diamond with a short cut": _plan(schedule, [4, 2, 2, 4], diamond),
        "a diamond on several ranks": _plan(schedule, [4, 4, 2, 4], diamond, degrees=(2, 1, 1, 4)),
        "two graphs that do not meet": _plan(schedule, [2, 2, 4, 4], [(0, 1), (2, 3)]),
    }


def _plan(
    schedule: str,
    sizes: Sequence[int],
    links: Sequence[tuple[int, int]],
    *,
    degrees: Sequence[int] = (),
    forward_us: Sequence[float] = (),
) -> PipelinePlan:
    """Return a plan of twelve samples; ``sizes`` are the micro-batches of its stages."""
    # Stage i is block "b<i>" on the next ``degrees[i]`` ranks; a forward takes a microsecond for each sample of
    # the micro-batch unless ``forward_us`` says otherwise, a backward twice that. Edges carry one tensor each with its
    # gradient. E.g. sizes [4, 2] with degrees (2, 1):
    #
    #     s0   ranks 0, 1   3 micro-batches of 4, two samples a rank     forward 4 us, backward 8 us
    #     s1   rank 2       6 micro-batches of 2                         forward 2 us, backward 4 us
    stages, first_rank = [], 0
    for index, size in enumerate(sizes):
        degree = degrees[index] if degrees else 1
        forward = forward_us[index] if forward_us else float(size)
        stages.append(
            Stage(
                name=f"s{index}",
                blocks=(f"b{index}",),
                ranks=tuple(range(first_rank, first_rank + degree)),
                micro_batch_size=size,
                in_flight=1,
                schedule=schedule,
                forward_us=forward,
                backward_us=2 * forward,
            )
        )
        first_rank += degree
    edges = tuple(
        StageEdge(src=src, dst=dst, batch_tensors=(f"x{src}",), gradient_tensors=(f"x{src}",))
        for src, dst in links
    )
    return PipelinePlan(
        model="check",
        graph="none",
        planner="none",
        mini_batch=12,
        loss_unit=1,
        stages=tuple(stages),
        edges=edges,
    )


def _check_orders(
    where: str, schedule: str, traits: Schedule, plan: PipelinePlan
) -> tuple[StageSchedule, ...]:
    with _failing(where):
        plan = _with_counts(plan)
        orders = _proved(where, plan)
        _require(build_schedules(plan) == orders, where, "orders the same plan in another way")
        kinds = {task.kind for order in orders for task in order.tasks}
        if TaskKind.WEIGHT_GRADIENT in kinds:
            _require(traits.splits_backward, where, "splits backwards; set splits_backward")
        if traits.holds_all:
            all_held = [plan.num_micro_batches(i) for i in range(len(plan.stages))]
            _require([s.in_flight for s in plan.stages] == all_held, where, "holds_all, but holds less")
    with _failing(f"{where}, one more in flight"):
        _proved(f"{where}, one more in flight", _with_counts(plan, more=1))
    with _failing(f"{where}, beside 1f1b"):
        mixed = ["1f1b" if index % 2 else stage.schedule for index, stage in enumerate(plan.stages)]
        _proved(f"{where}, beside 1f1b", _with_counts(plan.with_each(schedule=mixed)))
    with _failing(f"{where}, nothing trained in the first stage"):
        edges = tuple(
            dataclasses.replace(edge, gradient_tensors=()) if edge.src == 0 else edge for edge in plan.edges
        )
        frozen = frozenset({0}) if len(plan.stages) > 1 else frozenset[int]()
        _proved(where, dataclasses.replace(plan, edges=edges), frozen=frozen)
    with _failing(f"{where}, in halves"):
        sliced = [int(stage.local_batch_size % 2 == 0) for stage in plan.stages]
        _proved(where, plan.with_each(num_sliced=sliced))
    return orders


def _with_counts(plan: PipelinePlan, *, more: int = 0) -> PipelinePlan:
    """Return the plan with the in-flight counts that its schedules ask for, and ``more``, at most all there are."""
    counts = [min(count + more, plan.num_micro_batches(i)) for i, count in enumerate(plan_in_flight(plan))]
    return plan.with_each(in_flight=counts)


def _proved(
    where: str, plan: PipelinePlan, *, frozen: frozenset[int] = frozenset()
) -> tuple[StageSchedule, ...]:
    """Return the orders of a plan whose programs were proved, with reductions at the end and behind each backward."""
    orders = build_schedules(plan, forward_only_stages=frozen)
    check_schedules(plan, orders)
    for stage, order in zip(plan.stages, orders, strict=True):
        held = order.num_in_flight
        _require(
            held <= stage.in_flight, where, f"holds {held} on {stage.name!r}, in_flight is {stage.in_flight}"
        )
    for reduce_each_backward in (False, True):
        programs = lower_schedules(
            plan, orders, forward_only_stages=frozen, reduce_each_backward=reduce_each_backward
        )
        validate_programs(plan, orders, programs)
    predict_iteration_us(plan, schedules=orders)
    return orders


# ---- transports ----------------------------------------------------------------------------------------------


def check_transport(transport: str, *, device: str = "cpu") -> None:
    """Send messages of every kind over a transport, between processes of this machine, and compare what arrives.

    Three ranks run the programs of a small plan: messages of one and of several tensors, of every dtype class, with
    and without a batch axis, in both directions, receives posted ahead as far as the transport allows, twice over.

    Args:
        transport: a registered name; the processes look it up themselves.
        device: of the tensors; with ``cuda`` each rank takes the device of its number.

    Raises:
        CheckFailed: something did not arrive as it was sent; with the last lines of the rank.
    """
    where = f"transport {transport!r}"
    with _failing(where):
        TRANSPORTS.load(transport)
        # what this process can import, its ranks can; the package first, so that ranks run the same release
        paths = [str(Path(__file__).parents[1]), *(path for path in sys.path if path)]
        events = run_ranks(
            "gpp_plugin.transport_trial",
            [transport, device],
            num_ranks=TRANSPORT_RANKS,
            timeout_s=TRANSPORT_TIMEOUT_S,
            environment={"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))},
        )
        _require(
            [event["event"] for event in events] == ["done"], where, "a rank ended before its messages did"
        )


# ---- what all checks say -------------------------------------------------------------------------------------


def _require(holds: bool, where: str, what: str) -> None:
    if not holds:
        raise CheckFailed(f"{where}: {what}")


@contextlib.contextmanager
def _failing(where: str) -> Iterator[None]:
    """Turn whatever goes wrong inside into a `CheckFailed` that says in which case."""
    try:
        yield
    except CheckFailed:
        raise
    except Exception as error:
        kind = "" if isinstance(error, GppError) else f"{type(error).__name__}: "
        raise CheckFailed(f"{where}: {kind}{error}") from error
