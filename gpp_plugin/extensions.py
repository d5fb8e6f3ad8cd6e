"""The one place that knows planners, schedules, transports and backends by name: the plugin's own and those of others.

Every name stands for an object of the shape that `gpp_plugin.doors` describes, written as an entry point is,
``module:object``. The plugin's own are in the tables below, others come from installed packages' entry points of the
same group, so that both go one way::

    "planner": "halves"  ->  PLANNERS  ->  built in?  "gpp_plugin.plan.auto:auto_plan"
                                           else       entry point "halves" of some package
                                       ->  imported, its shape checked, remembered

Nothing is imported before it is asked for by its name, and packages are not looked through before the first name is:
reading a configuration stays quick, and a broken package troubles nobody who does not name what it offers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from gpp_plugin.errors import ExtensionError, nearest

if TYPE_CHECKING:  # `config` imports this file, and loads without what a plan is made of
    from gpp_plugin.doors import Backend, Planner, Schedule, TransportFactory

BACKEND_WORDS = ("off", "auto")
"""What stands for no backend but torch's operators, and for the fastest of all, where users name backends."""

SCHEDULE_FORMS = re.compile(r"auto|kfkb|[1-9]\d*f[1-9]\d*b")
"""Names of schedules that users write and that are no entry of the table: any kFkB, and what stands for several."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Door:
    """One kind of thing that may be added.

    Args:
        group: of its entry points.
        kind: what it is called in errors.
        built_in: the plugin's own, by name.
        wrong_shape: what is wrong with an object for this door, as the end of a sentence; empty where nothing is.
        is_taken: whether a name means something else already.
    """

    group: str
    kind: str
    built_in: Mapping[str, str]
    wrong_shape: Callable[[Any], str]
    is_taken: Callable[[str], bool] = lambda name: False

    def __contains__(self, name: str) -> bool:
        return name in self.built_in or name in _offers(self.group) or (self.group, name) in _LENT

    def names(self) -> tuple[str, ...]:
        """Return all names that may be asked for: the plugin's own in the table's order, then others, sorted."""
        added = {name for group, name in _LENT if group == self.group}
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

    def load(self, name: str) -> Any:
        """Return the object called ``name``; imported the first time, remembered after that.

        Raises:
            ExtensionError: there is none, several are called so, it cannot be imported, or it is no such thing.
        """
        if (self.group, name) in _LENT:
            return _LENT[self.group, name]
        return _load(self, name)

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
        _LENT[self.group, name] = found

    def remove(self, name: str) -> None:
        """Forget what `add` gave a name to; nothing where it did not."""
        _LENT.pop((self.group, name), None)

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


_LENT: dict[tuple[str, str], Any] = {}
"""What `Door.add` and `Door.lent` give names to at present, by group and name."""


@functools.cache
def _load(door: Door, name: str) -> Any:
    # In this order: unknown, a clash with the plugin or between packages, then what can only be seen by importing it.
    # A clash is an error where the name is used, not where packages are looked through: a stranger's "uniform"
    # must stop the job that asks for "uniform", whose planner would be a guess, and no other one.
    offers = _offers(door.group).get(name, ())
    if not offers and name not in door.built_in:
        raise ExtensionError(
            f"no {door.kind} {name!r}{door.suggestion(name)}; give one of {', '.join(door.names())}"
        )
    where = f"{door.group}: {door.kind} {name!r}"
    packages = " and ".join(repr(package) for package, _ in offers)
    if offers and (name in door.built_in or door.is_taken(name)):
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
        return pkgutil.resolve_name(door.built_in[name])
    ((_, value),) = offers
    advice = f"repair or uninstall the package, or use another {door.kind}"
    # ``value`` is ``module:object``, as setuptools keeps it; with extras ("m:f [x]") it is no name and fails here
    try:
        found = pkgutil.resolve_name(value)
    except Exception as error:  # whatever a foreign module does when it is imported
        text = " ".join(str(error).split())
        raise ExtensionError(
            f"{where} of package {packages} ({value}) cannot be loaded: {type(error).__name__}: {text}; {advice}"
        ) from error
    wrong = door.wrong_shape(found)
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
            f"is {_described(found)}; a planner is a function of one PlanRequest (gpp_plugin.doors.Planner)"
        )
    return ""


def _wrong_schedule(found: Any) -> str:
    from gpp_plugin.doors import Schedule

    return _wrong_object(found, Schedule, ("order", "free_order", "together"), required="order")


def _wrong_transport(found: Any) -> str:
    from gpp_plugin.doors import TransportFactory

    return _wrong_object(found, TransportFactory, ("make", "check"), required="make")


def _wrong_backend(found: Any) -> str:
    from gpp_plugin.doors import Backend

    return _wrong_object(found, Backend, ("missing", "version", "refusal", "build"), required="build")


def _wrong_object(found: Any, base: type, methods: tuple[str, ...], *, required: str) -> str:
    """Return what is wrong with an object that should have the methods of ``base``, ``required`` of its own."""
    advice = f"derive a class from gpp_plugin.doors.{base.__name__} and name an instance of it"
    if isinstance(found, type):
        return f"is {_described(found)}; name an instance of it"
    missing = [name for name in methods if not callable(getattr(found, name, None))]
    if getattr(type(found), required, None) is getattr(base, required):
        missing = [required]
    return f"is {_described(found)} without {' and '.join(missing)}; {advice}" if missing else ""


def _described(found: Any) -> str:
    return (
        f"the class {found.__name__}"
        if isinstance(found, type)
        else f"an object of type {type(found).__name__}"
    )


# ---- the doors -----------------------------------------------------------------------------------------------

PLANNERS = Door(
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

SCHEDULES = Door(
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
    wrong_shape=_wrong_schedule,
    is_taken=lambda name: SCHEDULE_FORMS.fullmatch(name) is not None,
)

TRANSPORTS = Door(
    group="gpp_plugin.transports",
    kind="transport",
    built_in=MappingProxyType(
        {
            "native": "gpp_plugin.runtime.messages.transport:NATIVE_TRANSPORT",
            "megatron": "gpp_plugin.integrations.megatron.p2p:MEGATRON_TRANSPORT",
        }
    ),
    wrong_shape=_wrong_transport,
)

BACKENDS = Door(
    group="gpp_plugin.backends",
    kind="backend",
    built_in=MappingProxyType(
        {
            "torch": "gpp_plugin.backends.torch_backends:TORCH",
            "inductor": "gpp_plugin.backends.torch_backends:INDUCTOR",
            "onnxruntime": "gpp_plugin.backends.exported_backends:ONNXRUNTIME",
            "openvino": "gpp_plugin.backends.exported_backends:OPENVINO",
        }
    ),
    wrong_shape=_wrong_backend,
    is_taken=lambda name: name in BACKEND_WORDS,
)

DOORS = (PLANNERS, SCHEDULES, TRANSPORTS, BACKENDS)


def find_planner(name: str) -> Planner:
    """Return the planner called ``name``; see `Door.load`."""
    planner: Planner = PLANNERS.load(name)
    return planner


def find_schedule(name: str) -> Schedule:
    """Return the schedule called ``name`` (a `Stage.schedule`); see `Door.load`."""
    schedule: Schedule = SCHEDULES.load(name)
    return schedule


def find_transport(name: str) -> TransportFactory:
    """Return what makes the transport called ``name``; see `Door.load`."""
    factory: TransportFactory = TRANSPORTS.load(name)
    return factory


def find_backend(name: str) -> Backend:
    """Return the backend called ``name``; see `Door.load`."""
    backend: Backend = BACKENDS.load(name)
    return backend


def named_backends(asked: Any) -> list[Any]:
    """Return the backends that a value of the key ``backends`` names: those of a list, or of an object's stages."""
    values = asked.values() if isinstance(asked, Mapping) else asked
    return [] if isinstance(values, str) or not isinstance(values, Iterable) else list(values)


def planner_granularity(name: str) -> str:
    """Return the blocks that a planner works with where the user names none; ``layer`` where there is no such one."""
    if name not in PLANNERS:
        return "layer"
    granularity: str = getattr(find_planner(name), "granularity", "layer")
    return granularity
