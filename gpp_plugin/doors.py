"""What may be added from outside: the signatures of a planner, a schedule, a transport and a backend.

A package adds one by an entry point, whose value is an object of the shape described here; from then on its name
may stand in the ``graph_pipeline`` block and on the command line like those of the plugin itself, which come
through the same table (`gpp_plugin.extensions`)::

    [project.entry-points."gpp_plugin.planners"]        a `Planner`:          (PlanRequest) -> PipelinePlan
    halves = "my_package.planner:halves"
    [project.entry-points."gpp_plugin.schedules"]       a `Schedule`:         the order of each stage's tasks
    patient = "my_package.schedule:PATIENT"
    [project.entry-points."gpp_plugin.transports"]      a `TransportFactory`: what carries messages of a rank
    relay = "my_package.transport:RELAY"
    [project.entry-points."gpp_plugin.backends"]        a `Backend`:          runs forwards of stages that do not train
    swift = "my_package.backend:SWIFT"

A planner decides which blocks share a stage and which ranks hold it; a schedule in which order a stage runs its
micro-batches; a transport how rows travel between two ranks; a backend how operators without a backward are computed.
None decides more: whatever they answer is validated (`plan.validate_plan`, `schedule.checks.validate_programs`,
`backends.stage_backends`) before a rank uses it, so that a mistake is an error and never a hang or another loss.
`gpp_plugin.testing` runs the same checks in the package's own tests (backends are checked where they run).

`Schedule`, `TransportFactory` and `Backend` are classes to derive from: what a subclass leaves out has the usual
answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Message
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.ir.tensors import TensorSpec

if TYPE_CHECKING:
    from gpp_plugin.backends.forward_code import ForwardCode, ForwardRunner
    from gpp_plugin.collage.patterns import BasePatternRule, OperatorPattern
    from gpp_plugin.plan.request import PlanRequest
    from gpp_plugin.runtime.messages.pending import Post
    from gpp_plugin.runtime.messages.wires import Wire

__all__ = [
    "Backend",
    "Channel",
    "PipelinePlan",
    "Planner",
    "Schedule",
    "StageSchedule",
    "Task",
    "TaskKind",
    "Transport",
    "TransportFactory",
    "TransportRequest",
    "planner_traits",
]

Channel = tuple[int, int]
"""(sending rank, receiving rank): the messages of one, of whatever edges, keep their order."""


# ---- planners ------------------------------------------------------------------------------------------------


class Planner(Protocol):
    """Cuts a model into stages and gives each its ranks: a function of one `PlanRequest`.

    ``request.graph`` has the blocks, in a topological order, and the tensors between them; ``request.profile`` what
    each costs for how many samples; ``request.cluster`` the devices and links. `gpp_plugin.api.build_plan` makes a
    `PipelinePlan` of stages given as `StageDraft`, with edges, in-flight counts, times and memory.

    The answer must use ranks 0 .. ``num_ranks`` - 1 each once, hold every block in one stage, order stages so that
    data flows from earlier to later ones, stay within the memory of its ranks, and keep what the request fixes
    (``num_stages``, ``data_parallel``, ``micro_batch_sizes``). The same request gives the same plan: rank 0 plans, but
    a plan is also compared with that of an earlier run.

    A function may be marked with `planner_traits`; without it a block is a layer and pipelines are synchronous.
    """

    def __call__(self, request: PlanRequest, /) -> PipelinePlan:
        """Return the plan.

        Raises:
            PlanInfeasible: no plan meets the request; one line with what to change.
        """


_Function = TypeVar("_Function", bound=Callable[..., PipelinePlan])


def planner_traits(
    *, granularity: str = "layer", is_asynchronous: bool = False
) -> Callable[[_Function], _Function]:
    """Return a decorator that says what is unusual about a planner.

    Args:
        granularity: the blocks it works with where the user names none: ``layer``, ``sub_layer`` or ``node``.
        is_asynchronous: it plans mode ``async`` itself, weights of several ages included. The plan of any other
            planner is made for mode ``sync`` and converted (`plan.given.asynchronous_plan`).
    """

    def mark(function: _Function) -> _Function:
        setattr(function, "granularity", granularity)  # noqa: B010 - a function has no such attribute to a type checker
        setattr(function, "is_asynchronous", is_asynchronous)  # noqa: B010
        return function

    return mark


# ---- schedules -----------------------------------------------------------------------------------------------


class Schedule(Protocol):
    """Orders the tasks of stages; an instance is what the entry point names.

    A stage of M micro-batches runs F0 .. F(M-1), one forward each, and M backwards, B or I and W, in an order of the
    schedule's choice with at most ``stage.in_flight`` micro-batches between their forward and the end of their
    backward. 1F1B with three in flight and M = 5::

        F0 F1 F2 B0 F3 B1 F4 B2 B3 B4        `" ".join(str(task)[1:] for task in order.tasks)`

    Orders are made from the sinks of the stage graph to its sources, so that a stage sees those of all stages that
    read from it. Messages need no thought: lowering puts them between the tasks, and refuses orders that wait for
    each other. Forwards in halves (``slicing``) are put in afterwards.
    """

    holds_all: bool = False
    """Every micro-batch is held at once, as in GPipe: planners then count memory so."""

    takes_turns: bool = False
    """Where a rank holds several stages, forwards and backwards may come in another order than `order` gives, as long
    as no more is held: the rank alternates between them, not each stage (interleaved 1F1B)."""

    splits_backward: bool = False
    """Backwards may be made in two parts (I and W): what that costs is then measured beforehand."""

    def order(self, plan: PipelinePlan, index: int, behind: Mapping[int, StageSchedule]) -> StageSchedule:
        """Return the order of stage ``index`` of ``plan``, all forwards whole.

        Args:
            behind: the orders of at least all stages that depend on this one, by their index.

        Raises:
            ValueError, ScheduleError: its ``in_flight`` does not allow one; one line with what to change.
        """

    def free_order(
        self, plan: PipelinePlan, index: int, behind: Mapping[int, StageSchedule]
    ) -> StageSchedule | None:
        """Return the order that stage ``index`` would have if memory were no limit: it holds what that holds.

        None, the usual answer, lets the stage hold what its successors ask for by GraphPipe's Table 2, as 1F1B does.
        In-flight counts of this stage and of those before it are not known yet.
        """
        return None

    def together(
        self, plan: PipelinePlan, stages: Sequence[int], built: Mapping[int, StageSchedule]
    ) -> Mapping[int, StageSchedule]:
        """Return orders that replace those of some of ``stages``, now that all stages have one.

        Args:
            stages: all stages with this schedule through which gradients flow.
            built: the order of every stage of the plan.

        Raises:
            ValueError, ScheduleError: as `order`.
        """
        return {}


# ---- transports ----------------------------------------------------------------------------------------------


class Transport(Protocol):
    """Binds messages; ``wires`` are the tensors they hold, at least one, ``edge`` is how errors call their edge.

    Messages of one `Channel` are posted on both sides in the same order and may be matched by it. Ranks post messages
    in an order in which all programs finish even if each post waited for its other end (`schedule.placement`), so a
    transport may let them wait for each other in that order, and in no other. Shapes and types are frozen in the
    wires: nothing but rows is sent. ``bind_*`` is called once a message when a program is compiled, what it returns
    once a mini-batch.

    One transport serves all programs of a job, in training and in evaluation, which run one after the other.
    """

    prepost_depth: int
    """How many receives ahead of their place receives may be posted: 0 where a posted one keeps anything waiting."""

    prepost_bytes: int
    """How many bytes of receives may be posted ahead, beyond the next one."""

    buffers_ahead: int
    """How many receives ahead buffers on a CUDA device are made. Where any are, a receive is posted with a current
    stream that waits for what used their memory before and for nothing else (`runtime.messages.receive_buffers`)."""

    def bind_send(self, message: Message, wires: Sequence[Wire], edge: str) -> Post:
        """Return what sends the message."""

    def bind_receive(self, message: Message, wires: Sequence[Wire], edge: str) -> Post:
        """Return what receives the message."""

    def open(self, channels: Collection[Channel]) -> None:
        """Make what it lacks to serve these channels too; collective: every rank names the same, in any order."""

    def close(self) -> None:
        """Let go of its process groups, when nothing is posted; every rank does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportRequest:
    """What a transport is made for; the same on every rank.

    Args:
        plan: of training, whose messages it carries first.
        specs: the tensors of the plan's edges by name.
        channels: all channels of the plan's programs, those of other ranks among them, in no order.
        device: of this rank's tensors, as torch writes it: ``cpu``, ``cuda:0``.
        backend: of the job's default group: ``nccl`` where each rank has a CUDA device of its own, else ``gloo``.
        timeout_s: seconds after which a wait for a message ends with `CommTimeout`.
    """

    plan: PipelinePlan
    specs: Mapping[str, TensorSpec]
    channels: frozenset[Channel]
    device: str
    backend: str
    timeout_s: float


class TransportFactory(Protocol):
    """Makes the transport of a rank; an instance is what the entry point names."""

    def check(self, device: str) -> None:
        """Refuse a job in which it cannot work, before a model is captured; the same on every rank.

        The usual answer is that it can.

        Raises:
            ConfigError: what is missing, and what to do.
        """
        return None

    def make(self, request: TransportRequest) -> Transport:
        """Return this rank's transport. Collective: every rank calls it, so it may make process groups.

        Raises:
            ConfigError: it cannot carry these messages.
        """


# ---- backends ------------------------------------------------------------------------------------------------


class Backend(Protocol):
    """Runs operators of a stage that takes no gradients; an instance is what the entry point names.

    Whatever it makes is compared with what torch makes of the same tensors before it is used
    (`backends.stage_backends`): an error, or a result beyond the tolerance, leaves the stage on torch, with a warning.
    """

    patterns: Sequence[OperatorPattern] = ()
    """Groups of operators that it runs as one (`gpp_plugin.add_backend_pattern` adds more)."""

    pattern_rules: Sequence[BasePatternRule] = ()
    """Rules by which such groups are found (`gpp_plugin.add_backend_pattern_rule` adds more)."""

    is_graph_library: bool = True
    """It takes any operators, whole stages too, as far as `build` can convert them. Without it, it gets the groups of
    its patterns and rules alone."""

    reads_weights: bool = False
    """What it built reads the parameters where they lie each time, instead of a copy: it need not be built anew where
    they change."""

    def missing(self) -> str:
        """Return what is to be installed, in one line, or nothing where it can be used here. Must be quick."""
        return ""

    def version(self) -> str:
        """Return what its speed depends on beside the operators: versions."""
        return ""

    def refusal(self, code: ForwardCode) -> str:
        """Return why it cannot run this code on this device in these types, in one line; empty where it can."""
        return ""

    def build(self, code: ForwardCode) -> ForwardRunner:
        """Return what computes ``code`` on tensors of the shapes of its examples.

        Raises:
            BackendRefused: it cannot; names the operator. Any other error counts as well.
        """
