"""What may be added from outside: the signatures of a planner, a schedule, a transport and a backend.

A package adds one by an entry point, whose value is an object of the shape described here; from then on its name
may stand in the ``graph_pipeline`` block and on the command line like those of the plugin itself, which come
through the same table::

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

import contextlib
import functools
import importlib
import importlib.metadata
import pkgutil
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from gpp_plugin.errors import ExtensionError, nearest
from gpp_plugin.ir.plan import PipelinePlan
from gpp_plugin.ir.program import Message
from gpp_plugin.ir.schedule import StageSchedule, Task, TaskKind
from gpp_plugin.ir.tensors import TensorSpec

if TYPE_CHECKING:
    from gpp_plugin.backends.forward_code import ForwardCode, ForwardRunner
    from gpp_plugin.collage.patterns import BasePatternRule, OperatorPattern
    from gpp_plugin.plan.request import PlanRequest
    from gpp_plugin.runtime.messages.routes import Payload

if TYPE_CHECKING:  # `config` imports this file, and loads without what a plan is made of
    from gpp_plugin.ir.plan import Stage

# The registry: planners, schedules, transports and backends by name, the plugin's own and those of other packages.
#
# Every name stands for an object of the shapes below, written as an entry point is,
# ``module:object``. The plugin's own are in the tables below, others come from installed packages' entry points of the
# same group, so that both are loaded alike::
#
#     "planner": "halves"  ->  PLANNERS  ->  built in?  "gpp_plugin.plan.auto:auto_plan"
#                                            else       entry point "halves" of some package
#                                        ->  imported, its shape checked, remembered
#
# Nothing is imported before its name is requested, and packages are not searched before that:
# reading a configuration stays quick, and a broken package troubles nobody who does not name what it offers.

BACKEND_WORDS = ("off", "auto")
"""What stands for no backend but torch's operators, and for the fastest of all, where users name backends."""

T = TypeVar("T")

SCHEDULE_FORMS = re.compile(r"auto|kfkb|[1-9]\d*f[1-9]\d*b")
"""Names of schedules that users write and that are no entry of the table: any kFkB, and what stands for several."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PluginKind(Generic[T]):
    """One kind of thing that may be added.

    Args:
        group: of its entry points.
        kind: what it is called in errors.
        built_in: the plugin's own, by name.
        wrong_shape: what is wrong with an object of this kind, as the end of a sentence; empty where nothing is.
        is_taken: whether a name means something else already.
    """

    group: str
    kind: str
    built_in: Mapping[str, str]
    wrong_shape: Callable[[Any], str]
    is_taken: Callable[[str], bool] = lambda name: False

    def __contains__(self, name: str) -> bool:
        return name in self.built_in or name in _offers(self.group) or (self.group, name) in _ADDED

    def names(self) -> tuple[str, ...]:
        """Return all names that can be loaded: the plugin's own in the table's order, then others, sorted."""
        added = {name for group, name in _ADDED if group == self.group}
        return (*self.built_in, *sorted((set(_offers(self.group)) | added) - set(self.built_in)))

    def suggestion(self, name: str) -> str:
        """Return ``; did you mean ...?`` with the name most like ``name``, or nothing where none is."""
        return nearest(name, self.names())

    def check(self, name: str) -> None:
        """Refuse a known name that cannot be used. What packages add is imported for it, the plugin's own is not.

        Raises:
            ExtensionError: as `load`.
        """
        if name in _offers(self.group):
            self.load(name)

    def load(self, name: str) -> T:
        """Return the object called ``name``; imported the first time, remembered after that.

        Raises:
            ExtensionError: there is none, several are called so, it cannot be imported, or it is no such thing.
        """
        found: T = _ADDED[self.group, name] if (self.group, name) in _ADDED else _load(self, name)
        return found

    def add(self, name: str, found: Any) -> None:
        """Let ``name`` stand for an object in this process from now on.

        Raises:
            ExtensionError: the name is known already, or the object is no such thing.
        """
        if name in self or self.is_taken(name):
            raise ExtensionError(f"{self.group}: there is a {self.kind} {name!r} already; use another name")
        wrong = self.wrong_shape(found)
        if wrong:
            raise ExtensionError(f"{self.group}: {self.kind} {name!r} {wrong}")
        _ADDED[self.group, name] = found

    def remove(self, name: str) -> None:
        """Forget what `add` gave a name to; nothing where it did not."""
        _ADDED.pop((self.group, name), None)

    @contextlib.contextmanager
    def lent(self, name: str, found: Any) -> Iterator[str]:
        """Let ``name`` stand for an object of this process alone: in a test, or a notebook where it is written.

        Raises:
            ExtensionError: as `add`.
        """
        self.add(name, found)
        try:
            yield name
        finally:
            self.remove(name)


_ADDED: dict[tuple[str, str], Any] = {}
"""What `PluginKind.add` and `PluginKind.lent` have named, by group and name."""


@functools.cache
def _load(kind: PluginKind[Any], name: str) -> Any:
    # In this order: unknown, a clash with the plugin or between packages, then what can only be seen by importing it.
    # A clash is an error where the name is used, not where packages are looked through: a stranger's "uniform"
    # must stop the job that names "uniform", whose planner would be a guess, and no other one.
    offers = _offers(kind.group).get(name, ())
    if not offers and name not in kind.built_in:
        raise ExtensionError(
            f"no {kind.kind} {name!r}{kind.suggestion(name)}; give one of {', '.join(kind.names())}"
        )
    where = f"{kind.group}: {kind.kind} {name!r}"
    packages = " and ".join(repr(package) for package, _ in offers)
    if offers and (name in kind.built_in or kind.is_taken(name)):
        raise ExtensionError(
            f"{where} of package {packages} has a name that gpp_plugin uses itself; give its entry point another "
            "name, or uninstall the package"
        )
    if len(offers) > 1:
        raise ExtensionError(
            f"{where} is offered by the packages {packages}; uninstall all but one, or give an entry point another "
            "name"
        )
    if not offers:
        return pkgutil.resolve_name(kind.built_in[name])
    ((_, value),) = offers
    advice = f"repair or uninstall the package, or use another {kind.kind}"
    # ``value`` is ``module:object``, as setuptools keeps it; with extras ("m:f [x]") it is no name and fails here
    try:
        found = pkgutil.resolve_name(value)
    except Exception as error:  # whatever a foreign module does when it is imported
        text = " ".join(str(error).split())
        raise ExtensionError(
            f"{where} of package {packages} ({value}) cannot be loaded: {type(error).__name__}: {text}; {advice}"
        ) from error
    wrong = kind.wrong_shape(found)
    if wrong:
        raise ExtensionError(f"{where} of package {packages} ({value}) {wrong}; {advice}")
    return found


@functools.cache
def _offers(group: str) -> Mapping[str, tuple[tuple[str, str], ...]]:
    """Return what installed packages offer in a group: name -> (package, ``module:object``) of each that does."""
    found: dict[str, tuple[tuple[str, str], ...]] = {}
    for point in importlib.metadata.entry_points(group=group):
        package = point.dist.name if point.dist is not None else "of no name"
        found[point.name] = (*found.get(point.name, ()), (package, point.value))
    return found


def look_again() -> None:
    """Forget what was found: packages installed or removed since (in a notebook, say) are seen from now on."""
    importlib.invalidate_caches()
    _offers.cache_clear()
    _load.cache_clear()


# ---- shapes --------------------------------------------------------------------------------------------------


def _wrong_planner(found: Any) -> str:
    if isinstance(found, type) or not callable(found):
        return (
            f"is {_described(found)}; a planner is a function of one PlanRequest (gpp_plugin.plugins.Planner)"
        )
    return ""


def _wrong_object(found: Any, base: type, required: str, *others: str) -> str:
    """Return what is wrong with an object that should have the methods of ``base``, ``required`` of its own."""
    advice = f"derive a class from gpp_plugin.plugins.{base.__name__} and name an instance of it"
    if isinstance(found, type):
        return f"is {_described(found)}; name an instance of it"
    missing = [name for name in (required, *others) if not callable(getattr(found, name, None))]
    if getattr(type(found), required, None) is getattr(base, required):
        missing = [required]
    return f"is {_described(found)} without {' and '.join(missing)}; {advice}" if missing else ""


def _described(found: Any) -> str:
    is_class = isinstance(found, type)
    return f"the class {found.__name__}" if is_class else f"an object of type {type(found).__name__}"


# ---- the kinds -----------------------------------------------------------------------------------------------

PLANNERS: PluginKind[Planner] = PluginKind(
    group="gpp_plugin.planners",
    kind="planner",
    built_in=MappingProxyType(
        {
            "auto": "gpp_plugin.plan.auto:auto_plan",
            "autopipe": "gpp_plugin.plan.baselines.autopipe:autopipe_plan",
            "dapple": "gpp_plugin.plan.baselines.dapple:dapple_plan",
            "dawnpiper": "gpp_plugin.plan.memory.dawnpiper:dawnpiper_plan",
            "graphpipe": "gpp_plugin.plan.graphpipe.graphpipe:graphpipe_plan",
            "pipedream": "gpp_plugin.plan.baselines.piper:pipedream_plan",
            "piper": "gpp_plugin.plan.baselines.piper:piper_plan",
            "stock_1f1b": "gpp_plugin.plan.baselines.stock_chain:stock_plan",
            "uniform": "gpp_plugin.plan.baselines.stock_chain:uniform_plan",
            "vpipe": "gpp_plugin.plan.baselines.vpipe:vpipe_plan",
        }
    ),
    wrong_shape=_wrong_planner,
)

SCHEDULES: PluginKind[Schedule] = PluginKind(
    group="gpp_plugin.schedules",
    kind="schedule",
    built_in=MappingProxyType(
        {
            "1f1b": "gpp_plugin.schedule.orders.kfkb:ONE_F_ONE_B",
            "gpipe": "gpp_plugin.schedule.orders.gpipe:GPIPE",
            "greedy": "gpp_plugin.schedule.orders.greedy:GREEDY",
            "zero_bubble": "gpp_plugin.schedule.orders.zero_bubble:ZERO_BUBBLE",
        }
    ),
    wrong_shape=lambda found: _wrong_object(found, Schedule, "order", "free_order", "together"),
    is_taken=lambda name: SCHEDULE_FORMS.fullmatch(name) is not None,
)

TRANSPORTS: PluginKind[TransportFactory] = PluginKind(
    group="gpp_plugin.transports",
    kind="transport",
    built_in=MappingProxyType(
        {
            "native": "gpp_plugin.runtime.messages.transport:NATIVE_TRANSPORT",
            "megatron": "gpp_plugin.integrations.megatron.p2p:MEGATRON_TRANSPORT",
        }
    ),
    wrong_shape=lambda found: _wrong_object(found, TransportFactory, "make", "check"),
)

BACKENDS: PluginKind[Backend] = PluginKind(
    group="gpp_plugin.backends",
    kind="backend",
    built_in=MappingProxyType(
        {
            "torch": "gpp_plugin.backends.library_backends:TORCH",
            "inductor": "gpp_plugin.backends.library_backends:INDUCTOR",
            "onnxruntime": "gpp_plugin.backends.library_backends:ONNXRUNTIME",
            "openvino": "gpp_plugin.backends.library_backends:OPENVINO",
        }
    ),
    wrong_shape=lambda found: _wrong_object(found, Backend, "build", "missing", "version", "refusal"),
    is_taken=lambda name: name in BACKEND_WORDS,
)

PLUGIN_KINDS: tuple[PluginKind[Any], ...] = (PLANNERS, SCHEDULES, TRANSPORTS, BACKENDS)


find_planner, find_schedule = PLANNERS.load, SCHEDULES.load
find_transport, find_backend = TRANSPORTS.load, BACKENDS.load


def named_backends(value: Any) -> list[Any]:
    """Return the backends that a value of the key ``backends`` names: those of a list, or of an object's stages."""
    values = value.values() if isinstance(value, Mapping) else value
    return [] if isinstance(values, str) or not isinstance(values, Iterable) else list(values)


def planner_granularity(name: str) -> str:
    """Return the blocks that a planner works with where the user names none; ``layer`` where there is no such one."""
    if name not in PLANNERS:
        return "layer"
    granularity: str = getattr(find_planner(name), "granularity", "layer")
    return granularity


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
    `PipelinePlan` of `StageDraft` stages, with edges, in-flight counts, times and memory.

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
            planner is made for mode ``sync`` and converted (`plan.explicit_plan`).
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
    read from it. Messages need no care: lowering puts them between the tasks, and refuses orders that wait for
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

        None, the usual answer: the stage holds what its successors need by GraphPipe's Table 2, as 1F1B does.
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


class Pending(Protocol):
    """The posted transfers of one message."""

    def wait(self) -> None:
        """Complete them: a receive's buffers may be read, sent tensors may be reused.

        Raises:
            CommTimeout: the peer did not answer in time, or is gone.
        """

    def is_done(self) -> bool:
        """Return whether `wait` would return at once."""


Post: TypeAlias = "Callable[[Sequence[Any]], Pending]"
"""Posts the transfers of one message: of contiguous tensors to send, or into contiguous buffers.

A buffer may get other memory when its receive is posted: read it after `Pending.wait` only.
"""


class Transport(Protocol):
    """Binds messages; ``payloads`` are the tensors they hold, at least one, ``edge`` is how errors call their edge.

    Messages of one `Channel` are posted on both sides in the same order and may be matched by it. Ranks post messages
    in an order in which all programs finish even if each post waited for its other end (`schedule.lower`), so a
    transport may let them wait for each other in that order, and in no other. Shapes and types are frozen in the
    payloads: nothing but rows is sent. ``bind_*`` is called once a message when a program is compiled, what it returns
    once a mini-batch.

    One transport serves all programs of a job, in training and in evaluation, which run one after the other.
    """

    prepost_depth: int
    """How many receives ahead of their place receives may be posted: 0 where a posted one keeps anything waiting."""

    prepost_bytes: int
    """How many bytes of receives may be posted ahead, beyond the next one."""

    buffers_ahead: int
    """How many receives ahead buffers on a CUDA device are made. Where any are, a receive is posted with a current
    stream that waits for what used their memory before and for nothing else (`runtime.messages.mailbox`)."""

    def bind_send(self, message: Message, payloads: Sequence[Payload], edge: str) -> Post:
        """Return what sends the message."""

    def bind_receive(self, message: Message, payloads: Sequence[Payload], edge: str) -> Post:
        """Return what receives the message."""

    def open(self, channels: Collection[Channel]) -> None:
        """Make what it lacks to serve these channels too; collective: every rank names the same, in any order."""

    def close(self) -> None:
        """Release its process groups, when nothing is posted; every rank does."""


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


# ---- names of schedules as users write them: those that are registered, any kFkB, and what stands for several ----

AUTO = "auto"
KFKB = "kfkb"


def schedule_names() -> tuple[str, ...]:
    """Return what a user may write; ``2f2b`` stands for any k, with ``kfkb`` the simulation chooses k."""
    first, *others = SCHEDULES.names()
    return (AUTO, first, "2f2b", KFKB, *others)


def k_of(name: str) -> int | None:
    """Return the k of a kFkB's name; None for other names.

    >>> k_of("1f1b"), k_of("4f4b"), k_of("2f3b")
    (1, 4, None)
    """
    found = re.fullmatch(r"([1-9]\d*)f\1b", name)
    return int(found[1]) if found else None


def is_schedule_name(name: str) -> bool:
    """Return whether ``name`` is one of `schedule_names` or another kFkB."""
    return name in (AUTO, KFKB) or k_of(name) is not None or name in SCHEDULES


def unknown_schedule(name: str) -> str:
    """Return what to say of a name that is no schedule: the nearest, and all there are."""
    return f"no schedule {name!r}{nearest(name, schedule_names())}; give one of {', '.join(schedule_names())}"


def schedule_label(stage: Stage) -> str:
    """Return the name of a stage's schedule."""
    return f"{stage.k}f{stage.k}b" if stage.schedule == "1f1b" else stage.schedule


def planning_schedule(name: str) -> str:
    """Return the schedule by which planners count memory where the user names this one."""
    return "gpipe" if name in SCHEDULES and find_schedule(name).holds_all else "1f1b"


def may_split_backward(name: str) -> bool:
    """Return whether a plan for which the user names this schedule may run backwards in two parts."""
    return name == AUTO or (name in SCHEDULES and find_schedule(name).splits_backward)
