"""What a user's loop changes on the model between two steps: honoured, or refused by name before the next one runs.

Stages run what was captured. A look at the modules before each mini-batch finds out what is no longer so:

    written in place: parameters, buffers     the next step uses it, masters take it over (`WeightUpdater.written`)
    parameter.data = tensor                   the same: the values are copied to where the stage has them
    module.buffer = tensor                    the same
    requires_grad_(False), and True again     the parameter stays as it is meanwhile: no momentum, no decay, no norm
    hooks on parameters (`register_hook`)     called once a step, with the whole gradient; one that makes something else
                                              of a sum than of its parts is refused where a step has several units
    attributes (of classes too), modes        the model is traced with the old and the new ones: where the traces are
                                              the same, training continues; else the change is refused
    other modules or parameters, hooks of     refused
    one module or of all, a model in eval
    mode as a whole, a parameter that is in
    no optimizer group and takes a gradient

The look compares what Python holds by identity: no value of a tensor is read. What it cannot see are changes inside
objects that have no attributes of their own (a numpy array, an object of C), in containers of more than `MAX_ENTRIES`,
and in globals.

Source: this project
Tests: tests/integrations/test_model_watch.py, tests/integrations/test_model_changes.py
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import operator
import sys
import types
from collections import deque
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpp_plugin.capture.eager.trial_run import GLOBAL_HOOKS, MODULE_HOOKS, is_within
from gpp_plugin.capture.tracing.carried_state import is_users
from gpp_plugin.capture.tracing.outside import refill
from gpp_plugin.engine.rank_engine import RankEngine, StageEngine
from gpp_plugin.errors import ConfigError
from gpp_plugin.runtime.stage_module import WatchedModule

logger = logging.getLogger(__name__)

MAX_DEPTH, MAX_ENTRIES = 3, 1024
"""How deep containers and objects that are attributes of a module are looked into, and the largest ones that are."""
COMPARED = 4096
"""Elements of a tensor that is compared with its copies."""
ANEW = "start anew from a checkpoint with it so before deepspeed.initialize"


@dataclass(slots=True, eq=False)
class _Table:
    """A dictionary or a list that a module holds, and what was in it.

    Args:
        path: of the module; ``name`` of the attribute that it is, "" of the module's own attributes.
        items: it; ``known``: its keys and values, of a list its positions.
        is_shared: other attributes are, or hold, the same object: code may come to it by any of them.
        kind: the class whose attributes these are.
    """

    path: str
    name: str
    items: Any
    known: dict[Any, Any]
    is_shared: bool = False
    kind: type | None = None

    def now(self) -> dict[Any, Any]:
        """Return its keys and values."""
        if isinstance(self.items, (list, deque)):
            return dict(enumerate(self.items))
        return dict(self.items)

    def described(self, key: Any) -> str:
        """Return what an error calls an entry."""
        owner = self.path if self.kind is None else self.kind.__name__
        return ".".join(part for part in (owner, self.name, str(key)) if part)

    def put(self, values: Mapping[Any, Any]) -> None:
        """Put entries in."""
        if self.kind is not None:
            for key in self.items.keys() - values.keys():
                delattr(self.kind, key)
            for key, value in values.items():
                if self.items.get(key, _ABSENT) is not value:
                    setattr(self.kind, key, value)
            return
        refill(self.items, values if isinstance(self.items, dict) else values.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Change:
    """An entry of a table that is another one now."""

    table: _Table
    key: Any
    old: Any
    new: Any


_ABSENT = object()
_VERSION = operator.attrgetter("_version")
_FLAGS = operator.attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")


@torch.no_grad()
def _adds_up(hook: Any, parameter: Tensor) -> bool:
    """Return whether a hook only looks, or gives for a sum of gradients the sum of what it gives for each.

    It is called with made-up gradients of many magnitudes: once where it only looks, else three times.
    """
    draw = torch.Generator().manual_seed(0)

    def made() -> Tensor:
        sizes = 10 ** (10 * torch.rand(parameter.shape, generator=draw) - 7)
        return (torch.randn(parameter.shape, generator=draw) * sizes).to(parameter)

    one, other = made(), made()
    first = hook(one.clone())
    if first is None:
        return True
    parts = first.double(), hook(other.clone()).double()
    whole = hook(one + other).double()
    rounding = 8 * torch.finfo(parameter.dtype).eps * (parts[0].abs() + parts[1].abs() + whole.abs())
    return bool(((whole - parts[0] - parts[1]).abs() <= rounding).all())


class ModelWatch:
    """Looks whether the model is still what was captured; one a rank.

    Args:
        watched: the captured modules.
        stages: this rank's.
        num_units: loss units of a step.
    """

    def __init__(self, watched: Sequence[WatchedModule], stages: RankEngine, num_units: int = 1) -> None:
        self._stages = stages
        self._weights = stages.weights
        self.num_units = num_units
        self._tables = [(each, _tables_of(each.module)) for each in watched]
        self._all = [table for _, tables in self._tables for table in tables]
        self._items = [table.items for table in self._all]
        self._known = self._held_now()
        self._reads: dict[str, frozenset[tuple[str, str]]] = {}
        # by identity: groups of an optimizer may know a tied one by another name
        trained = {id(p): name for stage in stages.stages for name, p in stage.trained.items()}
        self._parameters = [
            (stage, trained.get(id(parameter), name), parameter)
            for stage in stages.stages
            for name, parameter in stage.module.named_parameters()
        ]
        self._trained = [id(parameter) in trained for _, _, parameter in self._parameters]
        self._initial_flags = [parameter.requires_grad for _, _, parameter in self._parameters]
        self._frozen: list[nn.Parameter] = []
        self._copies = _copies_of(stages)
        for stage, name, parameter in self._parameters:
            self._take_hooks(stage, name, parameter)
        self._flags: list[tuple[Any, ...]] = [_FLAGS(parameter) for _, _, parameter in self._parameters]
        self._versions: list[int] = []
        self._addresses: list[int] = []
        self._homes: list[Tensor] = []
        self.note()

    # ---- the look ------------------------------------------------------------------------------------------

    def note(self) -> None:
        """Take parameters as they are for what the last step left."""
        parameters = [parameter for _, _, parameter in self._parameters]
        addresses, self._versions = list(map(Tensor.data_ptr, parameters)), list(map(_VERSION, parameters))
        if addresses != self._addresses:  # in mode async, at each step
            self._addresses, self._homes = addresses, [parameter.data for parameter in parameters]

    def _held_now(self) -> tuple[list[int], list[Any]]:
        """Return how many entries each table has, and all of them: about half a microsecond a module."""
        filled = [
            items if isinstance(items, (list, deque)) else items.values() for items in self._items if items
        ]
        return list(map(len, self._items)), list(itertools.chain.from_iterable(filled))

    def look(self, *, is_training: bool = True) -> None:
        """Honour what has changed since the last step.

        Args:
            is_training: a mini-batch of training is next; an evaluation has modes of its own.

        Raises:
            ConfigError: something cannot be honoured; names it.
        """
        # one comparison of lists by identity a step, in C; tables are looked into where it fails:
        #   known    [..., training True, beta 0.5]
        #   now      [..., training True, beta 5.0]  ->  beta, an attribute of the root
        try:
            is_same = self._held_now() == self._known
        except (RuntimeError, ValueError, TypeError):  # tensors and arrays do not say whether they are equal
            is_same = False
        if not is_same:
            for watched, tables in self._tables:
                self._settle(watched, tables, is_training=is_training)
            if is_training:  # an evaluation leaves modes that training would mind
                self._known = self._held_now()
        self._look_at_parameters()

    def take_written(self) -> None:
        """Let the stages have what was written to parameters and buffers: a checkpoint is next.

        Raises:
            ConfigError: something cannot be honoured; names it.
        """
        for watched, tables in self._tables:
            for table in tables:
                for change in _changes_in(table) if table.name == "_buffers" else ():
                    self._take_buffer(watched, change)
        self._look_at_parameters()

    def _look_at_parameters(self) -> None:
        parameters = [parameter for _, _, parameter in self._parameters]
        flags = list(map(_FLAGS, parameters))
        if (
            flags != self._flags
            or list(map(_VERSION, parameters)) != self._versions
            or list(map(Tensor.data_ptr, parameters)) != self._addresses
        ):
            self._settle_parameters()
            self._flags = list(map(_FLAGS, parameters))
        # through `.data`, which no version shows, to parameters without values (ZeRO 3)
        for weights in self._weights:
            if written := weights.written():
                raise _written_in_parts(next(name for _, name, p in self._parameters if id(p) in written))
        for first, others in self._copies:
            self._write_copies(first, others)

    @contextlib.contextmanager
    def as_captured(self) -> Iterator[None]:
        """Let parameters that are frozen meanwhile take the gradients that the stages' programs count on."""
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            for parameter in self._frozen:
                parameter.requires_grad_(False)

    # ---- parameters ----------------------------------------------------------------------------------------

    def _settle_parameters(self) -> None:
        resting: list[nn.Parameter] = []
        frozen: dict[int, set[str]] = {}
        for number, (stage, name, parameter) in enumerate(self._parameters):
            takes_gradient, *hooks = _FLAGS(parameter)
            if parameter.data_ptr() != self._addresses[number]:
                self._take_back(name, parameter, self._homes[number])
                stage.update.is_written = True
            if parameter._version != self._versions[number]:
                stage.update.is_written = True
                weights = stage.weights
                if (
                    weights is not None
                    and weights.versions.get(id(parameter), parameter._version) != parameter._version
                ):
                    raise _written_in_parts(name)
            if any(hooks):
                self._take_hooks(stage, name, parameter)
            if self._trained[number] and not takes_gradient:
                resting.append(parameter)
                frozen.setdefault(stage.stage_index, set()).add(name)
            if takes_gradient and not self._trained[number] and not self._initial_flags[number]:
                raise ConfigError(
                    f"{name} takes a gradient now, and is in no optimizer group: it took none when the model was "
                    "captured. To train it later, let it take one at the start and freeze it with "
                    "requires_grad_(False) after deepspeed.initialize"
                )
        self._frozen = resting
        for stage in self._stages.stages:
            stage.update.frozen = frozenset(frozen.get(stage.stage_index, ()))

    @torch.no_grad()
    def _write_copies(self, first: Tensor, others: Sequence[Tensor]) -> None:
        """Let other stages of the rank have what was written to the one tensor that users see of it."""
        # a large one is compared first where that is quicker: elements spread evenly, as masters are
        stride = max(first.numel() // COMPARED, 1)
        for other in others:
            if (
                first.is_cuda
                or stride == 1
                or not torch.equal(first.reshape(-1)[::stride], other.reshape(-1)[::stride])
            ):
                other.data.copy_(first)

    @torch.no_grad()
    def _take_back(self, name: str, parameter: nn.Parameter, home: Tensor) -> None:
        """Copy values that were put in place of a parameter's own to where its stage has it."""
        replaced = parameter.data
        if home.shape != replaced.shape or any(s == 0 for s in home.stride() if home.numel() > 1):
            raise ConfigError(
                f"{name}.data was replaced by a tensor {list(replaced.shape)}, its stage has {list(home.shape)}, or "
                "holds it in parts (ZeRO 3); write into it in place, within engine.gathered_parameters()"
            )
        home.copy_(replaced)
        parameter.data = home

    def _take_hooks(self, stage: StageEngine, name: str, parameter: nn.Parameter) -> None:
        """Let hooks on a parameter be called with its whole gradient, once a step, in place of autograd."""
        if parameter._post_accumulate_grad_hooks:
            raise ConfigError(
                f"{name} has a hook of register_post_accumulate_grad_hook, and gradients of a pipeline lie in buffers "
                "of their stages; use register_hook, which is called with the whole gradient once a step"
            )
        if not parameter._backward_hooks:
            return
        if stage.stage.tensor > 1 or (stage.is_partitioned and stage.stage.num_replicas > 1):
            raise ConfigError(
                f"{name} has a hook of register_hook, and no rank has its whole gradient: stage {stage.stage.name!r} "
                f"is on {len(stage.stage.ranks)} ranks that hold parts of it; set zero_optimization.stage to 0 and "
                "tensor_parallel to 1, or remove the hook"
            )
        if name in stage.trained:
            if self.num_units > 1 and not all(
                _adds_up(h, parameter) for h in parameter._backward_hooks.values()
            ):
                raise ConfigError(
                    f"{name} has a hook of register_hook that makes something else of a sum of gradients than of its "
                    f"parts, and a step has {self.num_units} loss units: one process calls it for each, a pipeline "
                    "once with their sum; let it be a factor or a mask, or set gradient_accumulation_steps to 1"
                )
            stage.update.hooks.setdefault(name, []).append(parameter._backward_hooks)
        parameter._backward_hooks = None

    # ---- modules -------------------------------------------------------------------------------------------

    def _settle(self, watched: WatchedModule, tables: list[_Table], *, is_training: bool) -> None:
        changes = [change for table in tables for change in _changes_in(table)]
        attributes = []
        for change in changes:
            table, key = change.table, change.key
            if table.name == "_buffers":
                self._take_buffer(watched, change)
            elif table.name in (*MODULE_HOOKS, *GLOBAL_HOOKS):
                if table.name in MODULE_HOOKS and table.path in watched.eager:
                    continue  # it runs with the hooks that it has
                where = "all modules" if table.name in GLOBAL_HOOKS else table.path or "the model"
                raise ConfigError(
                    f"hooks on {where} were registered or removed after deepspeed.initialize, and "
                    "stages run what was captured: remove new ones (handle.remove()), and register hooks before "
                    "deepspeed.initialize"
                )
            elif table.name in ("_parameters", "_modules"):
                what = "parameter" if table.name == "_parameters" else "module"
                raise ConfigError(
                    f"{what} {'.'.join(p for p in (table.path, str(key)) if p)} was replaced after "
                    "deepspeed.initialize; write new values into the old one in place (with torch.no_grad(): "
                    f"parameter.copy_(value)), or {ANEW}"
                )
            elif key != "training" or is_training:
                attributes.append(change)
        if attributes and (known := self._refusal(watched, attributes)) is not None:
            raise known
        for table in tables:
            if all(change.table is not table for change in changes) or not is_training:
                continue
            table.known = table.now()

    def _refusal(self, watched: WatchedModule, changes: Sequence[_Change]) -> ConfigError | None:
        """Return the error of attributes that change what is computed; None where they do not."""
        modes = [change for change in changes if change.key == "training" and not change.table.name]
        if modes and not any(module.training for module in watched.module.modules()):
            return ConfigError(
                "the model is in eval mode, and was captured in train mode, which stages run: call its train() before "
                "the next mini-batch, or engine.eval_batch for an evaluation"
            )
        reads = self._reads.get(watched.prefix)
        if reads is not None and not any(_is_read(change, reads) for change in changes):
            return None
        new, reads = self._trace(watched)
        if reads is not None:
            self._reads[watched.prefix] = reads
            changes = [change for change in changes if _is_read(change, reads)]
        if not changes:
            return None
        # what runs as it is does so on a copy, whose attributes no trace shows
        paths = [change.table.path for change in changes]
        is_inside = any(is_within(path, eager) for path in paths for eager in watched.eager)
        if new is not None and not is_inside and new == self._trace_of_old(watched, changes):
            return None
        first = changes[0]
        more = f" (and {len(changes) - 1} more)" if len(changes) > 1 else ""
        if first.key == "training" and not first.table.name:
            where = first.table.path or "the model"
            now, then = ("train" if mode else "eval" for mode in (first.new, first.old))
            return ConfigError(
                f"{where} is in {now} mode{more}, and was in {then} mode when the "
                f"model was captured, which stages run: call {where}.{then}(), or {ANEW}"
            )
        return ConfigError(
            f"{first.table.described(first.key)} is {_short(first.new)}{more}, and was {_short(first.old)} when the "
            f"model was captured, which stages run: set it back, or {ANEW}; a value that changes while training "
            "belongs into a buffer (register_buffer), and is written into it in place"
        )

    def _trace_of_old(self, watched: WatchedModule, changes: Sequence[_Change]) -> str | None:
        """Return the trace of a module with what it had when it was captured."""
        tables = {id(change.table): change.table for change in changes}.values()
        values = [table.now() for table in tables]
        try:
            for table in tables:
                table.put(table.known)
            return self._trace(watched)[0]
        finally:
            for table, value in zip(tables, values, strict=True):
                table.put(value)

    def _trace(self, watched: WatchedModule) -> tuple[str | None, frozenset[tuple[str, str]] | None]:
        try:
            return watched.trace()
        except Exception as error:  # whatever the model raises with these attributes: they matter
            logger.debug("cannot be traced as it is: %s", error)
            return None, None

    @torch.no_grad()
    def _take_buffer(self, watched: WatchedModule, change: _Change) -> None:
        """Copy a buffer that was assigned to where the stages have it."""
        table, leaf = change.table, str(change.key)
        name = watched.prefix + ".".join(part for part in (table.path, leaf) if part)
        held = [
            buffer
            for stage in self._stages.stages
            for own, buffer in stage.module.named_buffers()
            if own == name
        ]
        if not isinstance(change.new, Tensor) or any(
            b.shape != change.new.shape or b.dtype != change.new.dtype for b in held
        ):
            raise ConfigError(
                f"buffer {name} was replaced by {_short(change.new)} after deepspeed.initialize; write into it in "
                f"place, or {ANEW}"
            )
        for buffer in held:
            buffer.copy_(change.new)
        if held:
            table.items[leaf] = held[0]


def _written_in_parts(name: str) -> ConfigError:
    return ConfigError(
        f"{name} was written to while its stage's ranks hold parts of it (ZeRO 3); write within "
        "engine.gathered_parameters(), on all ranks alike"
    )


def _copies_of(stages: RankEngine) -> list[tuple[Tensor, list[Tensor]]]:
    """Return the tensors that several stages of the rank hold, each the first one's and the others'."""
    held: dict[str, list[Tensor]] = {}
    for stage in stages.stages if len(stages.stages) > 1 else ():
        if stage.weights is None:  # held in parts, they are written as all ranks gather them
            for name, tensor in (*stage.module.named_parameters(), *stage.module.named_buffers()):
                held.setdefault(name, []).append(tensor)
    return [(first, others) for first, *others in held.values() if others]


# ---- what a module holds ------------------------------------------------------------------------------------


def _tables_of(model: nn.Module) -> list[_Table]:
    """Return all that a module's behaviour hangs on in Python: attributes, tables, containers and objects in them."""
    tables: list[_Table] = []
    seen: dict[int, _Table] = {}

    def add(path: str, name: str, value: Any, depth: int) -> None:
        if id(value) in seen:
            first = seen[id(value)]
            for table in tables:
                table.is_shared |= table.path == first.path and f"{table.name}.".startswith(f"{first.name}.")
            return
        items = value if isinstance(value, (dict, list, deque)) else _attributes(value)
        if items is None or depth > MAX_DEPTH or len(items) > MAX_ENTRIES:
            return
        known = dict(items) if isinstance(items, dict) else dict(enumerate(items))
        seen[id(value)] = _Table(path, name, items, known)
        tables.append(seen[id(value)])
        for key, inner in known.items():
            add(path, f"{name}.{key}", inner, depth + 1)

    for path, module in model.named_modules():
        own = vars(module)
        tables.append(_Table(path, "", own, dict(own)))
        for name, value in own.items():
            if name in ("_parameters", "_buffers", "_modules", *MODULE_HOOKS):
                tables.append(_Table(path, name, value, dict(value)))
            elif not name.startswith("_") or not isinstance(value, dict):
                add(path, name, value, 1)
    tables += [_Table("", name, table, dict(table)) for name, table in GLOBAL_HOOKS.items()]
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if is_users(kind)}
    tables += [_Table("", "", vars(kind), dict(vars(kind)), kind=kind) for kind in sorted(kinds, key=str)]
    return tables


_WITHOUT_ATTRIBUTES = (
    type,
    types.FunctionType,
    types.MethodType,
    types.BuiltinFunctionType,
    types.ModuleType,
    functools.partial,
)


def _attributes(value: Any) -> MutableMapping[str, Any] | None:
    """Return the attributes of an object that may say how a module behaves (a configuration); None of all else."""
    if isinstance(value, (nn.Module, Tensor, *_WITHOUT_ATTRIBUTES)):
        return None
    root = type(value).__module__.partition(".")[0]
    if root in ("torch", "numpy") or (root in sys.stdlib_module_names and root not in ("types", "argparse")):
        return None
    return getattr(value, "__dict__", None)


def _changes_in(table: _Table) -> list[_Change]:
    now, known = table.now(), table.known
    return [
        _Change(table=table, key=key, old=known.get(key, _ABSENT), new=now.get(key, _ABSENT))
        for key in {**known, **now}
        if not _is_same(known.get(key, _ABSENT), now.get(key, _ABSENT))
    ]


def _is_read(change: _Change, reads: frozenset[tuple[str, str]]) -> bool:
    table = change.table
    if table.kind is not None:
        return any(name == change.key for _, name in reads)
    name = (table.name or str(change.key)).partition(".")[0]  # the attribute by which code comes to the entry
    return table.is_shared or (table.path, name) in reads


def _is_same(old: Any, new: Any) -> bool:
    if old is new:
        return True
    if type(old) is not type(new) or isinstance(old, (Tensor, nn.Module)):
        return False
    try:
        return bool(old == new)
    except Exception:  # whatever a comparison raises: they are not known to be the same
        return False


def _short(value: Any) -> str:
    if value is _ABSENT:
        return "not there"
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
