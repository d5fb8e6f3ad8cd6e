"""What a forward keeps on its modules for the next one: found while it is traced, carried as buffers of the graph.

`torch.export` drops assignments and puts attributes back, so that the graph would begin anew each time. Here modules
are compared before and after the traced forward. What it left behind, and had read before it wrote it, is state:

    self.center = 0.9 * self.center + ...     an assigned buffer
    self.calls += 1                           a number: a tensor of the graph without axes
    self.h = h.detach()                       a tensor, or a list, tuple or dict of tensors and numbers

Each is a buffer of the traced copy. The forward reads a clone, and what it leaves is copied into the buffer at its end,
so that stages write, save and move it as they do running statistics. Where there was nothing before the first forward
(``self.h = None``), the state begins with zeros; whether that is the model is for `model.verification` to find out.

Not state: what is written before it is read (a loss saved for its reader; entries of a dict, a list that is cleared
first), and what is the same whatever the batch (a table of positions).

A tensor that is written in place, and no buffer, is found in the graph, as a constant that some operator writes into
(`states_of_written`).

Source: this project
Tests: tests/capture/test_carried_state.py
"""

from __future__ import annotations

import builtins
import functools
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot
from torch.utils import _pytree as pytree

from gpp_plugin.capture.eager.trial_run import TAKEN, Untraceable
from gpp_plugin.capture.tracing.outside import TORCHS_OWN
from gpp_plugin.errors import CaptureError
from gpp_plugin.ir.analysis import CarriedState, StateTensor
from gpp_plugin.ir.block_graph import CARRIED, Parameter, is_carried

MAX_DEPTH = 3
"""How many objects inside each other are looked into."""
_ABSENT = object()
_NUMBERS: Mapping[type, torch.dtype] = {int: torch.int64, float: torch.float64}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class LeavesState(Exception):
    """A traced forward left state behind that was not known of; it is traced anew with it."""

    def __init__(self, states: Sequence[CarriedState]) -> None:
        super().__init__()
        self.states = tuple(states)


# ---- what modules hold --------------------------------------------------------------------------------------


def held_by(model: nn.Module, keep: Callable[[Tensor], Any] = lambda tensor: tensor) -> dict[str, Any]:
    """Return all that a model's modules hold but tensors that are registered, by dotted name: numbers, tensors, texts.

    Args:
        keep: what is noted of a tensor; itself by default.

    Example: of ``self.calls = 3`` and ``self.seen = [h]`` in a module ``decoder`` it returns ``{"decoder.calls": 3,
    "decoder.seen": "list of 1", "decoder.seen[0]": h, ...}``.
    """
    found: dict[str, Any] = {}
    # what is registered is compared as that, whatever else holds it
    met = {id(part) for part in (*model.modules(), *model.parameters(), *model.buffers())}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name not in TORCHS_OWN:
                _note(found, _joined(path, name), value, keep, met)
        for name, value in class_values(type(module)).items():
            found.setdefault(_joined(path, name), value)
        found[_joined(path, "training")] = module.training
    return found


def _note(
    found: dict[str, Any], name: str, value: Any, keep: Callable[[Tensor], Any], met: set[int], depth: int = 0
) -> None:
    if isinstance(value, Tensor):
        found[name] = id(value) if id(value) in met else keep(value)
    elif isinstance(value, nn.Module) and id(value) not in met:  # in a list, so that it is no submodule
        met.add(id(value))
        found[name] = id(value)
        for key, part in (*value.named_parameters(), *value.named_buffers()):
            found[f"{name}.{key}"] = keep(part)
    elif isinstance(value, _PLAIN):
        found[name] = value
    elif isinstance(value, np.ndarray):
        found[name] = value.tobytes()
    elif isinstance(value, (list, tuple, deque, Mapping, set, frozenset)) and depth <= MAX_DEPTH:
        found[name] = f"{type(value).__name__} of {len(value)}"
        parts = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, part in list(parts):
            _note(found, f"{name}[{key!r}]", part, keep, met, depth + 1)
    elif isinstance(value, (nn.Module, type)) or callable(value) or depth > MAX_DEPTH or id(value) in met:
        found[name] = id(value)
    elif attributes := attributes_of(value):
        met.add(id(value))
        found[name] = id(value)
        for key, part in attributes.items():
            _note(found, f"{name}.{key}", part, keep, met, depth + 1)
    elif isinstance(value, Iterator):  # where it is: ``itertools.count(3)``
        found[name] = repr(value)
    else:
        found[name] = id(value)


def is_users(kind: type) -> bool:
    """Return whether a class is none of a library's, so that its attributes are its user's to change."""
    return kind.__module__.partition(".")[0] not in ("torch", "transformers", "builtins", "typing", "abc")


def class_values(kind: type) -> dict[str, Any]:
    """Return the numbers and texts that a user's class of modules has itself, for all of its modules."""
    return {
        name: value
        for each in filter(is_users, reversed(kind.__mro__))
        for name, value in vars(each).items()
        if not name.startswith("__") and isinstance(value, _PLAIN) and value is not None
    }


def attributes_of(value: Any) -> dict[str, Any]:
    """Return what an object's attributes are, those in slots included."""
    slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
    return {**{name: getattr(value, name) for name in slots}, **getattr(value, "__dict__", {})}


def _slots(kind: type) -> tuple[str, ...]:
    names = vars(kind).get("__slots__", ())
    return tuple(n for n in ((names,) if isinstance(names, str) else names) if not n.startswith("__"))


def without_history(model: nn.Module) -> dict[int, Tensor]:
    """Return a memo for `copy.deepcopy`, which refuses tensors that a forward has made and modules keep."""
    tensors = [value for value in held_by(model).values() if isinstance(value, Tensor)]
    return {id(tensor): tensor.detach() for tensor in tensors if not tensor.is_leaf}


def changed_attributes(
    before: Mapping[str, Any], after: Mapping[str, Any], *, by_value: bool = False
) -> list[str]:
    """Return what is not as it was, by its name in what `held_by` returned.

    Args:
        by_value: tensors of equal values are the same; else those that are one object.
    """
    names = dict.fromkeys((*before, *after))
    return [n for n in names if not _is_same(before.get(n, _ABSENT), after.get(n, _ABSENT), by_value)]


def _is_same(one: Any, other: Any, by_value: bool) -> bool:
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        are_tensors = isinstance(one, Tensor) and isinstance(other, Tensor)
        return one is other or (by_value and are_tensors and torch.equal(one, other))
    if one is other:
        return True
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def attribute_of(model: nn.Module, name: str) -> tuple[nn.Module, str, str]:
    """Return the module that a name of `held_by` is in, its path, and which of its attributes that is."""
    path = name.partition("[")[0]
    modules = dict(model.named_modules())
    owner = max((p for p in modules if p == "" or path.startswith(f"{p}.")), key=len)
    leaf = path[len(owner) + 1 :] if owner else path
    return modules[owner], owner, leaf.partition(".")[0]


# ---- while a model is traced --------------------------------------------------------------------------------


def register_states(model: nn.Module, states: Sequence[CarriedState], device: torch.device) -> None:
    """Give a traced copy a buffer for each tensor of its state."""
    for state in states:
        for tensor in state.tensors:
            path, _, leaf = tensor.name.rpartition(".")
            module = model.get_submodule(path)
            if leaf not in module._buffers:
                dtype = getattr(torch, tensor.dtype)
                module.register_buffer(leaf, torch.empty(tuple(tensor.shape), dtype=dtype, device=device))


def described(states: Sequence[CarriedState]) -> tuple[Parameter, ...]:
    """Return the tensors of attributes that are carried as buffers of the model."""
    return tuple(
        Parameter(
            name=tensor.name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            bytes=math.prod(tensor.shape) * getattr(torch, tensor.dtype).itemsize,
            requires_grad=False,
            is_buffer=True,
        )
        for state in states
        for tensor in state.tensors
        if is_carried(tensor.name)
    )


def initial_values(model: nn.Module, wanted: Iterable[Parameter]) -> dict[str, Tensor]:
    """Return what the state of attributes begins with: what the user's model holds, zeros where it holds nothing."""
    found = {}
    for parameter in wanted:
        path, _, leaf = parameter.name.rpartition(".")
        name, _, number = leaf.removeprefix(CARRIED).partition(":")
        leaves = pytree.tree_leaves(vars(model.get_submodule(path)).get(name))
        value = leaves[int(number or 0)] if int(number or 0) < len(leaves) else None
        dtype = getattr(torch, parameter.dtype)
        if isinstance(value, Tensor) and value.shape == parameter.shape and not value.is_meta:
            found[parameter.name] = value.detach().to(dtype, copy=True)
        elif isinstance(value, (int, float)) and not parameter.shape:
            found[parameter.name] = torch.tensor(value, dtype=dtype)
        else:
            found[parameter.name] = torch.zeros(parameter.shape, dtype=dtype)
    return found


@contextmanager
def carried_in(model: nn.Module, states: Sequence[CarriedState]) -> Iterator[None]:
    """Make modules read their state as tensors of the graph, and write what they leave when they are done."""
    read: list[tuple[CarriedState, nn.Module, list[Tensor]]] = []
    for state in states:
        if not state.tensors:
            continue
        path, _, leaf = state.name.rpartition(".")
        module = model.get_submodule(path)
        held = [module.get_buffer(tensor.name.rpartition(".")[2]) for tensor in state.tensors]
        # whole numbers in double precision: what is computed of them is then what Python computes
        clones = [
            buffer.to(torch.float64, copy=True) if tensor.number else buffer.clone()
            for buffer, tensor in zip(held, state.tensors, strict=True)
        ]
        read.append((state, module, held))
        if state.structure:
            value = pytree.tree_unflatten(clones, pytree.treespec_loads(state.structure))
            vars(module)[leaf] = value
        else:
            module._buffers[leaf] = clones[0]
    with _numbers_as_tensors() if read else mock.patch.dict({}):
        yield
    for state, module, held in read:
        leaf = state.name.rpartition(".")[2]
        left = vars(module).get(leaf) if state.structure else module._buffers[leaf]
        leaves, spec = pytree.tree_flatten(left)
        if state.structure and pytree.treespec_dumps(spec) != state.structure:
            raise refused(model, state.name, "is of another structure after each forward")
        for buffer, value in zip(held, leaves, strict=True):
            if not isinstance(value, Tensor):
                buffer.fill_(value)
                continue
            if value.shape != buffer.shape:
                what = f"has shape {list(buffer.shape)} and is left with {list(value.shape)}"
                raise refused(model, state.name, what)
            buffer.copy_(value.detach())
        if not state.structure:
            module._buffers[leaf] = held[0]


@contextmanager
def _numbers_as_tensors() -> Iterator[None]:
    """Make Python's functions of numbers take those that are tensors of the graph: ``min(1.0, self.calls / 100)``."""
    names = ("exp", "log", "sqrt", "sin", "cos", "tanh", "floor", "ceil")
    functions: dict[str, Any] = {
        name: _of_tensor(getattr(math, name), getattr(torch, name)) for name in names
    }
    with (
        mock.patch.object(builtins, "min", _extreme(min, torch.minimum)),
        mock.patch.object(builtins, "max", _extreme(max, torch.maximum)),
        mock.patch.multiple(math, **functions),
    ):
        yield


def _extreme(original: Any, of_two: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    def choose(*args: Any, **kwargs: Any) -> Any:
        numbers = all(isinstance(arg, (Tensor, int, float)) for arg in args)
        if kwargs or len(args) < 2 or not numbers or not any(is_number(arg) for arg in args):
            return original(*args, **kwargs)
        first, *others = (
            arg if isinstance(arg, Tensor) else torch.tensor(arg, dtype=torch.float64) for arg in args
        )
        for other in others:
            first = of_two(first, other)
        return first

    return choose


def _of_tensor(original: Any, function: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    return lambda value, *more: function(value) if is_number(value) and not more else original(value, *more)


def is_number(value: Any) -> bool:
    """Return whether a tensor may stand for a number of Python's."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.dtype is torch.float64


class StateFinder:
    """Finds the state that one traced forward leaves behind.

    Args:
        known: what is carried, or known not to be state, already.
    """

    def __init__(self, model: nn.Module, known: Sequence[CarriedState]) -> None:
        self._model = model
        self._known = {state.name for state in known}
        self._paths = {id(vars(module)): path for path, module in model.named_modules()}
        self._before = held_by(model)
        self._flags = {name: p.requires_grad for name, p in model.named_parameters()}
        self._tables = {path: (dict(m._buffers), dict(m._parameters)) for path, m in model.named_modules()}

    def find(self, first: Mapping[tuple[int, str], bool], again: Callable[[], object]) -> list[CarriedState]:
        """Return the state that was not known of.

        Args:
            first: as of `noted_accesses`.
            again: runs the forward once more, from what the first one left.

        Raises:
            CaptureError: a forward leaves behind what cannot be carried; names it.
        """
        # self.calls += 1; self.last = loss:
        #   before   calls 3, last None        first   calls read, last written
        #   after    calls 4, last <tensor>    state   calls; last is only there for a reader outside
        found = self._assigned_buffers()
        after = held_by(self._model)
        names: dict[str, tuple[nn.Module, str]] = {}
        for changed in changed_attributes(self._before, after):
            module, path, leaf = attribute_of(self._model, changed)
            name = _joined(path, leaf)
            if name not in self._known and first.get((id(vars(module)), leaf), True):
                names[name] = module, leaf
        if not names:
            return found
        left = {name: vars(module).get(leaf, _ABSENT) for name, (module, leaf) in names.items()}
        fixed = {n for n, value in left.items() if not any(map(_depends_on_data, _tensors_in(value)))}
        if fixed:
            # numbers and tables that depend on no data are the model's own cache if a second forward leaves them as is
            shapes = functools.partial(held_by, self._model, keep=lambda t: (tuple(t.shape), t.dtype))
            before = shapes()
            again()
            moved = changed_attributes(before, shapes())
            fixed -= {_joined(path, leaf) for _, path, leaf in (attribute_of(self._model, n) for n in moved)}
        for name, (_, leaf) in names.items():
            is_fixed = name in fixed
            found.append(CarriedState(name=name) if is_fixed else self.as_state(name, leaf, left[name]))
        return found

    def _assigned_buffers(self) -> list[CarriedState]:
        found = []
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad != self._flags.get(name, parameter.requires_grad):
                raise CaptureError(
                    f"{type(self._model).__name__}: the forward sets requires_grad of {name}; set it before "
                    "deepspeed.initialize"
                )
        for path, module in self._model.named_modules():
            buffers, parameters = self._tables.get(path, ({}, {}))
            for leaf, held in module._parameters.items():
                if held is not parameters.get(leaf):
                    raise CaptureError(
                        f"{type(self._model).__name__}: the forward puts another parameter in the place of "
                        f"{_joined(path, leaf)}; write into it: self.{leaf}.data.copy_(...)"
                    )
            for leaf, buffer in module._buffers.items():
                before, name = buffers.get(leaf), _joined(path, leaf)
                if buffer is before or is_carried(leaf) or name in self._known:
                    continue
                if leaf not in buffers:
                    raise CaptureError(
                        f"{type(self._model).__name__}: the forward registers buffer {name}; register it in __init__, "
                        "or call the model once before deepspeed.initialize"
                    )
                if before is None or buffer is None or before.shape != buffer.shape:
                    shapes = [None if t is None else list(t.shape) for t in (before, buffer)]
                    what = f"is {shapes[0]} before a forward and {shapes[1]} after it"
                    raise refused(self._model, name, what)
                tensor = StateTensor(name=name, shape=tuple(before.shape), dtype=_dtype(before))
                found.append(CarriedState(name=name, tensors=(tensor,)))
                module._buffers[leaf] = before
        return found

    def as_state(self, name: str, leaf: str, value: Any) -> CarriedState:
        """Return what carries an attribute that a forward has left so; refuse what cannot be carried."""
        if value is _ABSENT or value is None:
            raise refused(
                self._model, name, "is of its class, for all modules of it", "keep it on the module: self."
            )
        inner = (f"{name}[", f"{name}.")
        before = {n: v for n, v in self._before.items() if n == name or n.startswith(inner)}
        try:
            leaves, spec = pytree.tree_flatten(value)
            structure = pytree.treespec_dumps(spec)
        except Exception as error:
            raise refused(self._model, name, f"is a {type(value).__name__}") from error
        path = name.rpartition(".")[0]
        # self.seen = (h, 3) of a module "decoder" becomes two buffers, decoder.carried:seen:0 [rows, width] and
        # decoder.carried:seen:1 [], with the structure of the tuple beside them
        tensors = []
        for number, part in enumerate(leaves):
            suffix = f":{number}" if len(leaves) > 1 else ""
            own = _joined(path, f"{CARRIED}{leaf}{suffix}")
            if isinstance(part, Tensor):
                if part.requires_grad:
                    raise refused(self._model, name, "takes a gradient", "keep it detached: .detach()")
                tensors.append(StateTensor(name=own, shape=tuple(part.shape), dtype=_dtype(part)))
            elif type(part) in _NUMBERS:
                dtype = str(_NUMBERS[type(part)])[6:]
                tensors.append(StateTensor(name=own, shape=(), dtype=dtype, number=type(part).__name__))
            elif isinstance(part, (torch.SymInt, torch.SymFloat, torch.SymBool)):
                reads = f"is a number {TAKEN}, which only a module that runs as it is may have"
                raise Untraceable(str(refused(self._model, name, reads)), path, is_of_state=True)
            else:
                fix = "register it, in a list as nn.ModuleList" if isinstance(part, nn.Module) else ""
                raise refused(self._model, name, f"holds a {type(part).__name__}", fix)
        num_before = len([v for v in before.values() if isinstance(v, Tensor) or type(v) in _NUMBERS])
        begins_empty = not before or set(before.values()) == {None}
        if not leaves or (num_before != len(leaves) and not begins_empty):
            raise refused(self._model, name, "holds more, or less, after each forward")
        return CarriedState(name=name, tensors=tuple(tensors), structure=structure)


def states_of_written(model: nn.Module, written: Sequence[Tensor]) -> list[CarriedState]:
    """Return the states of tensors that a forward writes in place and that are attributes of modules, no buffers.

    Raises:
        CaptureError: one is held elsewhere.
    """
    places = {tensor.untyped_storage().data_ptr() for tensor in written}
    held = [
        name
        for name, value in held_by(model).items()
        if isinstance(value, Tensor) and not isinstance(value, FakeTensor)
        if value.layout is torch.strided and value.untyped_storage().data_ptr() in places
    ]
    if not held:
        raise CaptureError(
            f"{type(model).__name__}: the forward writes into a tensor {list(written[0].shape)} that none of its "
            "modules holds (a global one, or of a function's closure), so that no stage would have it; register it as "
            "a buffer, and a module as a submodule"
        )
    finder = StateFinder(model, ())
    found = {}
    for name in held:
        module, path, leaf = attribute_of(model, name)
        own = _joined(path, leaf)
        found[own] = finder.as_state(own, leaf, vars(module).get(leaf))
    return list(found.values())


def begins_empty(model: nn.Module, state: CarriedState) -> bool:
    """Return whether a model holds nothing yet where a state will be."""
    path, _, leaf = state.name.rpartition(".")
    value = vars(model.get_submodule(path)).get(leaf)
    return bool(state.structure) and all(part is None for part in pytree.tree_leaves(value))


def refused(model: nn.Module, name: str, what: str, fix: str = "") -> CaptureError:
    """Return the error for state that cannot be part of the graph."""
    return CaptureError(
        f"{type(model).__name__}: the forward keeps {name} for the next one, and it {what}, so it cannot be state of a "
        f"stage; {fix or 'keep a registered buffer, or a tensor or number, of one shape'}"
    )


def _depends_on_data(tensor: Tensor) -> bool:
    """Return whether a traced tensor is made of anything but constants."""
    if not isinstance(tensor, FakeTensor):
        return True  # of a module that was tried as it is, on real tensors
    mode = get_proxy_mode()
    slot: Any = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    if slot is None:
        return False
    pending, seen = [slot.proxy.node], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node.op == "placeholder" or torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            return True
        if node not in seen:
            seen.add(node)
            pending.extend(node.all_input_nodes)
    return False


def _tensors_in(value: Any) -> list[Tensor]:
    found: dict[str, Any] = {}
    _note(found, "", value, lambda tensor: tensor, set())
    return [leaf for leaf in found.values() if isinstance(leaf, Tensor)]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
