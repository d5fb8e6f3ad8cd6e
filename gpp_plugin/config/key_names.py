"""The keys of `config.block` as users name them: in the DeepSpeed JSON, on the command line, as arguments in Python.

A key is its path, and carries no spelling. Where text about it is made, the names in use spell it::

    path                JSON                                 command line          Python
    memory.limit_gb     graph_pipeline.memory.limit_gb       --memory-limit-gb     memory_limit_gb
    mini_batch          train_batch_size                     --mini-batch          mini_batch
    trace_path          graph_pipeline.trace_path            --set trace_path      trace_path

An error of a planner names a key by `name_of`, and so advises what the user can type, whoever called it.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import re
import textwrap
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel
from pydantic.fields import FieldInfo

from gpp_plugin.ir.typed_leaves import show

BLOCK = "graph_pipeline"
M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, eq=False)
class Registered:
    """The values of a key that are registered names, of this package and of others.

    Args:
        names: to choose from.
        is_name: whether a name may be used.
        check: refuses a known name whose package is broken.
        is_open: there are more names than ``names``, any kFkB among them.
    """

    names: Callable[[], Sequence[str]]
    is_name: Callable[[str], bool]
    check: Callable[[str], None]
    is_open: bool = False

    def __call__(self, name: str) -> str:
        """Return a name that may be used.

        Raises:
            ValueError: it may not.
        """
        if not self.is_name(name):
            raise ValueError("no such name")
        self.check(name)
        return name


@dataclass(frozen=True, kw_only=True)
class SchemaKey:
    """One key of the schema.

    Args:
        path: ``memory.limit_gb``; ``mini_batch`` for one beside the block.
        field: its type and default.
        meaning: what it is for.
        model: the model of an object's keys; None where it is no object.
    """

    path: str
    field: FieldInfo
    meaning: str
    model: type[BaseModel] | None

    @property
    def extra(self) -> Mapping[str, Any]:
        """Return what the schema says of it beside its type."""
        found = self.field.json_schema_extra
        return found if isinstance(found, dict) else {}

    @property
    def option(self) -> str:
        """Return its option on the command line, for commands that have one."""
        return str(self.extra.get("option") or "--" + re.sub(r"[._]", "-", self.path))

    @property
    def argument(self) -> str:
        """Return its argument in Python."""
        return str(self.extra.get("argument") or self.path.replace(".", "_"))

    @property
    def json(self) -> str:
        """Return its place in the DeepSpeed JSON, below the block where it is in it."""
        return str(self.extra.get("json") or self.path)

    @property
    def choices(self) -> tuple[str, ...]:
        """Return all values there are, where these are a few names; none where there are numbers or files."""
        if self._registered is not None:
            return tuple(self._registered.names())
        kinds = [kind for kind in _kinds(self.field.annotation) if kind is not type(None)]
        if all(typing.get_origin(kind) is Literal for kind in kinds):
            return tuple(str(value) for kind in kinds for value in typing.get_args(kind))
        return ()

    @property
    def plan_choices(self) -> tuple[str, ...]:
        """Return those of them that are possible without a job."""
        plans = self.extra.get("plans")
        return tuple(plans) if isinstance(plans, (list, tuple)) else self.choices

    @property
    def inner_values(self) -> str:
        """Return the possible values of an entry."""
        inner = self.extra["inner"]
        return f"one of {', '.join(inner.names())}" if isinstance(inner, Registered) else str(inner)

    @property
    def is_closed(self) -> bool:
        """Return whether there are no values but the choices."""
        return bool(self.choices) and not (self._registered is not None and self._registered.is_open)

    @property
    def _registered(self) -> Registered | None:
        found = (kind.func for kind in self.field.metadata if isinstance(kind, AfterValidator))
        return next((each for each in found if isinstance(each, Registered)), None)

    @property
    def values(self) -> str:
        """Return the possible values, as an error says them."""
        if self.field.description:
            return self.field.description
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        kinds = sorted(_kinds(self.field.annotation), key=lambda kind: kind is not type(None))
        return " or ".join(_describe(kind, self.field.metadata) for kind in kinds)


def _kinds(annotation: Any) -> list[Any]:
    """Return the members of a union, or what is no union alone."""
    kind = typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return [each for member in typing.get_args(kind) for each in _kinds(member)]
    return [annotation]


def _describe(kind: Any, bounds: Sequence[Any]) -> str:
    """Return the possible values of one type of a union; ``bounds`` are those of the only one."""
    if typing.get_origin(kind) is Annotated:
        kind, *bounds = typing.get_args(kind)
        bounds = [one for bound in bounds for one in getattr(bound, "metadata", [bound])]
    if kind is type(None):
        return "null"
    if kind is bool:
        return "true or false"
    if typing.get_origin(kind) is Literal:
        return ", ".join(show(value) for value in typing.get_args(kind))
    if kind is int:
        least = next((bound.ge for bound in bounds if hasattr(bound, "ge")), None)
        return "a whole number" if least is None else f"a whole number of at least {least}"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"an object with {', '.join(kind.model_fields)}"
    return "a text"


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """Return name -> text of the ``Args:`` sections of a model and its bases; indented lines continue the one above."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        _, _, section = inspect.cleandoc(vars(each).get("__doc__") or "").partition("Args:\n")
        name = ""
        for line in textwrap.dedent(section).splitlines():
            start = re.match(r"(\w+): (.*)", line)
            if start:
                name = start[1]
                found[name] = start[2]
            elif line.strip() and name:
                found[name] += f" {line.strip()}"
    return found


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[SchemaKey]:
    texts = meanings(model)
    for name, info in model.model_fields.items():
        inner = [
            kind for kind in _kinds(info.annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        yield SchemaKey(
            path=prefix + name, field=info, meaning=texts.get(name, ""), model=inner[0] if inner else None
        )
        for each in inner:
            yield from _keys(each, f"{prefix}{name}.")


def named_schema(model: type[M]) -> type[M]:
    """Take the keys of a model for those that have names: a decorator."""
    # The schema is taken, not imported: it needs the registered planners, and these name keys in their errors.
    _KEYS.update((key.path, key) for key in _keys(model))
    return model


_KEYS: dict[str, SchemaKey] = {}


def all_keys() -> Mapping[str, SchemaKey]:
    """Return every key by its path, those of an object behind it."""
    return _KEYS


# ---- names ---------------------------------------------------------------------------------------------------


class JsonNames:
    """Keys as they stand in the DeepSpeed JSON; what is no key of the schema (``scale_time``) as it is."""

    def name(self, path: str) -> str:
        """Return a key below the block, or one of DeepSpeed's."""
        return all_keys()[path].json if path in all_keys() else path

    def place(self, path: str, inner: Sequence[str]) -> str:
        """Return the whole path of a key, and of an entry in its object; without a key of what is none."""
        if path and (path not in all_keys() or "json" in all_keys()[path].extra):
            return ".".join([self.name(path), *inner])
        return ".".join([BLOCK, *([path] if path else []), *inner])

    def setting(self, path: str, value: Any, *, is_whole: bool = False) -> str:
        """Return the key and its value as JSON."""
        if not is_whole:
            return f"{self.name(path)} {show(value)}"
        *outer, last = self.name(path).split(".")
        text = f"{show(last)}: {show(value)}"
        for name in reversed(outer):
            text = f"{show(name)}: {{{text}}}"
        return f"{text} beside {BLOCK}" if "json" in all_keys()[path].extra else text


@dataclass(frozen=True, kw_only=True)
class CommandNames:
    """Keys as options of a command.

    Args:
        options: paths of keys that have an option there; all others have ``--set``.
        written: how the keys were spelled that have a value.
    """

    options: Collection[str]
    written: Mapping[str, str] = field(default_factory=dict)

    def name(self, path: str) -> str:
        """Return the option, as the user wrote it where there is one."""
        if path in self.written:
            return self.written[path]
        if path not in all_keys():
            return f"--{path.replace('_', '-')}"
        return all_keys()[path].option if path in self.options else f"--set {path}"

    def place(self, path: str, inner: Sequence[str]) -> str:
        """Return the option, and the entry of an object."""
        return ": ".join([self.name(path), *inner] if path else [f"--set {'.'.join(inner)}"])

    def setting(self, path: str, value: Any, *, is_whole: bool = False) -> str:
        """Return the option with its value, as it is typed."""
        option = self.name(path)
        if option.startswith("--set "):
            return f"{option}={option_text(value)}"
        return option if value is True else f"{option} {option_text(value)}"


class ArgumentNames:
    """Keys as arguments of `gpp_plugin.api`."""

    def name(self, path: str) -> str:
        """Return the argument."""
        return all_keys()[path].argument if path in all_keys() else path

    def place(self, path: str, inner: Sequence[str]) -> str:
        """Return the argument, and the entry of a mapping."""
        return self.name(path) + "".join(f"[{key!r}]" for key in inner) if path else ".".join(inner)

    def setting(self, path: str, value: Any, *, is_whole: bool = False) -> str:
        """Return the argument with its value, as it is passed."""
        return f"{self.name(path)}={value!r}"


def option_text(value: Any) -> str:
    """Return a value as it is typed on a command line.

    >>> option_text("auto"), option_text(["recompute", "swap"]), option_text({"text": 4}), option_text(None)
    ('auto', 'recompute,swap', 'text=4', 'null')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and value:
        return ",".join(f"{name}={option_text(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)) and value:
        return ",".join(option_text(each) for each in value)
    return json.dumps(value)


Names = JsonNames | CommandNames | ArgumentNames
JSON_NAMES, ARGUMENT_NAMES = JsonNames(), ArgumentNames()
_IN_USE: ContextVar[Names] = ContextVar("names of keys", default=JSON_NAMES)


@contextlib.contextmanager
def use_names(names: Names) -> Iterator[None]:
    """Spell keys so in errors. Within other names than those of the JSON it has no effect."""
    if _IN_USE.get() is not JSON_NAMES:
        yield
        return
    token = _IN_USE.set(names)
    try:
        yield
    finally:
        _IN_USE.reset(token)


def name_of(path: str) -> str:
    """Return a key within a sentence, as the user spells it.

    >>> import gpp_plugin.config.block  # the schema
    >>> name_of("memory.limit_gb")
    'memory.limit_gb'
    >>> with use_names(ARGUMENT_NAMES):
    ...     name_of("memory.limit_gb")
    'memory_limit_gb'
    """
    return _IN_USE.get().name(path)


def place_of(path: str, *inner: str) -> str:
    """Return a key in front of what is wrong with it, as the user spells it.

    >>> import gpp_plugin.config.block  # the schema
    >>> place_of("micro_batch_sizes", "loss")
    'graph_pipeline.micro_batch_sizes.loss'
    """
    return _IN_USE.get().place(path, inner)


def setting_of(path: str, value: Any, *, is_whole: bool = False) -> str:
    """Return a key with a value, as the user writes it: within a sentence, or as a whole that can be copied.

    >>> import gpp_plugin.config.block  # the schema
    >>> setting_of("memory.swap", "auto"), setting_of("memory.swap", "auto", is_whole=True)
    ('memory.swap "auto"', '"memory": {"swap": "auto"}')
    """
    return _IN_USE.get().setting(path, value, is_whole=is_whole)
